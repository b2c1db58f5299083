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
            if run.cause is None:
                raise
            # should_stop has told it; a thread cannot be stopped, so it keeps its slot until it is over. After the abandon
            # limit its outcome is written without it.
            await asyncio.wait([run.thread])
            return _unwrap(run.thread.result())

    def close(self) -> None:
        """Let go of the threads; those that still run end with the process."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


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
