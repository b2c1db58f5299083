"""One timer of the event loop for all that has a time limit: a timer each costs as much as what most of them are set for.

Knows the time limits of what is under way, and calls for each that is late; what that does is the giver's.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
BLOCKED = 0.1
"""Seconds by which the timer is late when something has blocked the event loop."""


class Overdue(Generic[K]):
    """Calls `late(key)` in the event loop in which the key was added, unless it is taken out in time."""

    def __init__(self, late: Callable[[K], object]) -> None:
        self._late = late
        self._loops: dict[asyncio.AbstractEventLoop, _Ends[K]] = {}

    def add(self, key: K, seconds: float) -> dict[K, float]:
        """Begin to wait for a key; `pop` it from what is returned when it is no longer waited for."""
        loop = asyncio.get_running_loop()
        ends = self._loops.get(loop)
        if ends is None:
            # Its timer knows its loop, so that a weak reference to that would keep it as well.
            for other in [other for other in list(self._loops) if other.is_closed()]:
                self._loops.pop(other, None)
            ends = self._loops[loop] = _Ends(self._late)
        # Not the loop's time: that of uvloop stands still while something blocks it.
        until = ends[key] = time.monotonic() + seconds
        if ends.timer is None or until < ends.when:
            ends.set_timer(loop, until)
        return ends


class _Ends(dict[K, float]):
    """Those of one event loop."""

    def __init__(self, late: Callable[[K], object]) -> None:
        super().__init__()
        self.timer: asyncio.TimerHandle | None = None
        self.when = 0.0
        self._late = late

    def set_timer(self, loop: asyncio.AbstractEventLoop, when: float, *, was_blocked: bool = False) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.when = when
        # A timer keeps its context: that of a job would keep the job.
        delay = max(0.0, when - time.monotonic())
        self.timer = loop.call_later(delay, self._look, loop, was_blocked, context=contextvars.Context())

    def _look(self, loop: asyncio.AbstractEventLoop, was_blocked: bool) -> None:
        self.timer = None
        now = time.monotonic()
        if now - self.when > BLOCKED and not was_blocked:
            # What is waited for may lie ready, and nobody has had the time to look: they have it now, once.
            self.set_timer(loop, now + BLOCKED, was_blocked=True)
            return
        late = [key for key, ends in self.items() if ends <= now]
        for key in late:
            del self[key]
        if self:
            self.set_timer(loop, min(self.values()))
        for key in late:
            self._late(key)
