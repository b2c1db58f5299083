"""A job in the hands of a worker: its claim, which every write about it is conditional on, and what its task may read of it.

Nouns only. A claim is made by store.py from what the server answers, and carried from claim.py to record.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Protocol
from uuid import UUID

from typing_extensions import TypeVar

Held_co = TypeVar("Held_co", default=object, covariant=True)
"""The type of a worker's resources; object where nobody says (of Any, mypy could not tell the overloads of `app.task` apart)."""

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""From when PostgreSQL counts time."""
Fence = tuple[int, int, int, UUID, int]
"""(worker, lane, vt, job_id, attempt) of one claim."""


class Reports(Protocol):
    """Where running jobs say how far they are: the worker's reporter."""

    def report(self, job: Claimed, value: float, message: str | None) -> None:
        """Take a report, from any thread; never blocks, never fails."""
        ...

    def ended(self, job: Claimed) -> None:
        """Take note that a run is over."""
        ...


@dataclass(slots=True)
class Claimed:
    """A job in the hands of this worker; `fence` stands in the condition of every write about it.

    From `job_id` to `keys` the columns of sql/functions/claim.sql, in their order.
    """

    worker: int
    job_id: UUID
    lane: int
    vt: int
    attempt: int
    spared: int
    tenant: str | None
    task: str
    queue: str
    priority: int
    max_attempts: int
    payload: str
    created: datetime | int
    """When it was enqueued; a number: as PostgreSQL sends it, in microseconds since 2000, for the few who ask."""
    keys: Sequence[int] | None = None
    """The limited keys that it holds; jobs that wait for one of them are made ready after its end."""
    claimed_at: float = field(default_factory=time.monotonic)
    """When this process had it, by time.monotonic()."""
    resources: Any = None
    """What its worker has opened for all of its jobs, given to it when it is run."""
    reporter: Reports | None = None
    """Where it says how far it is; None once its run is over."""

    @property
    def fence(self) -> Fence:
        """What names this claim: equal counters alone could be two claims after a failover."""
        return self.worker, self.lane, self.vt, self.job_id, self.attempt

    @property
    def created_at(self) -> datetime:
        """When it was enqueued, by the database's clock."""
        created = self.created
        return created if isinstance(created, datetime) else POSTGRES_EPOCH + timedelta(microseconds=created)

    @property
    def failures(self) -> int:
        """Claims held against the job, this one included."""
        return self.attempt - self.spared


class JobFacts(Generic[Held_co]):
    """What is known of a running job: read-only, and the base of what a task is given."""

    __slots__ = ("_job",)

    def __init__(self, job: Claimed) -> None:
        self._job = job

    @property
    def job_id(self) -> UUID:
        """The job's id."""
        return self._job.job_id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._job.task

    @property
    def queue(self) -> str:
        """The job's queue."""
        return self._job.queue

    @property
    def priority(self) -> int:
        """−2 to 2; higher runs first."""
        return self._job.priority

    @property
    def tenant(self) -> str | None:
        """The job's tenant, or None."""
        return self._job.tenant

    @property
    def attempt(self) -> int:
        """The number of this claim, from 1; it never goes back."""
        return self._job.attempt

    @property
    def spared(self) -> int:
        """Claims that are not held against the job."""
        return self._job.spared

    @property
    def max_attempts(self) -> int:
        """The job is dead when attempt − spared reaches this and fails."""
        return self._job.max_attempts

    @property
    def created_at(self) -> datetime:
        """When the job was enqueued, by the database's clock."""
        return self._job.created_at

    @property
    def worker(self) -> int:
        """The identity under which the job's worker has claimed it."""
        return self._job.worker

    @property
    def resources(self) -> Held_co:
        """What `AioQueue(resources=…)` has opened for the job's worker; None where there is nothing.

        Shared by all jobs of the worker, in its event loop, and by the threads of `def` tasks.
        """
        held: Held_co = self._job.resources
        return held
