"""Writes every event as one readable line; the standalone worker's logging is this observer of events and nothing else.

Level DEBUG for what goes well, INFO for changes of state and attempts that will be repeated, WARNING for dead and lost jobs.
"""

from __future__ import annotations

import dataclasses
import logging

from aioqueue.events import (
    DatabaseLost,
    DatabaseRecovered,
    Event,
    JobAbandoned,
    JobClaimed,
    JobLost,
    JobRecorded,
    JobsPromoted,
    JobsRescued,
    LeaseLost,
    ListenerConnected,
    LoopBlocked,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)

from .failure import one_line

LINE = 300


class EventLog:
    """An observer that logs."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, event: Event) -> None:
        """Log one event."""
        level, text = describe(event)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", one_line(text, LINE))


def _job(event: JobClaimed | JobRecorded) -> str:
    tenant = "" if event.tenant is None else f", tenant {event.tenant}"
    return f"{event.task} {event.job_id} (attempt {event.attempt}{tenant})"


def describe(event: Event) -> tuple[int, str]:
    """Return the level and the line of an event."""
    match event:
        case JobClaimed():
            return logging.DEBUG, f"claimed {_job(event)}"
        case JobRecorded(state="succeeded"):
            return logging.DEBUG, f"succeeded {_job(event)} in {event.seconds:.3f} s"
        case JobRecorded():
            level = logging.WARNING if event.state == "dead" else logging.INFO
            return level, f"{event.state} {_job(event)}: {event.error or 'no reason given'}"
        case JobLost():
            return logging.WARNING, f"lost {event.task} {event.job_id} (attempt {event.attempt}): no longer this worker's"
        case JobAbandoned():
            return logging.WARNING, f"gave up on {event.task} {event.job_id} (attempt {event.attempt}): it ignores its end"
        case LoopBlocked(over=True):
            return logging.WARNING, f"the event loop is free again after {event.seconds:.1f} s: {event.where}"
        case LoopBlocked():
            job = "" if event.job_id is None else f" (job {event.job_id})"
            return logging.WARNING, f"the event loop has been blocked for {event.seconds:.1f} s by {event.where}{job}"
        case LeaseLost():
            return logging.WARNING, f"worker {event.worker} lost its lease: {event.reason}"
        case JobsRescued():
            return logging.WARNING, f"took over {event.count} jobs of dead worker {event.worker}"
        case JobsPromoted():
            return logging.DEBUG, f"{event.count} scheduled jobs fell due"
        case DatabaseLost():
            return logging.WARNING, f"the {event.loop} cannot reach the database: {event.error}"
        case DatabaseRecovered():
            return logging.INFO, f"the {event.loop} reaches the database again, after {event.seconds:.1f} s"
        case ListenerConnected():
            return logging.DEBUG, "listening for wake-ups"
        case WorkerStarted():
            return logging.INFO, (f"worker {event.worker} serves {', '.join(event.queues)} with {event.concurrency} jobs at once")
        case WorkerStopping():
            return logging.INFO, f"stopping: {event.running} running, with {event.grace:g} s to end"
        case WorkerStopped():
            return logging.INFO, f"worker {event.worker} has stopped"
        case _:
            values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
            return logging.INFO, f"{type(event).__name__} {', '.join(f'{name}={value}' for name, value in values.items())}"
