"""Two checks of one worker's floors that need no luck: nothing that a tick could have seen may be ready below them.

Both give a floor the one tick that it needs to go back, when a transaction that it had set aside has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue.claimed import Claimed
from aioqueue.floor import Floors

from .model import Chaos

AUDIT_EVERY = 6
"""Ticks from one look at the tables to the next; a look takes two ticks."""

Start = tuple[int, UUID]


class FloorAudit:
    """The audit of one worker's floors."""

    def __init__(self, chaos: Chaos, floors: Floors, name: str) -> None:
        self._chaos = chaos
        self._floors = floors
        self._name = name
        self._ticks = 0
        self._below: set[tuple[Any, ...]] | None = None
        self._owed: list[tuple[int, int, Start]] = []

    def starts(self) -> dict[int, Start]:
        """Where the worker's scans begin now."""
        return {number: self._floors[number].start for number in self._floors.lanes}

    def owe(self, jobs: Sequence[Claimed], before: dict[int, Start]) -> None:
        """Jobs that another worker found ready where this one's floor had passed (before that claim, and still).

        Right only if they were committed after this worker's last tick looked; then its next tick takes the floor back.
        """
        for job in jobs:
            position = job.vt, job.job_id
            if position < before[job.lane] and position < self._floors[job.lane].start:
                self._owed.append((self._ticks, job.lane, position))

    def begin_tick(self) -> None:
        """A tick begins: what is owed from before must be settled at its end."""
        self._ticks += 1

    async def end_tick(self, conn: AsyncConnection[TupleRow], due_from: datetime) -> None:
        """A tick has ended: check what was owed, and now and then the tables."""
        below = [owed for owed in self._owed if owed[2] < self._floors[owed[1]].start]
        for since, number, position in below:
            if since < self._ticks:
                self._chaos.fault(f"{self._name}: its floor in lane {number} passed the ready position {position}")
        self._owed = [owed for owed in below if owed[0] == self._ticks]
        if self._ticks % AUDIT_EVERY < 2:
            await self._look(conn, due_from)

    async def _look(self, conn: AsyncConnection[TupleRow], due_from: datetime) -> None:
        """What is ready below a floor before a tick and still after it was committed when the tick looked: it is lost."""
        starts = [(number, *start) for number, start in self.starts().items()]
        rows = await self._chaos.rows(
            conn,
            "SELECT l.lane, l.vt, l.job_id FROM unnest(%s::bigint[], %s::bigint[], %s::uuid[]) AS u (lane, vt, id)"
            " JOIN aioqueue.live l ON l.lane = u.lane AND (l.vt, l.job_id) < (u.vt, u.id) AND l.worker IS NULL"
            " UNION ALL SELECT 0, (extract(epoch FROM s.run_at) * 1000000)::bigint, s.job_id FROM aioqueue.scheduled s"
            " WHERE s.run_at < %s",
            *map(list, zip(*starts, strict=True)),
            due_from,
        )
        if self._ticks % AUDIT_EVERY == 0:
            self._below = set(rows)
        elif self._below is not None:
            self._chaos.counts["floor audits"] += 1
            for position in self._below.intersection(rows):
                self._chaos.fault(f"{self._name}: ready below its floor and not seen by a tick: {position}")
            self._below = None
