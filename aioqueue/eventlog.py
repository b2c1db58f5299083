"""Writes every event as one readable line: an observer that every app has unless it is told not to (`log_events=False`).

Level DEBUG for what goes well, INFO for changes of a worker's state and for what is no failure, WARNING for attempts that failed
and for dead, lost and rescued jobs. Sets up no logging: where nobody has, Python itself prints warnings. Jobs that are handed
back for want of a connection may be many a second: these are counted, and told every few seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from .events import (
    DatabaseLost,
    DatabaseRecovered,
    Event,
    JobAbandoned,
    JobClaimed,
    JobLost,
    JobRecorded,
    JobsPromoted,
    JobsPruned,
    JobsRescued,
    LeaseLost,
    ListenerConnected,
    LoopBlocked,
    PoolerFound,
    RisksFound,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
    logger,
)
from .lines import age, counted, one_line
from .outcome import Reason

SHOWN = 20
"""Jobs that are named one by one of those that one look has taken over from a dead worker."""
TOLD_EVERY = 5.0
"""Seconds between two lines about jobs that got no connection."""
GAVE_UP = (
    "this worker claims nothing more: what ignores its end cannot be stopped from outside. It lets its other jobs end; the "
    "command then exits with 1, for its supervisor to start it again, and an application is to be started anew"
)


class EventLog:
    """An observer that logs; each record has the event as its attribute `event`."""

    def __init__(self, logger: logging.Logger = logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._waiting = 0
        """Jobs without a connection that were not told of yet."""
        self._told: float | None = None
        self._gave_up: int | None = None
        """The worker that was said to claim nothing more."""

    @property
    def only_failures(self) -> bool:
        """Whether there is nothing to write of claims and successes."""
        return not self._logger.isEnabledFor(logging.DEBUG)

    def __call__(self, event: Event) -> None:
        """Log one event."""
        if isinstance(event, JobRecorded) and event.reason == Reason.NO_CONNECTION:
            self._waiting += 1
        elif not self.only_failures or not _is_quiet(event):  # they may come for other observers
            self._log(*describe(event), event)
        self._tell_waiting(at_once=isinstance(event, WorkerStopped))
        if isinstance(event, JobAbandoned) and self._gave_up != event.worker:
            self._gave_up = event.worker
            self._log(logging.WARNING, GAVE_UP, event)
        elif isinstance(event, JobsRescued):
            for job_id in event.job_ids[:SHOWN]:
                self._log(logging.WARNING, f"took over job {job_id} of dead worker {event.worker}", None, job_id=str(job_id))

    def _tell_waiting(self, *, at_once: bool) -> None:
        now = self._clock()
        if self._waiting and (at_once or self._told is None or now - self._told >= TOLD_EVERY):
            text = (
                f"handed back {counted(self._waiting, 'job')}: no connection was free for a transaction; "
                "raise PoolSettings(size=), or lower the concurrency"
            )
            self._log(logging.INFO, text, None)
            self._waiting, self._told = 0, now

    def _log(self, level: int, text: str, event: Event | None, **facts: str) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", one_line(text), extra={"event": event, **facts})


def _is_quiet(event: Event) -> bool:
    return isinstance(event, JobClaimed) or (isinstance(event, JobRecorded) and event.state == "succeeded")


def _job(event: JobClaimed | JobRecorded) -> str:
    tenant = "" if event.tenant is None else f", tenant {event.tenant}"
    return f"{event.task} {event.job_id} (attempt {event.attempt}{tenant})"


_SPARED = (Reason.INTERRUPTED, Reason.NO_CONNECTION, Reason.UNKNOWN_TASK)


def _recorded(event: JobRecorded) -> tuple[int, str]:
    """Return the line of an attempt that did not succeed: what became of the job, which attempt, when it runs again, why."""
    if event.reason == Reason.SNOOZED:
        what = "snoozed"
    elif event.reason in _SPARED:
        what = "handed back"
    else:
        what = event.state if event.state in ("dead", "cancelled") else "failed"
    counted = f"attempt {event.attempt}"
    if what in ("failed", "dead") and event.failures is not None and event.max_attempts is not None:
        counted = f"attempt {event.failures} of {event.max_attempts}"
    tenant = "" if event.tenant is None else f", tenant {event.tenant}"
    again = ""
    if event.state in ("ready", "scheduled"):
        again = f", again in {_wait(event.delay)}" if event.delay else ", again at once"
    why = "" if what == "snoozed" else f": {event.error or 'no reason given'}"
    level = logging.WARNING if what in ("dead", "failed") else logging.INFO
    return level, f"{what} {event.task} {event.job_id} ({counted}{tenant}){again}{why}"


def _wait(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else age(seconds)


def describe(event: Event) -> tuple[int, str]:
    """Return the level and the line of an event."""
    match event:
        case JobClaimed():
            return logging.DEBUG, f"claimed {_job(event)}"
        case JobRecorded(state="succeeded"):
            return logging.DEBUG, f"succeeded {_job(event)} in {event.seconds:.3f} s"
        case JobRecorded():
            return _recorded(event)
        case JobLost():
            return logging.WARNING, f"lost {event.task} {event.job_id} (attempt {event.attempt}): no longer this worker's"
        case JobAbandoned():
            return logging.WARNING, f"gave up on {event.task} {event.job_id} (attempt {event.attempt}): it ignores its end"
        case LoopBlocked():
            by = "no job" if event.job_id is None else f"job {event.job_id} ({event.task})"
            if event.over:
                return logging.WARNING, f"the event loop is free again after {event.seconds:.1f} s: {by} at {event.where}"
            # The guard's own line is there already: its thread is not blocked.
            return logging.DEBUG, f"the event loop has been blocked for {event.seconds:.1f} s by {by} at {event.where}"
        case LeaseLost():
            return logging.WARNING, f"worker {event.worker} lost its lease: {event.reason}"
        case JobsRescued():
            more = f", of which {SHOWN} are named here" if len(event.job_ids) > SHOWN else ""
            return logging.WARNING, f"took over {counted(event.count, 'job')} of dead worker {event.worker}{more}"
        case JobsPromoted():
            return logging.DEBUG, f"{counted(event.count, 'scheduled job')} fell due"
        case JobsPruned():
            return logging.INFO, f"deleted {counted(event.count, 'job')} that ended longer ago than jobs are kept"
        case DatabaseLost():
            return logging.WARNING, f"the {event.loop} cannot reach the database: {event.error}"
        case DatabaseRecovered():
            return logging.INFO, f"the {event.loop} reaches the database again, after {event.seconds:.1f} s"
        case RisksFound():
            return logging.DEBUG, f"starting with {counted(len(event.findings), 'finding')}"
        case PoolerFound():
            return logging.DEBUG, "a pooler stands between"  # services.py has said what that means
        case ListenerConnected():
            return logging.DEBUG, "listening for wake-ups"
        case WorkerStarted():
            return logging.INFO, (
                f"worker {event.worker} serves {', '.join(event.queues)} with {counted(event.concurrency, 'job')} at once"
            )
        case WorkerStopping():
            return logging.INFO, f"stopping: {event.running} running, with {event.grace:g} s to end"
        case WorkerStopped():
            return logging.INFO, f"worker {event.worker} has stopped"
        case _:
            values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
            return logging.INFO, f"{type(event).__name__} {', '.join(f'{name}={value}' for name, value in values.items())}"
