"""One attempt of a job in this process: where it stands, and the outcome that an exception or the runtime's own end makes of it.

Decides, and does nothing: user_code.py calls user code, run.py hands the outcome on, guard.py ends what blocks the event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from .claimed import Claimed
from .definition import TaskDefinition
from .errors import TimeLimitExceeded, TransactionViolation
from .outcome import Cancel, Cancelled, ErrorText, Failed, Outcome, Reason, Released, RetryIn, Snooze, Snoozed

QUERY_CANCELED = "57014"
"""SQLSTATE of a statement that was ended."""


class Cause(Enum):
    """Why the runtime ended a run."""

    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    LEASE_LOST = "lease lost"


def _ended_by_server(error: BaseException) -> bool:
    """Whether a statement ran into its statement_timeout, also where SQLAlchemy has wrapped the driver's error."""
    return getattr(getattr(error, "orig", None) or error, "sqlstate", None) == QUERY_CANCELED


class Run:
    """One job in this process, from its claim until its slot is free again."""

    # What most runs never set stands in the class: to set it for each costs more than all else of a run.
    definition: TaskDefinition | None = None
    limit = 0.0
    ends: float | None = None
    """When its time limit is over, by time.monotonic(); None while no user code runs."""
    blocked: str | None = None
    """What the guard saw it do to the event loop."""
    abandoned = False
    task: asyncio.Task[None] | None = None
    thread: asyncio.Future[Any] | None = None
    cause: Cause | None = None
    in_user_code = False
    waits = False
    """Whether it waits for the connection of its own transaction; user code has not begun."""
    should_stop = False
    saw_stop = False
    """Whether user code has looked, and knows that it is to stop."""
    timer: asyncio.TimerHandle | None = None
    """Set while its end is awaited for so long only."""

    def __init__(self, job: Claimed) -> None:
        self.job = job
        self._to_take = [True]
        """Empty once somebody sees to its outcome: whatever threads try, one of them pops it."""

    def look(self) -> bool:
        """Answer user code that asks whether it is to stop."""
        self.saw_stop = self.should_stop
        return self.should_stop

    def take(self) -> bool:
        """Take it upon oneself to have the outcome recorded, from any thread; True for the first who asks, and only for him."""
        try:
            self._to_take.pop()
        except IndexError:
            return False
        return True

    @property
    def taken(self) -> bool:
        """Whether somebody sees to its outcome already."""
        return not self._to_take

    def give_up_in(self, seconds: float, give_up: Callable[[Run], object]) -> None:
        """Call `give_up` once so much time has passed, unless the run is over."""
        self.timer = asyncio.get_running_loop().call_later(seconds, give_up, self)

    @property
    def left(self) -> float:
        """Seconds left of its time limit; never quite none."""
        return max(0.001, 0.0 if self.ends is None else self.ends - time.monotonic())

    def ended_by(self, *causes: Cause) -> bool:
        """Whether the runtime has ended it for one of these causes (none given: for any)."""
        return self.cause is not None and (not causes or self.cause in causes)

    def delay(self, error: BaseException) -> float | None:
        """Seconds until it is tried again after `error`; None: dead."""
        failures = self.job.failures
        if self.definition is None or failures >= self.job.max_attempts:
            return None
        return self.definition.retry.delay(error, failures=failures, random=random.random)

    def failed(self, error: BaseException, reason: Reason = Reason.ERROR) -> Failed:
        """Return the outcome of a failed attempt, retried by the task's policy."""
        return Failed(reason, ErrorText.of(error), self.delay(error))

    def raised(self, error: BaseException) -> Outcome:
        """Return the outcome after `error` came out of user code."""
        if isinstance(error, asyncio.CancelledError):
            if self.ended_by():
                return self.ended()
            # Otherwise the task cancelled itself or raised it: a failure like any other.
        elif self.ended_by(Cause.TIME_LIMIT, Cause.LEASE_LOST):
            return self.ended(error)
        match error:
            case Snooze():
                return Snoozed(error.delay)
            case Cancel():
                return Cancelled(error.reason)
            case RetryIn():
                last = self.job.failures >= self.job.max_attempts
                return Failed(Reason.ERROR, ErrorText.of(error, with_traceback=False), None if last else error.delay)
            case Exception() if _ended_by_server(error) and self.left < 0.05 * self.limit:
                self.cause = Cause.TIME_LIMIT
                return self.ended(error)
            case TransactionViolation():
                return self.failed(error, Reason.VIOLATION)
            case _:
                return self.failed(error)

    def ended(self, error: BaseException | None = None) -> Outcome:
        """Return the outcome after the runtime ended it; `error` is what user code raised then."""
        match self.cause:
            case Cause.TIME_LIMIT:
                limit = TimeLimitExceeded(self.limit)
                limit.__cause__ = error
                if self.blocked is not None:
                    limit.add_note(self.blocked)
                return self.failed(limit, Reason.TIME_LIMIT)
            case Cause.CANCELLED:
                return Cancelled("cancelled while it ran")
            case Cause.INTERRUPTED:
                return Released(Reason.INTERRUPTED, "its worker stopped")
            case _:
                return Released(Reason.INTERRUPTED, "its worker could not renew its lease")

    def timed_out(self, stack: str | None) -> Failed:
        """Return the outcome of a time-out that the guard writes; `stack`: where it blocks the event loop."""
        limit = TimeLimitExceeded(self.limit)
        text = ErrorText.of(limit, with_traceback=False)
        message = text.message if self.blocked is None else f"{text.message}; {self.blocked}"
        return Failed(Reason.TIME_LIMIT, ErrorText(text.type, message, stack), self.delay(limit))
