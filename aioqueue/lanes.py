"""The lanes of a worker's queues, in the order in which a claim visits them. Decides nothing else, and talks to nobody."""

from __future__ import annotations

from collections.abc import Mapping

from .floor import Floors
from .job import PRIORITIES, SUSPECT, lane
from .store import LaneScan

LOWEST_FIRST = 20
"""One claim in so many starts at the lowest priority, so that it is never starved."""


class Lanes:
    """The lanes of a worker's queues, in the order of the next claim."""

    def __init__(self, queues: Mapping[str, int]) -> None:
        self._weights = dict(queues)
        self._lanes = {(queue, priority): lane(queue, priority) for queue in queues for priority in PRIORITIES}
        self._turn = 0

    def all(self) -> list[int]:
        """Return every lane but the suspects'."""
        return list(self._lanes.values())

    def suspects(self) -> list[int]:
        """Return the suspect lane of each queue."""
        return [lane(queue, SUSPECT) for queue in self._weights]

    def scans(self, floors: Floors, limit: int) -> list[LaneScan]:
        """Return the lanes for one claim: by priority, within one the queues in turn, each with its share of `limit`."""
        self._turn += 1
        priorities = list(PRIORITIES) if self._turn % LOWEST_FIRST == 0 else list(reversed(PRIORITIES))
        names = list(self._weights)
        first = self._turn % len(names)
        total = sum(self._weights.values())
        return [
            LaneScan(
                self._lanes[name, priority],
                floors[self._lanes[name, priority]].start,
                max(1, limit * self._weights[name] // total),
                priority,
            )
            for priority in priorities
            for name in names[first:] + names[:first]
        ]
