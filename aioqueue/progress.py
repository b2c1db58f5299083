"""What a task says about how far it is: `progress`, `track`, and their forms for threads.

The face only, and the base of all that a task is given. It hands the last value to the worker's reporter (report.py), which
writes it beside the job: a hint, that no job waits for or fails by.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from typing import SupportsFloat, TypeVar

from .claimed import Held_co, JobFacts
from .outcome import storable

T = TypeVar("T")

MESSAGE_LIMIT = 200
"""Characters of a message; of a longer one head and tail are kept."""
TRACK_INTERVAL = 0.05
"""Seconds between two reports of a `track`; what is written is throttled further by the worker."""
ROUNDING = 1e-9
"""How far beyond 0 and 1 a sum of floats may be."""


class Reporting(JobFacts[Held_co]):
    """A running job that can say how far it is."""

    __slots__ = ()

    async def progress(self, value: float, message: str | None = None) -> None:
        """Say how far the job is: a number from 0 to 1, and a short text for people.

        Whoever asks for the job sees it at once, also from inside a transaction: it is sent outside of it, by the worker, and
        stays if that is rolled back. A hint, which nothing waits for: written four times a second at most, and always the
        last; late while the database is away. Raises ValueError or TypeError for what is no such number or text.
        """
        self.progress_sync(value, message)
        await asyncio.sleep(0)  # a loop without any other await must let the report out

    def progress_sync(self, value: float, message: str | None = None) -> None:
        """Do as `progress` does, from any thread: for `def` tasks."""
        share, text = _checked(value, message)
        reporter = self._job.reporter
        if reporter is not None:
            reporter.report(self._job, share, text)

    async def track(self, iterable: AsyncIterable[T] | Iterable[T], total: int | None = None) -> AsyncIterator[T]:
        """Iterate, and report on the way how many items are done: `async for page in ctx.track(pages):`.

        `total` is the number of items, len(iterable) where it has one; without, only the number is told, not the share.
        """
        total = _total(iterable, total)
        done, due = 0, 0.0
        if isinstance(iterable, AsyncIterable):
            async for item in iterable:
                if (now := time.monotonic()) >= due:
                    due = now + TRACK_INTERVAL
                    await self.progress(*_counted(done, total))
                yield item
                done += 1
        else:
            for item in iterable:
                if (now := time.monotonic()) >= due:
                    due = now + TRACK_INTERVAL
                    await self.progress(*_counted(done, total))
                yield item
                done += 1
        await self.progress(1.0, _counted(done, total)[1])

    def track_sync(self, iterable: Iterable[T], total: int | None = None) -> Iterator[T]:
        """Do as `track` does, from any thread: `for page in ctx.track_sync(pages):`."""
        total = _total(iterable, total)
        done, due = 0, 0.0
        for item in iterable:
            if (now := time.monotonic()) >= due:
                due = now + TRACK_INTERVAL
                self.progress_sync(*_counted(done, total))
            yield item
            done += 1
        self.progress_sync(1.0, _counted(done, total)[1])


def _checked(value: object, message: object) -> tuple[float, str | None]:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"progress: expected a number from 0 to 1, got {type(value).__name__}")
    try:
        share = float(value)
    except OverflowError:
        share = math.inf
    if math.isnan(share) or not -ROUNDING <= share <= 1 + ROUNDING:
        raise ValueError(f"progress: expected a number from 0 to 1, got {value!r}")
    if message is not None and not isinstance(message, str):
        raise TypeError(f"progress: expected a text as message, got {type(message).__name__}")
    return min(max(share, 0.0), 1.0), None if message is None else storable(message, MESSAGE_LIMIT)


def _total(iterable: object, total: int | None) -> int | None:
    if total is not None:
        return total
    return len(iterable) if isinstance(iterable, Sized) else None


def _counted(done: int, total: int | None) -> tuple[float, str]:
    if total is None:
        return 0.0, str(done)
    return min(done / total, 1.0) if total > 0 else 0.0, f"{done} of {max(done, total)}"
