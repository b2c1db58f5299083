"""The threads in which a worker runs `def` tasks: at most one for each of its slots, made as they are needed.

Whatever a function raises comes out of the await, also what an executor's future does not carry.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .attempt import Run


class JobThreads:
    """The threads of one worker."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._executor: ThreadPoolExecutor | None = None

    async def call(self, run: Run, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function of a job in a thread, in a copy of the caller's context."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._number, thread_name_prefix="aioqueue job")
        context = contextvars.copy_context()
        run.thread = asyncio.get_running_loop().run_in_executor(self._executor, lambda: context.run(_call, fn, args, kwargs))
        try:
            return _unwrap(await asyncio.shield(run.thread))
        except asyncio.CancelledError:
            # A thread cannot be stopped: it is told by should_stop, and keeps its slot until it is over. After the abandon limit
            # of a run that the runtime has ended its outcome is written without it.
            if run.cause is None and not await _told(run, run.thread):
                raise
            await asyncio.wait([run.thread])
            return _unwrap(run.thread.result())

    def close(self) -> None:
        """Let go of the threads; those that still run end with the process."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


async def _told(run: Run, thread: asyncio.Future[Any]) -> bool:
    """Ask the thread to stop for a cancellation that is not the runtime's, but a middleware's time-out, and wait for it.

    Whether the runtime's came meanwhile, which counts then.
    """
    run.should_stop = True
    try:
        await asyncio.wait([thread])
    except asyncio.CancelledError:
        if run.cause is None:
            raise
        return True
    if run.cause is None:
        run.should_stop = run.saw_stop = False  # the middleware may go on, and call again
    return False


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
    # An exception such as SystemExit or StopIteration must not pass through an executor's future.
    try:
        return fn(*args, **kwargs), None
    except BaseException as error:
        return None, error


def _unwrap(result: tuple[Any, BaseException | None]) -> Any:
    value, error = result
    if error is not None:
        raise error
    return value
