"""One timer of the event loop for all that has a time limit: a timer each costs as much as what most of them are set for.

Knows the time limits of what is under way, and calls for each that is late; what that does is the giver's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
BLOCKED = 0.1
"""Seconds by which the timer is late when something has blocked the event loop."""


class Overdue(Generic[K]):
    """Calls `late(key)` in the event loop in which the key was added, unless it is taken out in time."""

    def __init__(self, late: Callable[[K], object]) -> None:
        self._late = late
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ends[K]] = WeakKeyDictionary()

    def add(self, key: K, seconds: float) -> dict[K, float]:
        """Begin to wait for a key; `pop` it from what is returned when it is no longer waited for."""
        loop = asyncio.get_running_loop()
        ends = self._loops.get(loop)
        if ends is None:
            ends = self._loops[loop] = _Ends(self._late)
        until = ends[key] = loop.time() + seconds
        if ends.timer is None or until < ends.timer.when():
            ends.set_timer(loop, until)
        return ends


class _Ends(dict[K, float]):
    """Those of one event loop."""

    def __init__(self, late: Callable[[K], object]) -> None:
        super().__init__()
        self.timer: asyncio.TimerHandle | None = None
        self._late = late

    def set_timer(self, loop: asyncio.AbstractEventLoop, when: float, *, was_blocked: bool = False) -> None:
        if self.timer is not None:
            self.timer.cancel()
        # A timer keeps its context: that of a job would keep the job.
        self.timer = loop.call_at(when, self._look, loop, when, was_blocked, context=contextvars.Context())

    def _look(self, loop: asyncio.AbstractEventLoop, when: float, was_blocked: bool) -> None:
        self.timer = None
        now = loop.time()
        if now - when > BLOCKED and not was_blocked:
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
