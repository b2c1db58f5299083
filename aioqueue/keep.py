"""Keeps what must never end going: a loop that fails is logged and started again, and a stop outlasts cancellations.

Knows nothing of what it keeps. A loop copes with the errors it expects by itself; what arrives here is a bug, and a bug of
one loop must not silence it, nor end the others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from .events import logger

T = TypeVar("T")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a failed loop is started again; doubling, jittered."""
HEALTHY = 30.0
"""Seconds that a loop must have run for its next failure to count as the first."""


async def keep_running(run: Callable[[], Awaitable[object]], name: str) -> None:
    """Run a loop for ever, until cancelled; one that fails or returns is logged with its traceback and started again."""
    pause = SHORTEST_PAUSE
    task = asyncio.current_task()
    while True:
        began = time.monotonic()
        try:
            await run()
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            logger.exception("the %s was cancelled by nobody; it is started again", name)
        except Exception:
            logger.exception("the %s failed; it is started again", name)
        else:
            logger.error("the %s has returned, which it never should; it is started again", name)
        if time.monotonic() - began > HEALTHY:
            pause = SHORTEST_PAUSE
        await asyncio.sleep(random.uniform(pause / 2, pause))
        pause = min(2 * pause, LONGEST_PAUSE)


def _nothing() -> None:
    pass


async def outlast(task: asyncio.Task[T], cancelled: Callable[[], None] = _nothing) -> T:
    """Wait for a task to its end whoever cancels us and however often, natively or by an anyio scope; its result.

    `cancelled` is called for each native cancellation; the last one is raised once the task has ended.
    """
    interrupted: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                interrupted = error
                cancelled()
    if interrupted is not None:
        if not task.cancelled():
            task.exception()  # fetched, so that it is not reported as lost
        raise interrupted
    return task.result()
