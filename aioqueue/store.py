"""What a worker does with its jobs, one method each, the connection first: it claims, records, beats; and `Store`, which has all.

The other operations are of its bases: client_store.py (enqueue, results by id), maintenance_store.py (tick, rescue, prune),
limit_store.py, transaction_store.py (a job's own transaction), reading.py (what people read); how statements are run says
bound_store.py. The SQL stands in sql/functions/, a file each, whose header says what holds; the caller owns pool and transaction.
All of them only bind values and turn rows into nouns: they run no loop, open no connection and decide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection, Connection, Cursor, adapters
from psycopg.rows import TupleRow, tuple_row

from .bound_store import array
from .claimed import Claimed
from .client_store import ClientStore
from .limit_store import LimitStore
from .maintenance_store import MaintenanceStore
from .pooler import execute_in_thread
from .reading import Reading
from .transaction_store import TransactionStore
from .trip import Trip

WORKER_DEAD = "AQ001"
"""SQLSTATE of a claim by a worker that is dead or whose lease has ended."""

REFUSED = ("22", "54")
"""Classes of SQLSTATE that refuse a statement for what is in it: data exceptions and program limits."""

LOCKED = "locked"
"""What `record` says of a job whose row somebody else holds: unchanged, to be sent again."""

LOWEST_ID = UUID(int=0)

_CLAIMED = [
    adapters.types[name].oid
    for name in ("uuid", "int8", "int8", "int4", "int4", "text", "text", "text", "int2", "int4", "text", "int8")
] + [adapters.types["int8"].array_oid]
"""As what the columns of a claim are read: when a job was enqueued as the number that it is."""
_FENCE = ("job_id", "lane", "vt", "attempt", "spared", "tenant", "keys")
_NO_FACTS: dict[str, Any] = {"task": "", "queue": "", "priority": 0, "max_attempts": 0, "payload": "", "created": 0}

_CALLS = {
    "claim": "SELECT * FROM aioqueue.claim(%s::bigint, %s::bigint[], %s::bigint[], %s::uuid[],"
    " %s::integer[], %s::integer[], %s::integer, %s::text::jsonb)",
    "record": "SELECT * FROM aioqueue.record(%s::bigint, %s::text::jsonb, %s::uuid[], %s::bigint[], %s::bigint[],"
    " %s::integer[], %s::text::jsonb)",
    "unknown_claims": "SELECT * FROM aioqueue.unknown_claims(%s::bigint)",
    "register_worker": "SELECT aioqueue.register_worker(%s::bigint, %s::text, %s::integer, %s::text, %s::text[], %s::integer,"
    " %s::double precision, %s::text::jsonb, %s::integer)",
    "beat": "SELECT aioqueue.beat(%s::bigint, %s::double precision, %s::integer, %s::text[])",
    "resign": "SELECT aioqueue.resign(%s::bigint)",
    "report": "SELECT aioqueue.report(%s::text::jsonb)",
}


class LaneScan(NamedTuple):
    """One lane of a claim: where to start, and how many jobs it gives before others of its group had theirs."""

    lane: int
    floor: tuple[int, UUID]
    share: int
    group: int = 0


@dataclass(slots=True)
class Claims:
    """What a claim gave; all but `jobs` is empty while nobody is limited."""

    jobs: list[Claimed] = field(default_factory=list)
    """In the order of the lanes, and of their positions."""
    parked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By lane: how many jobs were parked, and up to which virtual time."""
    more: bool = False
    """There may be more to claim, although it is not filled."""
    passed: dict[int, int] = field(default_factory=dict)
    """By key: how many jobs would have had room in it, but were parked under another key."""
    key_floors: dict[int, int] = field(default_factory=dict)
    """By key: the position of its first held row, or of the next."""


_position = attrgetter("vt", "job_id")


def _batch(
    worker: int, outcomes: Sequence[str], succeeded: Sequence[Claimed] = (), results: Sequence[str] = ()
) -> tuple[object, ...]:
    # Arrays for the many that succeed: the server reads them in half the time that objects of JSON would take. Written by what
    # writes a whole list: a call for each job would cost three times as much.
    return (
        worker,
        f"[{','.join(outcomes)}]",
        f"{{{b''.join([job.job_id.int.to_bytes(16) for job in succeeded]).hex(',', 16)}}}",
        f"{{{str([job.lane for job in succeeded])[1:-1]}}}",
        f"{{{str([job.vt for job in succeeded])[1:-1]}}}",
        f"{{{str([job.attempt for job in succeeded])[1:-1]}}}",
        f"[{','.join(results)}]",
    )


class Store(ClientStore, MaintenanceStore, LimitStore, TransactionStore, Reading):
    """The operations, bound to one schema."""

    def __init__(self, schema: str) -> None:
        super().__init__(schema, _CALLS)

    async def claim(
        self, conn: AsyncConnection[Any], *, worker: int, lanes: Sequence[LaneScan], limit: int, key_floors: str = "{}"
    ) -> Claims:
        """Claim up to `limit` jobs; psycopg.Error with SQLSTATE AQ001 for a dead worker. `key_floors`: KeyFloors.held."""
        rows = await self._rows(
            conn,
            "claim",
            (
                worker,
                array(scan.lane for scan in lanes),
                array(scan.floor[0] for scan in lanes),
                array(scan.floor[1] for scan in lanes),
                array(scan.group for scan in lanes),
                array(scan.share for scan in lanes),
                limit,
                key_floors,
            ),
            types=_CLAIMED,
        )
        claims = Claims()
        for row in rows:
            if row[0] is not None:
                claims.jobs.append(Claimed(worker, *row))
            elif row[1] is not None:
                claims.parked[row[1]] = (row[3], row[2])
                claims.more = claims.more or bool(row[4])
            else:
                key, first = row[12]
                if first is not None:
                    claims.key_floors[key] = first
                if row[3]:
                    claims.passed[key] = row[3]
        claims.jobs.sort(key=_position)
        if len({job.lane for job in claims.jobs}) > 1:
            order = {scan.lane: number for number, scan in enumerate(lanes)}
            claims.jobs.sort(key=lambda job: order[job.lane])
        return claims

    async def unknown_claims(self, conn: AsyncConnection[Any], *, worker: int) -> list[Claimed]:
        """What this worker runs by the rows of live; only fence, tenant and keys are filled in. Scans live."""
        cursor = await self.execute(conn, "unknown_claims", (worker,))
        return [Claimed(worker=worker, **dict(zip(_FENCE, row, strict=True)), **_NO_FACTS) for row in await cursor.fetchall()]

    async def record(
        self,
        conn: AsyncConnection[Any],
        *,
        worker: int,
        outcomes: Sequence[str] = (),
        succeeded: Sequence[Claimed] = (),
        results: Sequence[str] = (),
        hint: Trip | None = None,
    ) -> dict[UUID, str] | None:
        """Record a batch: jobs that succeeded with their results, and other outcomes; JSON, see sql/functions/record.sql.

        The new state of each job that was still ours; None: there were successes only, and all were. `hint`: see `_rows`.
        """
        rows = await self._rows(conn, "record", _batch(worker, outcomes, succeeded, results), hint=hint)
        return None if rows and rows[0][0] is None else dict(rows)

    async def register_worker(
        self,
        conn: AsyncConnection[Any],
        *,
        worker: int,
        host: str,
        pid: int,
        version: str,
        queues: Sequence[str],
        concurrency: int,
        lease: float,
        tasks: Sequence[dict[str, object]],
        connections: int | None = None,
    ) -> None:
        """Write the worker's row and its tasks' defaults; `connections`: what it takes of the server's at most."""
        await self.execute(
            conn,
            "register_worker",
            (worker, host, pid, version, list(queues), concurrency, lease, json.dumps(tasks), connections),
        )
        await self.settle_limits(conn, wait=False)

    async def beat(
        self, conn: AsyncConnection[Any], *, worker: int, lease: float, running: int, problems: Sequence[str] = ()
    ) -> bool:
        """Renew the lease, and say what keeps the worker from its work; False: it was declared dead."""
        return bool(await self._value(conn, "beat", worker, lease, running, list(problems)))

    async def resign(self, conn: AsyncConnection[Any], *, worker: int) -> None:
        """Say that the worker stops."""
        await self.execute(conn, "resign", (worker,))

    async def report(self, conn: AsyncConnection[Any], reports: str) -> None:
        """Write how far running jobs are (JSON text, see sql/functions/report.sql)."""
        await self.execute(conn, "report", (reports,))

    # What the guard does in its thread while the event loop is blocked.

    def beat_in_thread(
        self, conn: Connection[Any], *, worker: int, lease: float, running: int, problems: Sequence[str] = ()
    ) -> bool:
        """Do as `beat` does."""
        row = self._execute_in_thread(conn, "beat", (worker, lease, running, list(problems))).fetchone()
        return row is not None and bool(row[0])

    def record_in_thread(self, conn: Connection[Any], *, worker: int, outcomes: Sequence[str]) -> dict[UUID, str]:
        """Do as `record` does, for outcomes that are no successes."""
        return dict(self._execute_in_thread(conn, "record", _batch(worker, outcomes)).fetchall())

    def _execute_in_thread(self, conn: Connection[Any], name: str, params: Sequence[object]) -> Cursor[TupleRow]:
        cursor = Cursor(conn, row_factory=tuple_row)
        execute_in_thread(cursor, self.sql[name], params)
        return cursor
