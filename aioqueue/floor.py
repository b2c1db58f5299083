"""The scan floor of a lane: a position below which no ready job is, so that a claim never walks over what was taken; that of
limited keys, so that nobody counts what has ended.

Pure: it is told what a tick read (virtual time, snapshot) and answers from where to scan and what to ask next.
The floor moves up to V of a tick only when every transaction that was running then has ended AND a later look has found no
visible ready row up to there; why that is exact stands in `LaneFloor.observe`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar
from uuid import UUID

T = TypeVar("T", int, UUID)
LONG = 1.0
"""Seconds after which a running transaction is set aside, so that it holds no floor back."""
TWICE, MANY = 0.04, 100
"""It is set aside as soon as two ticks have seen it, so many seconds apart, once this process has claimed so many jobs meanwhile:
every claim would walk over those. Where fewer are claimed, waiting costs less than the job that it may leave being found late.
But not for a floor that has not risen yet: at its start a process walks over all that were taken and cannot be cleared away."""


class Snapshot(NamedTuple):
    """As tick.sql gives it: every XID from `xmax` on was taken after V was read, of those below it `running` had not ended."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read 'xmin:xmax:xip,xip,…'."""
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(int(x) for x in running.split(",")) if running else frozenset())


@dataclass(slots=True)
class LaneFloor(Generic[T]):
    """The floor of one ordered line, in units of `value` (virtual time, or microseconds); `T` breaks ties.

    `start` is where scans begin, inclusive. `lowest` is the smallest T.
    """

    lowest: T
    value: int = 0
    tie: T | None = None
    seen: int = 0
    lowered: bool = False
    """Whether it went back since this was last taken note of: a claim that found nothing has not looked there."""
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)
    _armed: int | None = None
    _first: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    _aside: dict[int, int] = field(default_factory=dict)
    _reached: int = 0
    _risen: bool = False
    """Whether it has ever been answered, since it was made or reset."""
    _taken: int = 0
    """Jobs that this process had claimed when the place within one position of V was asked for the last time."""

    @property
    def start(self) -> tuple[int, T]:
        """The position scans begin at: every ready job that may be seen is at or above it."""
        return self.value, self.lowest if self.tie is None else self.tie

    @property
    def question(self) -> int | None:
        """Up to which value the next tick should look for a ready row from `start` on; None: no need."""
        return self._armed

    @property
    def at_rest(self) -> bool:
        """Whether further ticks could not move the floor: nothing seen lies above it."""
        return self._armed is None and not self._waiting and not self._aside and self._reached <= self.value

    def reset(self) -> None:
        """Start from zero: the server was restarted or failed over, or the clock went back."""
        self.value, self.tie, self._armed, self.seen, self._reached = 0, None, None, 0, 0
        self._risen = False
        self.lowered = True
        self._waiting.clear()
        self._first.clear()
        self._aside.clear()

    def observe(self, value: int, snapshot: Snapshot, now: float, taken: int = 0) -> None:
        """Take in one tick: `value` (V, read FIRST), then `snapshot`; `now` in seconds of a monotonic clock.

        `taken`: how many jobs this process has claimed in the line so far.

        A transaction that had no XID when the snapshot was taken will read V >= value after it has one, so its rows lie
        above value. Those that had one are waited for; after their end a look with a new snapshot sees all they left.
        A long one is set aside instead; at its end the floor goes back to the V that the tick BEFORE it was first seen
        had read: it took its XID later than that, so every row of it lies above. Below the floor as it was no other
        transaction can leave a row, so that the next tick may look up to there at once.

        Where many tenants' jobs have come at once they share one position, and V stands still until all are claimed. A floor
        that was stopped there has nobody to wait for any more: as jobs are claimed it asks again where the first of them is.
        """
        ended = [xid for xid in self._aside if xid not in snapshot.running]
        for xid in ended:
            self._rewind(self._aside.pop(xid))
        for xid in [xid for xid in self._first if xid not in snapshot.running]:
            del self._first[xid]
        for xid in snapshot.running:
            since, taken_then, before = self._first.setdefault(xid, (now, taken, self.seen))
            soon = taken - taken_then >= MANY or (bool(self._waiting) and not self._risen)
            if now - since > (TWICE if soon else LONG):
                self._aside.setdefault(xid, before)
        oldest = min((xid for xid in snapshot.running if xid not in self._aside), default=snapshot.xmax)
        while self._waiting and self._waiting[0][0] <= oldest:
            self._armed = self._waiting.popleft()[1]
        if value > self.value and (not self._waiting or self._waiting[-1][1] < value):
            self._waiting.append((snapshot.xmax, value))
        elif value == self.value and self.tie is not None and self._armed is None and taken > self._taken:
            self._armed, self._taken = value, taken
        self.seen = value
        self._reached = max(self._reached, value)

    def answer(self, start: tuple[int, T], asked: int, first: tuple[int, T] | None) -> None:
        """Take in what a tick found from `start` up to `asked`: its first visible ready row, or None."""
        if self._armed is None or asked > self._armed or start != self.start:
            return  # rewound meanwhile: the question is asked anew
        self._risen = True
        if first is not None:
            self.value, self.tie = first
        else:
            self.value, self.tie = max(self.value, asked + 1), None
        if asked == self._armed:
            self._armed = None

    def lower(self, first: tuple[int, T]) -> None:
        """A full look found a ready row below the floor: go back to it."""
        if first < self.start:  # T is ordered as PostgreSQL orders it
            self.value, self.tie = first
            self.lowered = True

    def _rewind(self, value: int) -> None:
        if value < self.value:
            self._armed = max(self._armed or 0, self.value - 1)
            self.value, self.tie = value, None
            self.lowered = True


class KeyFloors:
    """Where the rows of each limited key begin, in one of the tables held and parked: so many keys, those met last.

    Positions are drawn under the key's lock, so that they come in the order of their commits: a row that comes later has a
    higher position than all that were ever seen, and what an answer found to be first stays so for ever, whatever becomes of
    the transaction that asked. Only a server that lost commits may have gone back; `losses` (server.py) tells.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self._firsts: dict[int, int] = {}
        self._losses = 0

    def text(self, losses: int) -> str:
        """Return them as JSON, for a statement that is sent now; `losses`: connections lost so far."""
        if losses != self._losses:
            self._firsts.clear()
            self._losses = losses
        return json.dumps(self._firsts) if self._firsts else "{}"

    def learn(self, firsts: Mapping[int, int], losses: int) -> None:
        """Take in what an answer said; `losses` as they were before its statement was sent."""
        if losses != self._losses:
            return
        for key, first in firsts.items():
            self._firsts[key] = max(first, self._firsts.pop(key, 0))
        while len(self._firsts) > self.capacity:
            del self._firsts[next(iter(self._firsts))]

    def reset(self) -> None:
        """Begin at the start of every key: the server was restarted or failed over."""
        self._firsts.clear()
        self._losses = -1


class Floors:
    """The floors of all lanes that one process serves, and that of `scheduled` in microseconds since 1970."""

    def __init__(self, lanes: Iterable[int], lowest: UUID, *, suspects: Iterable[int] = ()) -> None:
        self.suspects = frozenset(suspects)
        self.lanes = [*lanes, *self.suspects]
        self.suspect_ready = False
        """Whether the last tick saw a suspect ready: that lane is asked about in full, at every tick."""
        self.due: LaneFloor[int] = LaneFloor(0)
        self.held = KeyFloors()
        self.parked = KeyFloors()
        self.parked_at = 0.0
        """When jobs were parked, or found to be, the last time; by time.monotonic()."""
        self._floors: dict[int, LaneFloor[UUID]] = {lane: LaneFloor(lowest) for lane in self.lanes}
        self._claimed = dict.fromkeys(self.lanes, 0)
        self._taken = dict.fromkeys(self.lanes, 0)
        self._moved = False

    def __getitem__(self, lane: int) -> LaneFloor[UUID]:
        return self._floors[lane]

    def claimed(self, lane: int, vt: int, jobs: int = 1) -> None:
        """Take note of the last position of so many claimed jobs: the lane's virtual time has come this far."""
        self._moved = True
        self._claimed[lane] = max(self._claimed[lane], vt)
        self._taken[lane] += jobs

    def taken(self, lane: int) -> int:
        """Return how many jobs this process has claimed in the lane."""
        return self._taken[lane]

    def highest_claimed(self, lane: int) -> int:
        """Return the highest virtual time this process claimed in the lane."""
        return self._claimed[lane]

    def take_lowered(self) -> bool:
        """Whether the floor of a lane went back since the last call: the end of a long transaction may have left jobs there."""
        lowered = [floor for floor in self._floors.values() if floor.lowered]
        for floor in lowered:
            floor.lowered = False
        return bool(lowered)

    def begin_tick(self) -> None:
        """What is claimed from here on is the next tick's."""
        self._moved = False

    @property
    def at_rest(self) -> bool:
        """Whether the last tick has read what was claimed before it, and no further tick could move a floor."""
        return not self._moved and all(
            floor.at_rest and self._claimed[lane] <= floor.seen for lane, floor in self._floors.items()
        )

    def reset(self) -> None:
        """Start from zero everywhere; see `LaneFloor.reset`."""
        self.due.reset()
        self.held.reset()
        self.parked.reset()
        for floor in self._floors.values():
            floor.reset()
        self._claimed = dict.fromkeys(self.lanes, 0)
