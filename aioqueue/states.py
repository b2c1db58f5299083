"""Where a job stands, how far it is, and what `Job.watch` tells of it: nouns only.

The lowest of the job's modules; job.py has the job itself and its handle.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Generic, TypeVar
from uuid import UUID

from .errors import ResultError

R = TypeVar("R")


class JobState(StrEnum):
    """Where a job stands: scheduled → ready → running → succeeded | dead | cancelled."""

    SCHEDULED = "scheduled"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self in (JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running job is: the last that this attempt has reported."""

    value: float
    """From 0 to 1."""
    message: str | None
    at: datetime
    """When it was written, by the database's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The job is seen in this state, or in another attempt; states between two looks are passed over."""

    job_id: UUID
    state: JobState
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressChanged:
    """The job has come further (or back); values between two looks are passed over."""

    job_id: UUID
    attempt: int
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Generic[R]):
    """The last event: how the job ended. `result` of one that succeeded, otherwise `error`, which `Job.result` would raise."""

    job_id: UUID
    state: JobState
    attempt: int
    result: R | None
    error: ResultError | None
    """JobFailed (dead), JobCancelled; ResultInvalid where it succeeded and the result is not of the task's type."""


JobEvent = StateChanged | ProgressChanged | JobEnded[R]
