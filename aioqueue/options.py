"""The options of an enqueue, checked once: `Options.of(…)`; and the job that they and a payload make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from .context import CurrentTenant
from .definition import check_priority
from .errors import InvalidOption
from .job import new_job_ids
from .new_jobs import NewJobs
from .retry import check_delay, check_max_attempts
from .settings import check_name

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of an enqueue; None: the task's, then the default. `delay` is in seconds and excludes `run_at`."""

    tenant: str | None = None
    queue: str | None = None
    priority: int | None = None
    delay: float | None = None
    run_at: datetime | None = None
    max_attempts: int | None = None
    key: str | None = None

    @classmethod
    def of(
        cls,
        *,
        tenant: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        key: str | None = None,
    ) -> Options:
        """Check what a user gave. Raises InvalidOption."""
        if delay is not None and run_at is not None:
            raise InvalidOption("run_at", "give delay or run_at, not both")
        return cls(
            tenant=check_tenant(tenant),
            queue=_check("queue", queue, lambda value: check_name("queue", value)),
            priority=_check("priority", priority, check_priority),
            delay=_check("delay", delay, check_delay),
            run_at=_check("run_at", run_at, _check_run_at),
            max_attempts=_check("max_attempts", max_attempts, check_max_attempts),
            key=_check("key", key, lambda value: check_name("key", value)),
        )

    def jobs(self, task: str, payloads: Sequence[str], *, total: int | None = None) -> NewJobs:
        """Make jobs of a task's name and payloads, which are JSON text; `total` as in NewJobs."""
        return NewJobs(
            task=task,
            ids=new_job_ids(len(payloads)),
            payloads=payloads,
            queue=self.queue,
            priority=self.priority,
            tenant=self.tenant,
            delay=self.delay,
            run_at=self.run_at,
            max_attempts=self.max_attempts,
            key=self.key,
            total=total,
        )


def check_tenant(tenant: str | None) -> str | None:
    """Return a tenant's name, or None for none, as a transaction's own may be. Raises InvalidOption."""
    if isinstance(tenant, CurrentTenant):
        tenant = str(tenant) or None  # not the transaction's, which it would keep
    return _check("tenant", tenant, lambda value: check_name("tenant", value))


def _check(name: str, value: V | None, check: Callable[[V], T]) -> T | None:
    if value is None:
        return None
    try:
        return check(value)
    except (TypeError, ValueError) as error:
        raise InvalidOption(name, str(error).removeprefix(f"{name}: ")) from None


def _check_run_at(value: object) -> datetime:
    if not isinstance(value, datetime):
        raise TypeError(f"expected a datetime, got {value!r}")
    if value.utcoffset() is None:
        raise ValueError(f"expected a datetime with a time zone, got {value!r}; give it a tzinfo")
    return value
