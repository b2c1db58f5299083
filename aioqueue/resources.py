"""Opens what the jobs of a worker share, before its first claim, and closes it after its last job.

Both in the task that runs the worker. Whatever closing raises costs no outcome: by then all are written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from .errors import ResourcesFailed
from .events import logger
from .outcome import ErrorText

T = TypeVar("T")


@contextlib.asynccontextmanager
async def opened(make: Callable[[], AbstractAsyncContextManager[T]], *, close_within: float) -> AsyncIterator[T]:
    """Hold the resources open for the block; closing has `close_within` seconds, then it is cancelled.

    Raises ResourcesFailed where they cannot be opened, and where they end the block themselves: a task group among them whose
    task fails cancels whoever holds it open. What else closing raises is logged.
    """
    try:
        manager = make()
        value = await manager.__aenter__()
    except Exception as error:
        raise _failure("could not be opened", error) from error
    closing = _Closing(manager, close_within)
    try:
        yield value
    except BaseException as error:
        await closing.close(error)
        if isinstance(error, asyncio.CancelledError) and not _cancelled():
            # It was theirs, not their holder's.
            if closing.failed is not None:
                raise _failure("failed while the worker ran", closing.failed) from closing.failed
            if closing.quiet:
                return
        closing.log()
        raise
    await closing.close(None)
    closing.log()


class _Closing:
    """The end of the resources, and what became of it."""

    def __init__(self, manager: AbstractAsyncContextManager[object], seconds: float) -> None:
        self._manager = manager
        self._seconds = seconds
        self.failed: Exception | None = None
        self.quiet = False
        """Whether they want what they were closed for to end here."""

    async def close(self, reason: BaseException | None) -> None:
        told = (None, None, None) if reason is None else (type(reason), reason, reason.__traceback__)
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                self.quiet = bool(await self._manager.__aexit__(*told))
        except Exception as error:
            if limit.expired():
                self.failed = TimeoutError(f"they had {self._seconds:g} s to close, and were cancelled")
            elif error is not reason:
                self.failed = error
        except asyncio.CancelledError:
            if reason is None:
                raise

    def log(self) -> None:
        if self.failed is not None:
            logger.error("closing the resources failed; the outcomes of all jobs are written already", exc_info=self.failed)


def _failure(what: str, error: Exception) -> ResourcesFailed:
    text = ErrorText.of(error, with_traceback=False)
    return ResourcesFailed(what, f"{text.type}: {text.message}")


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
