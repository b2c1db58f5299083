"""What became of the attempts that a test has run, as values; and the errors of the kit itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import UUID

from aioqueue.errors import AioQueueError

R = TypeVar("R")

LOST = "lost"
"""The state of an attempt whose worker died: nothing of it was recorded by itself."""


class TestingError(AioQueueError):
    """The kit cannot do what the test asks for; the message says why, and what can be done."""

    __test__ = False  # pytest would take it for tests


class JobsFailed(AioQueueError, AssertionError):
    """Jobs failed without an error of their own: an unknown task, a payload that does not validate, a time limit."""


@dataclass(frozen=True, slots=True)
class Ran(Generic[R]):
    """One attempt of a job that ran, and what became of the job by it."""

    job_id: UUID
    task: str
    tenant: str | None
    queue: str
    attempt: int
    state: str
    """The job's state after it: succeeded, scheduled or ready (to be tried again), dead, cancelled; "lost" with its worker."""
    result: R | None = None
    """What the task returned, as whoever awaits the job's result gets it."""
    reason: str | None = None
    """Why it did not succeed (aioqueue.outcome.Reason)."""
    message: str | None = None
    """The error as it was recorded."""
    error: BaseException | None = None
    """What the task raised, itself."""
    expected: bool = False
    """Whether the test has asked for its failure: `fail_next`, `crash_worker_at`."""
    delay: float | None = None
    """Seconds until it is tried again."""

    @property
    def succeeded(self) -> bool:
        """Whether the job has."""
        return self.state == "succeeded"

    @property
    def failed(self) -> bool:
        """Whether the attempt failed, against the job: not snoozed, handed back, cancelled or lost with its worker."""
        return not self.succeeded and self.state != LOST and self.reason not in _NO_FAILURES

    def __str__(self) -> str:
        why = "" if self.succeeded else f": {self.message}" if self.message else f": {self.reason}" if self.reason else ""
        tenant = "" if self.tenant is None else f", tenant {self.tenant!r}"
        return f"{self.task} (job {self.job_id}{tenant}), attempt {self.attempt}: {self.state}{why}"


_NO_FAILURES = ("snoozed", "interrupted", "no connection", "cancelled", "worker lost")


class Runs(list[Ran[object]]):
    """The attempts that one call has run, in the order of their ends."""

    @property
    def states(self) -> list[str]:
        """The states alone."""
        return [ran.state for ran in self]

    def of(self, task: object) -> Runs:
        """Return those of one task, given itself or by its name."""
        name = task if isinstance(task, str) else getattr(task, "name", task)
        return Runs(ran for ran in self if ran.task == name)


def raise_failures(runs: Sequence[Ran[object]]) -> None:
    """Raise the error of the first attempt that failed unasked, with a note of whose it was and of how many more failed."""
    failed = [ran for ran in runs if ran.failed and not ran.expected]
    if not failed:
        return
    first, *more = failed
    note = str(first) + "".join(f"\n{ran}" for ran in more[:10]) + (f"\n… and {len(more) - 10} more" if len(more) > 10 else "")
    if isinstance(first.error, Exception):
        first.error.add_note(note)
        raise first.error
    raise JobsFailed(note)
