"""Patience at the start: a database that cannot be reached yet is waited for, up to a limit, with one line in the log.

Later outages are the loops' own affair. An error that waiting would not mend is raised at once.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from .events import logger
from .server import connection_lost

T = TypeVar("T")

REFUSALS = re.compile(
    r"FATAL: +(?:(?:database|role) .* does not exist|.*authentication failed|no pg_hba\.conf entry)|no password supplied"
)
"""What the server, or libpq, says of a wrong DSN. There is no SQLSTATE of it: libpq keeps none of an attempt to connect."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between attempts; doubling, jittered."""


def refused(error: psycopg.Error) -> bool:
    """Whether the server answers, and refuses database, role or password: only another DSN would mend that."""
    return isinstance(error, psycopg.OperationalError) and REFUSALS.search(str(error)) is not None


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
            if left <= 0 or not connection_lost(error) or refused(error):
                raise
            text = " ".join(str(error).split())
            failed(text)
            if not said:
                said = True
                logger.warning("cannot reach the database, and go on trying for %g s: %s", seconds, text)
        await asyncio.sleep(min(left, random.uniform(pause / 2, pause)))
        pause = min(2 * pause, LONGEST_PAUSE)
