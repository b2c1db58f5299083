"""One watch of a job: turns what is read of it into events, each told once.

Reads nothing itself and holds nothing between two events: result.py has the one query for all who wait in the process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from .client_store import EndedJob
from .errors import ResultError
from .job import Job
from .states import JobEnded, JobEvent, JobState, ProgressChanged, StateChanged


@dataclass(slots=True)
class Watched:
    """What a watch knows: how the job was seen last, and after which read of all watchers."""

    standing: tuple[object, ...] | None = None
    read: int = -1


class Looking(Protocol):
    """Who reads for the watches."""

    async def look(self, job: Job[Any], watched: Watched, timeout: float | None, *, of: float | None) -> EndedJob:
        """Wait until the job stands otherwise than `watched` says; `of` is the time of the whole watch."""
        ...


class Watch(AsyncIterator[JobEvent[Any]]):
    """The events of one job; see `Job.watch`."""

    def __init__(
        self, source: Looking, job: Job[Any], timeout: float | None, result: Callable[[Job[Any], EndedJob], Any]
    ) -> None:
        self._source = source
        self._job = job
        self._timeout = timeout
        self._ends = None if timeout is None else time.monotonic() + timeout
        self._result = result
        self._watched = Watched()
        self._state: tuple[JobState, int] | None = None
        self._progress: object = None
        self._events: deque[JobEvent[Any]] = deque()
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobEvent[Any]:
        while not self._events:
            if self._over:
                raise StopAsyncIteration
            left = None if self._ends is None else max(0.0, self._ends - time.monotonic())
            self._tell(await self._source.look(self._job, self._watched, left, of=self._timeout))
        return self._events.popleft()

    def _tell(self, seen: EndedJob) -> None:
        job_id, attempt = seen.job_id, seen.attempt or 0
        if seen.state is not None:
            result = error = None
            try:
                result = self._result(self._job, seen)
            except ResultError as raised:
                error = raised
            self._events.append(JobEnded(job_id=job_id, state=seen.state, attempt=attempt, result=result, error=error))
            self._over = True
            return
        if seen.stage is not None and (seen.stage, attempt) != self._state:
            self._state, self._progress = (seen.stage, attempt), None
            self._events.append(StateChanged(job_id=job_id, state=seen.stage, attempt=attempt))
        if seen.progress is not None and (told := (seen.progress.value, seen.progress.message)) != self._progress:
            self._progress = told
            self._events.append(ProgressChanged(job_id=job_id, attempt=attempt, progress=seen.progress))
