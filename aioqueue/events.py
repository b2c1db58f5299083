"""What happens, as frozen values; logging, metrics and tracing are observers of these, never code in the flow.

Every step ends by emitting one event. An observer is any callable of one argument; one that raises is logged, a few times
only, and ignored.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self
from uuid import UUID

from .claimed import Claimed
from .errors import ConfigurationError
from .finding import Finding

logger = logging.getLogger("aioqueue")


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class OfJob(Event):
    """Base of the events of one attempt of one job."""

    job_id: UUID
    task: str
    tenant: str | None
    attempt: int
    queue: str
    worker: int

    @classmethod
    def of(cls, job: Claimed, *more: Any) -> Self:
        """Make the event of a job; `more` are the fields beyond the job's own."""
        return cls(job.job_id, job.task, job.tenant, job.attempt, job.queue, job.worker, *more)


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    """A worker has its row and begins to claim."""

    worker: int
    queues: tuple[str, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class WorkerStopping(Event):
    """No more claims; `running` jobs have `grace` seconds to end."""

    worker: int
    running: int
    grace: float


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """The worker has recorded or handed back everything it could."""

    worker: int


@dataclass(frozen=True, slots=True)
class JobClaimed(OfJob):
    """The attempt is counted and committed."""


@dataclass(frozen=True, slots=True)
class JobRecorded(OfJob):
    """The outcome is committed; `state` is the job's new state, `seconds` the time from claim to record.

    Where the attempt did not succeed: `error` and `reason` (outcome.Reason) say why, `failures` of `max_attempts` attempts are
    held against the job, this one included unless it is spared, and it runs again after `delay` seconds.
    """

    state: str
    seconds: float
    error: str | None = None
    reason: str | None = None
    failures: int | None = None
    max_attempts: int | None = None
    delay: float | None = None


@dataclass(frozen=True, slots=True)
class JobLost(OfJob):
    """A late outcome was refused: the job is no longer this worker's. Nothing of it was written."""


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """The worker could not renew its lease, or was declared dead; its jobs are cancelled."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoopBlocked(Event):
    """A job (None: other code) blocks the event loop at `where` (file:line in function), or has for `seconds` (`over`).

    Observers are told once the loop is free again; the guard's thread logs it meanwhile.
    """

    where: str
    seconds: float
    over: bool
    job_id: UUID | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True)
class JobAbandoned(OfJob):
    """User code ignores its cancellation; its outcome is written, its slot stays taken until it is over."""


@dataclass(frozen=True, slots=True)
class JobsPromoted(Event):
    """Scheduled jobs fell due."""

    count: int


@dataclass(frozen=True, slots=True)
class JobsRescued(Event):
    """Jobs of a dead worker (0: of one without a row) were made ready, or dead after their last attempt; `job_ids` are theirs."""

    worker: int
    count: int
    job_ids: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class JobsPruned(Event):
    """Ended jobs older than the retention were deleted."""

    count: int


@dataclass(frozen=True, slots=True)
class DatabaseLost(Event):
    """A loop lost the database; said once per outage and loop."""

    loop: str
    error: str


@dataclass(frozen=True, slots=True)
class DatabaseRecovered(Event):
    """The loop reached the database again."""

    loop: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ListenerConnected(Event):
    """LISTEN is in force (again)."""


@dataclass(frozen=True, slots=True)
class PoolerFound(Event):
    """A pooler stands between the app and the database; `listening`: a `listen_dsn` brings wake-ups all the same."""

    listening: bool


@dataclass(frozen=True, slots=True)
class RisksFound(Event):
    """A worker starts although the checks at its start found something (docs/doctor.md)."""

    findings: tuple[Finding, ...]


Observer = Callable[[Event], None]


class Observers:
    """The list of observers of one app."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers: list[Observer] = []
        self._failures: Counter[int] = Counter()
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Add an observer; it sees every later event. Raises ConfigurationError for what cannot be one."""
        given: object = observer
        if not callable(given) or inspect.iscoroutinefunction(given):
            raise ConfigurationError(f"observers: expected plain functions of one event, which nobody awaits, got {observer!r}")
        self._observers.append(observer)

    @property
    def any(self) -> bool:
        """Whether there is an observer; what is emitted for a job is not even made for none."""
        return bool(self._observers)

    @property
    def see_successes(self) -> bool:
        """Whether one of them looks at claims and successes, too, which are as many as the jobs.

        An observer that does not, as the log does unless it is at DEBUG, has an attribute `only_failures` that is true.
        """
        for observer in self._observers:  # all() of a generator costs a short job as much as the rest of its record
            if not getattr(observer, "only_failures", False):
                return True
        return False

    def emit(self, event: Event) -> None:
        """Show the event to every observer."""
        for observer in self._observers:
            try:
                observer(event)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a SystemExit of an observer must not end the loop that emits
                self._note_failure(observer, event, error)

    def _note_failure(self, observer: Observer, event: Event, error: BaseException) -> None:
        """Log the first failure of an observer, then the 10th, the 100th, …: it may fail with every job."""
        self._failures[id(observer)] += 1
        times = self._failures[id(observer)]
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        if times == 1:
            logger.error("observer %s failed on %s", name, type(event).__name__, exc_info=error)
        elif 10 ** (len(str(times)) - 1) == times:
            logger.error(
                "observer %s has failed %d times, now on %s with %s", name, times, type(event).__name__, type(error).__name__
            )
