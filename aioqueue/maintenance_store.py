"""The operations of upkeep, one method each, the connection first: tick, promote, rescue, prune; a base of `Store`.

Whosever jobs they are; when, maintenance/ says. The sweep of limits stands in limit_store.py, the SQL in sql/functions/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection

from .bound_store import BoundStore, array
from .floor import Snapshot
from .job import Position

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_CALLS = {
    "tick": "SELECT * FROM aioqueue.tick(%s::bigint, %s::bigint[], %s::bigint[], %s::bigint[], %s::uuid[], %s::bigint[],"
    " %s::timestamptz, %s::timestamptz)",
    "promote": "SELECT aioqueue.promote(%s::timestamptz, %s::integer)",
    "rescue": "SELECT * FROM aioqueue.rescue(%s::bigint, %s::integer, %s::text::jsonb, %s::text::jsonb)",
    "rescue_orphans": "SELECT aioqueue.rescue_orphans(%s::integer, %s::text::jsonb, %s::text::jsonb)",
    "make_ranges": "SELECT aioqueue.make_ranges(%s::double precision, %s::integer, 1)",
    "prune_range": "SELECT aioqueue.prune_range(%s::double precision, %s::double precision)",
    "prune_default": "SELECT aioqueue.prune_default(%s::double precision, %s::double precision, %s::integer)",
    "sweep_progress": "SELECT aioqueue.sweep_progress(%s::integer)",
}


class LaneQuestion(NamedTuple):
    """One lane of a tick: the highest vt claimed by this process, its floor, and up to where to look (None: no need)."""

    lane: int
    claimed_vt: int
    floor: tuple[int, UUID]
    upto: int | None


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick read; the lists run parallel to the questions."""

    vts: list[int]
    clock: datetime
    snapshot: Snapshot
    firsts: list[Position | None]
    first_due: datetime | None
    next_due: datetime | None
    losses: bool
    cancelled: list[UUID]
    server: tuple[str, datetime]
    """Timeline and postmaster start time; when it changes, floors go to zero and the lease is proven anew."""
    paused: frozenset[int] = frozenset()
    """The lanes of paused queues."""


class MaintenanceStore(BoundStore):
    """The operations of maintenance, bound to one schema."""

    def __init__(self, schema: str, calls: Mapping[str, str]) -> None:
        super().__init__(schema, {**calls, **_CALLS})

    async def tick(
        self,
        conn: AsyncConnection[Any],
        *,
        worker: int,
        questions: Sequence[LaneQuestion],
        due_from: datetime = UNIX_EPOCH,
        due_to: datetime | None = None,
    ) -> Tick:
        """Publish and read virtual times, snapshot, and the answers to the floors' questions."""
        (row,) = await self._rows(
            conn,
            "tick",
            (
                worker,
                array(q.lane for q in questions),
                array(q.claimed_vt for q in questions),
                array(q.floor[0] for q in questions),
                array(q.floor[1] for q in questions),
                array(q.upto for q in questions),
                due_from,
                due_to,
            ),
        )
        return Tick(
            vts=row[0],
            clock=row[1],
            snapshot=Snapshot.parse(row[2]),
            firsts=[None if vt is None else Position(vt, i) for vt, i in zip(row[3], row[4], strict=True)],
            first_due=row[5],
            next_due=row[6],
            losses=row[7],
            cancelled=row[8],
            server=(row[9], row[10]),
            paused=frozenset(row[11]),
        )

    async def promote(self, conn: AsyncConnection[Any], *, due_from: datetime = UNIX_EPOCH, limit: int) -> int:
        """Make due jobs ready; the number, or −1 when another process is at it."""
        return int(await self._value(conn, "promote", due_from, limit))

    async def rescue(
        self, conn: AsyncConnection[Any], *, worker: int, limit: int, held: str = "{}", parked: str = "{}"
    ) -> tuple[int, int, tuple[UUID, ...]] | None:
        """Take up to `limit` jobs of one dead worker: (that worker, jobs moved, their ids), or None when nobody is dead.

        `held`, `parked`: KeyFloors.
        """
        cursor = await self.execute(conn, "rescue", (worker, limit, held, parked))
        row = await cursor.fetchone()
        return None if row is None else (row[0], row[1], tuple(row[2]))

    async def rescue_orphans(self, conn: AsyncConnection[Any], *, limit: int, held: str = "{}", parked: str = "{}") -> int:
        """Take running jobs whose worker has no row; scans all of live."""
        return int(await self._value(conn, "rescue_orphans", limit, held, parked))

    async def make_ranges(self, conn: AsyncConnection[Any], *, width: float, ahead: int) -> int:
        """Make the first of the partitions of now and of the time to come that is missing; the number made."""
        return int(await self._value(conn, "make_ranges", width, ahead))

    async def prune_range(self, conn: AsyncConnection[Any], *, succeeded: float, unsuccessful: float) -> int | None:
        """Drop one old partition; the number of jobs dropped, None when none is due. Give it a transaction of its own."""
        found = await self._value(conn, "prune_range", succeeded, unsuccessful)
        return None if found is None else int(found)

    async def prune_default(self, conn: AsyncConnection[Any], *, succeeded: float, unsuccessful: float, limit: int) -> int:
        """Delete old ended jobs that stand in no range; their number."""
        return int(await self._value(conn, "prune_default", succeeded, unsuccessful, limit))

    async def sweep_progress(self, conn: AsyncConnection[Any], *, limit: int) -> int:
        """Delete up to `limit` reports that count no more; their number."""
        return int(await self._value(conn, "sweep_progress", limit))
