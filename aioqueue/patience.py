"""Patience at the start: a database that cannot be reached yet is waited for, up to a limit, with one line in the log.

Later outages are the loops' own affair. An error that waiting would not mend is raised at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from .database import connection_lost
from .events import logger

T = TypeVar("T")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between attempts; doubling, jittered."""


async def once_reached(attempt: Callable[[], Awaitable[T]], seconds: float, failed: Callable[[str], None]) -> T:
    """Attempt it until the database is reached, at most so long, then raise its last error; an attempt under way is let end.

    `failed` is told of every attempt that fails.
    """
    began = time.monotonic()
    pause = SHORTEST_PAUSE
    said = False
    while True:
        try:
            return await attempt()
        except psycopg.Error as error:
            left = began + seconds - time.monotonic()
            if left <= 0 or not connection_lost(error):
                raise
            text = " ".join(str(error).split())
            failed(text)
            if not said:
                said = True
                logger.warning("cannot reach the database, and go on trying for %g s: %s", seconds, text)
        await asyncio.sleep(min(left, random.uniform(pause / 2, pause)))
        pause = min(2 * pause, LONGEST_PAUSE)
