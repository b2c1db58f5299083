"""An outage of the database as one loop sees it: said once, waited out with growing pauses, and its end said.

Decides nothing about what an outage is, and asks the database nothing.
"""

from __future__ import annotations

import asyncio
import random
import time

from .events import DatabaseLost, DatabaseRecovered, Observers

LONGEST_PAUSE = 2.0
"""Seconds between two attempts at most, jittered."""


class Outage:
    """The outages of one loop, one after the other; `shortest`: seconds of the first pause, jittered."""

    def __init__(self, observers: Observers, loop: str, *, shortest: float = 0.1) -> None:
        self._observers = observers
        self._loop = loop
        self._shortest = self._pause = shortest
        self._since: float | None = None

    @property
    def under_way(self) -> bool:
        """Whether there is one now."""
        return self._since is not None

    def lost(self, error: BaseException) -> None:
        """Take note of an attempt that failed."""
        if self._since is None:
            self._since = time.monotonic()
            self._observers.emit(DatabaseLost(self._loop, str(error)))

    async def pause(self) -> None:
        """Wait before the next attempt, twice as long each time."""
        await asyncio.sleep(self._pause * (0.5 + random.random()))
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def over(self) -> None:
        """Take note of an attempt that succeeded."""
        if self._since is not None:
            self._observers.emit(DatabaseRecovered(self._loop, time.monotonic() - self._since))
            self._since, self._pause = None, self._shortest
