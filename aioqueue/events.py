"""What happens, as frozen values; logging, metrics and tracing are observers of these, never code in the flow.

Every step ends by emitting one event. An observer is any callable of one argument; one that raises is logged and ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

from .finding import Finding

logger = logging.getLogger("aioqueue")


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


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
class JobClaimed(Event):
    """The attempt is counted and committed."""

    job_id: UUID
    task: str
    tenant: str | None
    attempt: int


@dataclass(frozen=True, slots=True)
class JobRecorded(Event):
    """The outcome is committed; `state` is the job's new state, `seconds` the time from claim to record.

    Where the attempt did not succeed: `error` and `reason` (outcome.Reason) say why, `failures` of `max_attempts` attempts are
    held against the job, this one included unless it is spared, and it runs again after `delay` seconds.
    """

    job_id: UUID
    task: str
    tenant: str | None
    attempt: int
    state: str
    seconds: float
    error: str | None = None
    reason: str | None = None
    failures: int | None = None
    max_attempts: int | None = None
    delay: float | None = None


@dataclass(frozen=True, slots=True)
class JobLost(Event):
    """A late outcome was refused: the job is no longer this worker's. Nothing of it was written."""

    job_id: UUID
    task: str
    attempt: int


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
class JobAbandoned(Event):
    """User code ignores its cancellation; its outcome is written, its slot stays taken until it is over."""

    job_id: UUID
    task: str
    attempt: int


@dataclass(frozen=True, slots=True)
class JobsPromoted(Event):
    """Scheduled jobs fell due."""

    count: int


@dataclass(frozen=True, slots=True)
class JobsRescued(Event):
    """Jobs of a dead worker were made ready, or dead after their last attempt."""

    worker: int
    count: int


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
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Add an observer; it sees every later event."""
        self._observers.append(observer)

    @property
    def any(self) -> bool:
        """Whether there is an observer; what is emitted once a job is not even made for none."""
        return bool(self._observers)

    def emit(self, event: Event) -> None:
        """Show the event to every observer."""
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("observer %r failed on %s", observer, type(event).__name__)
