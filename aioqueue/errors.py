"""Every error that aioqueue raises, made from data; each message says what was expected, what came, and what to do next.

AioQueueError
├── ConfigurationError          a setting, a DSN or a schema name that cannot work
├── EmbeddedError               the embedded PostgreSQL cannot be had or started
├── UnsafeDatabase              a worker does not start: tenants are not kept apart, or a policy hides the queue
├── ResourcesFailed             what a worker opens for its jobs failed
├── SchemaError                 the database's schema is missing, too old, or no longer serves this code
├── TaskDefinitionError         a function that cannot be registered as a task
├── AppNotOpen                  enqueue or result on an app that is not open
├── EnqueueError                refused before anything was written
│   ├── UnknownTask
│   ├── InvalidPayload
│   ├── InvalidOption
│   ├── TenantRequired
│   ├── DuplicateJob
│   ├── RetryRefused            the job is neither dead nor cancelled
│   └── TransactionAborted
├── ResultError                 a job has no result to give
│   ├── JobFailed  JobCancelled  ResultTimeout  JobNotFound  NotCommitted
│   └── ResultInvalid
└── JobError                    inside a job
    ├── InvalidResult           the task's return value cannot be stored
    ├── TimeLimitExceeded
    ├── TransactionViolation    user code broke its job's transaction
    └── LeaseLost               the job is no longer this worker's
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from uuid import UUID

from .finding import Finding


class AioQueueError(Exception):
    """Base of every error of aioqueue."""


class ConfigurationError(AioQueueError):
    """A setting cannot work; nothing was started."""


class EmbeddedError(AioQueueError):
    """The embedded PostgreSQL is not installed, or did not start."""


class ResourcesFailed(AioQueueError):
    """The worker did not start, or stopped in order: `AioQueue(resources=…)` raised what is the `__cause__`."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"the worker's resources {what}: {why}")


class SchemaError(AioQueueError):
    """The schema in the database and this code do not fit; the message gives the exact command."""


class UnsafeDatabase(AioQueueError):
    """A worker refuses to start; `findings` say why, each with the command that mends it."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        lines = "".join(f"\n- {finding}" for finding in self.findings)
        super().__init__(f"the worker does not start: the database would not keep tenants apart, or hides the queue:{lines}")


class TaskDefinitionError(AioQueueError, TypeError):
    """A function cannot be a task, refused where it is registered."""


class AppNotOpen(AioQueueError):
    """The app's pool is not open."""

    def __init__(self, action: str) -> None:
        self.action = action
        enqueues = ", or pass your own connection with .options(on=connection)" if action.startswith("enqueue") else ""
        super().__init__(f"{action} needs an open app: write 'async with app:' around it, or use lifespan=app.lifespan{enqueues}")


class EnqueueError(AioQueueError):
    """A job was refused at enqueue; nothing was written."""


class UnknownTask(EnqueueError):
    """No task of that name is registered here or known to the database."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        names = list(known)
        # Names are module.function by default, and the function alone is what one remembers.
        short = {full.rpartition(".")[2]: full for full in names}
        last = difflib.get_close_matches(name.rpartition(".")[2], short, n=1)
        near = difflib.get_close_matches(name, names, n=1) or [short[found] for found in last]
        hint = f"; did you mean {near[0]!r}?" if near else "."
        super().__init__(f"no task is named {name!r}{hint} Tasks become known by @app.task or when a worker starts.")


class InvalidPayload(EnqueueError, ValueError):
    """The payload does not validate, or cannot be stored as JSON."""

    def __init__(self, task: str, reason: str) -> None:
        self.task = task
        self.reason = reason
        super().__init__(f"payload of task {task!r}: {reason}")


class InvalidOption(EnqueueError, ValueError):
    """An option of the enqueue is not allowed."""

    def __init__(self, option: str, reason: str) -> None:
        self.option = option
        self.reason = reason
        super().__init__(f"{option}: {reason}")


class TenantRequired(EnqueueError):
    """The task's jobs must have a tenant, and this one has none."""

    def __init__(self, task: str) -> None:
        self.task = task
        super().__init__(
            f"task {task!r} runs for a tenant only: enqueue it with .options(tenant='…'), or from a job that has one; a task "
            "that is for all tenants says @app.task(require_tenant=False)"
        )


class DuplicateJob(EnqueueError):
    """The job id is taken by a job that is not identical."""

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id
        super().__init__(f"job id {job_id} is taken by another job; let aioqueue make the id")


class RetryRefused(EnqueueError):
    """The job is neither dead nor cancelled: it has succeeded, or has not ended."""

    def __init__(self, job_id: UUID, why: str) -> None:
        self.job_id = job_id
        super().__init__(f"{why}; only such jobs can be run again")


class TransactionAborted(EnqueueError):
    """The caller's transaction has failed already; nothing can be written in it."""

    def __init__(self) -> None:
        super().__init__(
            "the transaction of the given connection is aborted: roll it back (or to a savepoint), then enqueue again"
        )


class ResultError(AioQueueError):
    """A job has no result to give."""

    def __init__(self, job_id: UUID, message: str) -> None:
        self.job_id = job_id
        super().__init__(message)


class JobFailed(ResultError):
    """The job is dead: its last attempt failed and none is left."""

    def __init__(self, job_id: UUID, *, attempt: int, error_type: str | None, error_message: str | None) -> None:
        self.attempt = attempt
        self.error_type = error_type
        self.error_message = error_message
        reason = ": ".join(text for text in (error_type, error_message) if text)
        super().__init__(job_id, f"job {job_id} is dead after attempt {attempt}: {reason}")


class JobCancelled(ResultError):
    """The job was cancelled."""

    def __init__(self, job_id: UUID, reason: str | None) -> None:
        self.reason = reason
        super().__init__(job_id, f"job {job_id} was cancelled" + (f": {reason}" if reason else ""))


class ResultTimeout(ResultError, TimeoutError):
    """The job has not ended within the time given; it goes on."""

    def __init__(self, job_id: UUID, timeout: float, state: str | None) -> None:
        self.timeout = timeout
        self.state = state
        super().__init__(job_id, f"job {job_id} has not ended within {timeout:g} s (state: {state or 'unknown'})")


class JobNotFound(ResultError):
    """No job of that id is there for this tenant: unknown, another tenant's, or older than the retention."""

    def __init__(self, job_id: UUID, *, expired: bool = False) -> None:
        self.expired = expired
        why = (
            "it is older than the retention of results"
            if expired
            else "unknown, or of another tenant; if it was enqueued in a transaction, was that committed?"
        )
        super().__init__(job_id, f"no job {job_id}: {why}")


class NotCommitted(ResultError):
    """The transaction that enqueued the job is still open in this process."""

    def __init__(self, job_id: UUID) -> None:
        super().__init__(
            job_id, f"job {job_id} is enqueued in a transaction that is still open: commit it, then await the result"
        )


class ResultInvalid(ResultError, ValueError):
    """The stored result does not validate as the task's return type."""

    def __init__(self, job_id: UUID, reason: str) -> None:
        self.reason = reason
        super().__init__(job_id, f"result of job {job_id} does not fit the task's return type: {reason}")


class JobError(AioQueueError):
    """Something ended this attempt of a job; it stands in the attempt's row."""


class InvalidResult(JobError, ValueError):
    """The task's return value cannot be stored: not serialisable, NUL, NaN, too large, or of the wrong type."""

    def __init__(self, task: str, reason: str) -> None:
        self.task = task
        self.reason = reason
        super().__init__(f"result of task {task!r} cannot be stored: {reason}")


class TimeLimitExceeded(JobError, TimeoutError):
    """The attempt ran longer than its time limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"the job ran longer than its time limit of {seconds:g} s")


class TransactionViolation(JobError):
    """User code broke the job's transaction: ended it, or changed its tenant, role or marker. It was rolled back."""

    @classmethod
    def by(cls, what: str) -> TransactionViolation:
        """Say what the task did."""
        return cls(f"the task broke its transaction: {what}")


class LeaseLost(JobError):
    """The job is no longer this worker's; whatever it wrote in its transaction was rolled back."""

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id
        super().__init__(f"job {job_id} is no longer owned by this worker; its transaction was rolled back")
