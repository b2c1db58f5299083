"""How an attempt ended, as a value, and the words a task uses to say so (`Snooze`, `RetryIn`, `Cancel`).

Error text is made storable here, once: no NUL, no lone surrogate, bounded head and tail, whatever the exception does.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

MESSAGE_LIMIT = 4_000
TRACEBACK_LIMIT = 16_000
GROUP_WIDTH, GROUP_DEPTH = 5, 3
"""Members of an exception group, and groups within groups, that a traceback shows."""


class Reason(StrEnum):
    """Why an attempt did not end in the job's own success; stands in its row."""

    ERROR = "error"
    TIME_LIMIT = "time limit"
    WORKER_LOST = "worker lost"
    INTERRUPTED = "interrupted"
    UNKNOWN_TASK = "unknown task"
    NO_CONNECTION = "no connection"
    SNOOZED = "snoozed"
    CANCELLED = "cancelled"
    INVALID_PAYLOAD = "invalid payload"
    INVALID_RESULT = "invalid result"
    VIOLATION = "transaction violation"


class JobSignal(Exception):
    """Base of what a task raises to end its attempt otherwise than by success or failure."""


def _seconds(delay: timedelta | float) -> float:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
    if not 0 <= seconds <= 10 * 365 * 86_400:
        raise ValueError(f"delay must be between 0 s and 10 years, not {delay!r}")
    return seconds


class Snooze(JobSignal):
    """Run the job again after `delay` (timedelta or seconds); the attempt is not held against it."""

    def __init__(self, delay: timedelta | float) -> None:
        self.delay = _seconds(delay)
        super().__init__(f"snooze for {self.delay:g} s")


class RetryIn(JobSignal):
    """Count the attempt as failed and retry after `delay`, whatever the back-off says; the last attempt makes it dead."""

    def __init__(self, delay: timedelta | float, message: str = "retry asked for") -> None:
        self.delay = _seconds(delay)
        super().__init__(message)


class Cancel(JobSignal):
    """End the job as cancelled."""

    def __init__(self, reason: str = "cancelled by its own task") -> None:
        self.reason = storable(str(reason), MESSAGE_LIMIT)
        super().__init__(self.reason)


def storable(text: str, limit: int) -> str:
    """Make text that PostgreSQL takes: NUL and lone surrogates replaced, head and tail kept, by code point."""
    clean = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    if len(clean) <= limit:
        return clean
    half = limit // 2
    return f"{clean[:half]}\n… {len(clean) - 2 * half:,} characters left out …\n{clean[-half:]}"


def _narrowed(error: BaseException, depth: int = GROUP_DEPTH) -> BaseException:
    """Return the exception with the first few members of its groups: to look at a million of them would stop the loop."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    # What lies deeper than is shown may be anything.
    few = [_narrowed(one, depth - 1) for one in error.exceptions[:GROUP_WIDTH]] if depth else [Exception()]
    narrow = BaseExceptionGroup(error.message, few).with_traceback(error.__traceback__)
    if depth:
        narrow.__cause__ = error.__cause__ and _narrowed(error.__cause__, depth - 1)
        narrow.__context__ = error.__context__ and _narrowed(error.__context__, depth - 1)
        narrow.__suppress_context__ = error.__suppress_context__
    for note in getattr(error, "__notes__", ()):
        narrow.add_note(str(note))
    if (more := len(error.exceptions) - len(few)) > 0:
        narrow.add_note(f"… and {more:,} more exceptions")
    return narrow


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An exception as text that can always be stored."""

    type: str
    message: str
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, *, with_traceback: bool = True) -> ErrorText:
        """Describe any exception, also one whose `__str__` raises or that is a group a thousand wide."""
        try:
            message = str(error)
        except BaseException as broken:
            message = f"(its __str__ raised {type(broken).__name__})"
        text = None
        if with_traceback:
            try:
                described = traceback.TracebackException.from_exception(_narrowed(error), limit=-40, max_group_depth=GROUP_DEPTH)
                text = storable("".join(described.format()), TRACEBACK_LIMIT)
            except BaseException as broken:
                text = f"(its traceback could not be formatted: {type(broken).__name__})"
        name = type(error).__qualname__
        module = type(error).__module__
        full = name if module in ("builtins", "__main__") else f"{module}.{name}"
        return cls(storable(full, 200), storable(message, MESSAGE_LIMIT), text)


@dataclass(slots=True)
class Succeeded:
    """The task returned; `result` is JSON text. Not frozen: most jobs make one, and that costs several times as much."""

    result: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed; it is retried after `delay` seconds, or the job is dead when that is None."""

    reason: Reason
    error: ErrorText
    delay: float | None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job ends as cancelled."""

    message: str


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The job waits `delay` seconds and runs again; spared."""

    delay: float


@dataclass(frozen=True, slots=True)
class Released:
    """The job is handed back, spared: clean stop, unknown task, no free connection."""

    reason: Reason
    message: str
    delay: float = 0.0


Outcome = Succeeded | Failed | Cancelled | Snoozed | Released
