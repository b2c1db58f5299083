"""A job: its id and its lane, which this process makes, what is known of it, and the handle that a user holds.

Nouns only: nothing here talks to a database. `Job` passes its questions on to whoever made it, by the `JobSource` protocol.
What a worker has of a job that it runs stands in claimed.py.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from .states import JobEvent, JobState, Progress

__all__ = [
    "PRIORITIES",
    "SUSPECT",
    "AttemptError",
    "Job",
    "JobSource",
    "JobState",
    "JobStatus",
    "Position",
    "lane",
    "new_job_id",
    "new_job_ids",
]

R = TypeVar("R")

PRIORITIES = range(-2, 3)
SUSPECT = 9
"""The priority that names a queue's suspect lane: jobs lost twice with their worker (sql/functions/rescue_job.sql)."""
_LOW_BITS = (1 << 62) - 1


def new_job_ids(number: int) -> list[UUID]:
    """Make UUIDv7s (RFC 9562), ascending: 48 bits of milliseconds, then 74 random bits, so that no tenant can guess another's.

    Ascending ones are written to their indexes one beside the other.
    """
    prefix = (time.time_ns() // 1_000_000 & ((1 << 48) - 1)) << 80 | 0x7 << 76 | 0b10 << 62
    drawn = os.urandom(10 * number)
    bits = sorted([int.from_bytes(drawn[start : start + 10], "big") >> 6 for start in range(0, 10 * number, 10)])
    return [UUID(int=prefix | each >> 62 << 64 | each & _LOW_BITS) for each in bits]


def new_job_id() -> UUID:
    """Make one."""
    return new_job_ids(1)[0]


def lane(queue: str, priority: int) -> int:
    """Name the line of one queue and priority: 64 bits of md5, the same here and in sql/functions/lane.sql, stable for ever."""
    digest = hashlib.md5(f"{priority}:{queue}".encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class Position(NamedTuple):
    """A place in a lane; jobs are claimed in this order."""

    vt: int
    job_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptError:
    """Why one attempt did not succeed, as it stands in its row."""

    attempt: int
    reason: str
    error_type: str | None
    error_message: str | None
    traceback: str | None
    worker: int | None
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What the database knows of a job at one moment; `error` is its last attempt that did not succeed."""

    id: UUID
    task: str
    queue: str
    priority: int
    tenant: str | None
    state: JobState
    attempt: int
    spared: int
    max_attempts: int
    created_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    worker: int | None
    retry_of: UUID | None
    error: AttemptError | None
    progress: Progress | None = None
    """How far it is while it runs, if it has said so."""


class JobSource(Protocol):
    """What a `Job` handle asks; the app answers."""

    async def wait_result(self, job: Job[Any], timeout: float | None) -> Any:
        """Wait for the job's end; see `Job.result`."""
        ...

    async def job_status(self, job: Job[Any]) -> JobStatus:
        """Read the job's state; see `Job.status`."""
        ...

    def watch_job(self, job: Job[Any], timeout: float | None) -> AsyncIterator[JobEvent[Any]]:
        """Watch the job to its end; see `Job.watch`."""
        ...

    async def cancel_job(self, job: Job[Any], *, on: object | None) -> JobState:
        """Ask for the job's cancellation; see `Job.cancel`."""
        ...

    async def retry_job(self, job: Job[Any], *, on: object | None) -> Job[Any]:
        """Run the job again; see `Job.retry`."""
        ...


class Job(Generic[R]):
    """A handle on one job, from any process; cheap, holds no connection."""

    __slots__ = ("_source", "decode", "id", "leaves_tenant", "tenant")

    def __init__(
        self,
        job_id: UUID,
        *,
        source: JobSource,
        decode: Callable[[str], R] | None = None,
        tenant: str | None = None,
        leaves_tenant: bool = False,
    ) -> None:
        self.id = job_id
        """The job's id: a UUID, known before the commit."""
        self.tenant = tenant
        """The tenant whose job it must be; None: whosever it is."""
        self.decode = decode
        self.leaves_tenant = leaves_tenant
        """Whether a handle without a tenant is not bound to that of the job it is used in."""
        self._source = source

    def of_tenant(self, tenant: str | None) -> Job[R]:
        """Return a handle on the same job that finds it only if it is that tenant's."""
        return Job(self.id, source=self._source, decode=self.decode, tenant=tenant)

    async def result(self, timeout: float | timedelta | None = None) -> R:
        """Wait for the job's end and return its result.

        `timeout` is in seconds (or a timedelta); None waits for ever. Cancelling the wait leaves the job alone.

        Raises JobFailed (dead), JobCancelled, ResultTimeout, JobNotFound (unknown for 1 s, another tenant's, expired),
        NotCommitted (its transaction is still open in this process), ResultInvalid, AppNotOpen.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        result: R = await self._source.wait_result(self, seconds)
        return result

    async def status(self) -> JobStatus:
        """Read where the job stands now. Raises JobNotFound, NotCommitted, AppNotOpen."""
        return await self._source.job_status(self)

    async def progress(self) -> Progress | None:
        """Read how far the job is; None while it does not run, or has said nothing. Raises as `status` does."""
        return (await self.status()).progress

    def watch(self, timeout: float | timedelta | None = None) -> AsyncIterator[JobEvent[R]]:
        """Watch the job from any process: `async for event in job.watch():`.

        First its present state, then each StateChanged and ProgressChanged that is seen, last JobEnded with its result or error:
        what comes between two looks is passed over, and no hint that is lost costs more than one poll. However many watch, one
        query serves all in the process, and nothing is held between two events: to stop, leave the loop; `asyncio.timeout` around
        `anext()` loses nothing either. `timeout`: seconds (or a timedelta) to the job's end. Raises what `result` does, but for
        JobFailed, JobCancelled and ResultInvalid, which are in the event.
        """
        return self._source.watch_job(self, timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    async def cancel(self, *, on: object | None = None) -> JobState:
        """Cancel the job: a waiting one at once (CANCELLED), a running one soon (RUNNING: asked for).

        With `on`, and inside a job's own transaction, it is part of that transaction, as an enqueue is; `on` the app leaves it.
        A job that has ended keeps its state, which is returned. Raises JobNotFound, AppNotOpen, TransactionAborted.
        """
        return await self._source.cancel_job(self, on=on)

    async def retry(self, *, on: object | None = None) -> Job[R]:
        """Run a dead or cancelled job again, as a new job whose handle is returned; this one keeps its end.

        The new job has the same payload and options, and this one's id as its `retry_of`. `on` as in `cancel`. Raises
        RetryRefused (it is neither dead nor cancelled; a transaction it was asked in is aborted then), JobNotFound, AppNotOpen,
        TransactionAborted.
        """
        new: Job[R] = await self._source.retry_job(self, on=on)
        return new

    def __repr__(self) -> str:
        return f"Job({str(self.id)!r})"
