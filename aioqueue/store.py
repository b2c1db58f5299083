"""One method per operation of the storage engine, each taking the connection first; the caller owns pool and transaction.

The SQL behind them stands in sql/functions/, one file per operation, whose header says what holds. `Store` only binds the
schema's name and turns rows into nouns. It runs no loop, opens no connection and decides nothing. Its bases have the limits
(limit_store.py), what is done in a job's own transaction (transaction_store.py) and what people read (reading.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection, Connection, Cursor, adapters
from psycopg.adapt import Transformer
from psycopg.pq import Format, PipelineStatus
from psycopg.rows import TupleRow, tuple_row

from .claimed import Claimed
from .floor import Snapshot
from .job import AttemptError, JobState, JobStatus, Position
from .limit_store import LimitStore
from .new_jobs import NewJobs
from .pool_connection import PoolConnection
from .pooler import SharedConnection, execute_all, execute_in_thread
from .reading import array
from .states import Progress
from .transaction_store import TransactionStore
from .trip import Trip

WORKER_DEAD = "AQ001"
"""SQLSTATE of a claim by a worker that is dead or whose lease has ended."""
NOT_OWNED = "AQ002"
"""SQLSTATE of a finish of a job that is no longer this worker's."""
VIOLATION = "AQ003"
"""SQLSTATE of a finish in a transaction that the task broke."""

REFUSED = ("22", "54")
"""Classes of SQLSTATE that refuse a statement for what is in it: data exceptions and program limits."""

LOCKED = "locked"
"""What `record` says of a job whose row somebody else holds: unchanged, to be sent again."""

LOWEST_ID = UUID(int=0)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_CLAIMED = [
    adapters.types[name].oid
    for name in ("uuid", "int8", "int8", "int4", "int4", "text", "text", "text", "int2", "int4", "text", "int8")
] + [adapters.types["int8"].array_oid]
"""As what the columns of a claim are read: when a job was enqueued as the number that it is."""
_FENCE = ("job_id", "lane", "vt", "attempt", "spared", "tenant", "keys")
_NO_FACTS: dict[str, Any] = {"task": "", "queue": "", "priority": 0, "max_attempts": 0, "payload": "", "created": EPOCH}

_CALLS = {
    # Types by their whole names where user code may have run before: a temporary table of that name would be found first.
    "enqueue_alike": "SELECT aioqueue.enqueue_alike(%s::pg_catalog.uuid[], %s::pg_catalog.text, %s::pg_catalog.text,"
    " %s::pg_catalog.text, %s::pg_catalog.text, %s::pg_catalog.int4, %s::pg_catalog.interval, %s::pg_catalog.timestamptz,"
    " %s::pg_catalog.int4, %s::pg_catalog.text, %s::pg_catalog.int4)",
    "known_tasks": "SELECT aioqueue.known_tasks()",
    "claim": "SELECT * FROM aioqueue.claim(%s::bigint, %s::bigint[], %s::bigint[], %s::uuid[],"
    " %s::integer[], %s::integer[], %s::integer, %s::text::jsonb)",
    "tick": "SELECT * FROM aioqueue.tick(%s::bigint, %s::bigint[], %s::bigint[], %s::bigint[], %s::uuid[], %s::bigint[],"
    " %s::timestamptz, %s::timestamptz)",
    "promote": "SELECT aioqueue.promote(%s::timestamptz, %s::integer)",
    "make_ranges": "SELECT aioqueue.make_ranges(%s::double precision, %s::integer, 1)",
    "prune_range": "SELECT aioqueue.prune_range(%s::double precision, %s::double precision)",
    "prune_default": "SELECT aioqueue.prune_default(%s::double precision, %s::double precision, %s::integer)",
    "record": "SELECT * FROM aioqueue.record(%s::bigint, %s::text::jsonb, %s::uuid[], %s::bigint[], %s::bigint[],"
    " %s::integer[], %s::text::jsonb)",
    "unknown_claims": "SELECT * FROM aioqueue.unknown_claims(%s::bigint)",
    "register_worker": "SELECT aioqueue.register_worker(%s::bigint, %s::text, %s::integer, %s::text, %s::text[], %s::integer,"
    " %s::double precision, %s::text::jsonb, %s::integer)",
    "beat": "SELECT aioqueue.beat(%s::bigint, %s::double precision, %s::integer, %s::text[])",
    "resign": "SELECT aioqueue.resign(%s::bigint)",
    "rescue": "SELECT * FROM aioqueue.rescue(%s::bigint, %s::integer, %s::text::jsonb, %s::text::jsonb)",
    "rescue_orphans": "SELECT aioqueue.rescue_orphans(%s::integer, %s::text::jsonb, %s::text::jsonb)",
    "cancel_job": "SELECT aioqueue.cancel_job(%s::pg_catalog.uuid, %s::pg_catalog.text)",
    "retry_job": "SELECT aioqueue.retry_job(%s::uuid, %s::text)",
    "read_outcomes": "SELECT * FROM aioqueue.read_outcomes(%s::uuid[], %s::text[])",
    "follow": "SELECT * FROM aioqueue.follow(%s::uuid[], %s::text[])",
    "report": "SELECT aioqueue.report(%s::text::jsonb)",
    "sweep_progress": "SELECT aioqueue.sweep_progress(%s::integer)",
    "job_status": "SELECT s.*, f.value, f.note, f.reported_at FROM aioqueue.job_status(%s::uuid, %s::text) s"
    " LEFT JOIN LATERAL aioqueue.follow("
    "CASE WHEN s.state OPERATOR(pg_catalog.=) 'running' THEN ARRAY[s.id] ELSE '{}' END, ARRAY[NULL]::text[]) f ON true",
    "notify": "SELECT aioqueue.notify(%s::text)",
}


class LaneScan(NamedTuple):
    """One lane of a claim: where to start, and how many jobs it gives before others of its group had theirs."""

    lane: int
    floor: tuple[int, UUID]
    share: int
    group: int = 0


class LaneQuestion(NamedTuple):
    """One lane of a tick: the highest vt claimed by this process, its floor, and up to where to look (None: no need)."""

    lane: int
    claimed_vt: int
    floor: tuple[int, UUID]
    upto: int | None


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


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job as its waiters see it; `state` None: still under way."""

    job_id: UUID
    state: JobState | None
    attempt: int | None
    result: str | None
    message: str | None
    error_type: str | None
    error_message: str | None
    stage: JobState | None = None
    """Its state, also while it is under way; only for those who watch."""
    progress: Progress | None = None


def _ended(row: Sequence[Any]) -> EndedJob:
    return EndedJob(row[0], None if row[1] is None else JobState(row[1]), *row[2:])


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


class Store(LimitStore, TransactionStore):
    """The operations, bound to one schema."""

    def __init__(self, schema: str) -> None:
        super().__init__(schema, _CALLS)

    async def enqueue_alike(self, conn: AsyncConnection[Any], jobs: NewJobs) -> int:
        """Write the jobs of one enqueue in the connection's transaction, return its XID; see sql/functions/enqueue_alike.sql."""
        return int(await self._value(conn, "enqueue_alike", *jobs.parameters))

    async def enqueue_alone(self, conn: PoolConnection, jobs: NewJobs, *, hint: Trip | None = None) -> None:
        """Do the same in a transaction of its own, and send the hint after it. `conn` is in none, and leads through no pooler."""
        trip = Trip(conn, then=hint)
        trip.add(self.wired["enqueue_alike"], jobs.parameters, prepare=True)
        try:
            await trip.run(None)
        finally:
            if conn.pgconn.pipeline_status != PipelineStatus.OFF:
                await conn.close()  # cancelled: its answers are still to come

    async def enqueue_parts(self, conn: AsyncConnection[Any], parts: Iterable[NewJobs]) -> None:
        """Write the parts of one enqueue, all or none, in a transaction of their own; `conn` is in none.

        The next part is made while the server writes those before.
        """
        await execute_all(conn, self.sql["enqueue_alike"], (part.parameters for part in parts))

    async def _rows(
        self,
        conn: AsyncConnection[Any],
        name: str,
        params: Sequence[object],
        *,
        types: Sequence[int] | None = None,
        hint: Trip | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run a statement of the worker's, and return its rows: on a connection of the pool without a cursor, in binary.

        `types`: the oids of the types as which its columns are read there; default: their own. `hint`: sent when it is committed.
        """
        if not isinstance(conn, PoolConnection) or isinstance(conn, SharedConnection):
            return await (await self.execute(conn, name, params)).fetchall()
        trip = Trip(conn, answers=Format.BINARY, then=hint)
        trip.add(self.wired[name], params, prepare=True)
        (answer,) = await trip.run(None)
        reader = Transformer(conn)
        reader.set_pgresult(answer, set_loaders=types is None)
        if types is not None:
            reader.set_loader_types(types, Format.BINARY)
        return reader.load_rows(0, answer.ntuples, tuple)

    async def known_tasks(self, conn: AsyncConnection[Any]) -> list[str]:
        """Names of the tasks that workers have registered."""
        return [row[0] for row in await (await self.execute(conn, "known_tasks")).fetchall()]

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

    async def tick(
        self,
        conn: AsyncConnection[Any],
        *,
        worker: int,
        questions: Sequence[LaneQuestion],
        due_from: datetime = EPOCH,
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

    async def promote(self, conn: AsyncConnection[Any], *, due_from: datetime = EPOCH, limit: int) -> int:
        """Make due jobs ready; the number, or −1 when another process is at it."""
        return int(await self._value(conn, "promote", due_from, limit))

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

    async def unknown_claims(self, conn: AsyncConnection[Any], *, worker: int) -> list[Claimed]:
        """What this worker runs by the rows of live; only fence, tenant and keys are filled in. Scans live."""
        cursor = await self.execute(conn, "unknown_claims", (worker,))
        return [Claimed(worker=worker, **dict(zip(_FENCE, row, strict=True)), **_NO_FACTS) for row in await cursor.fetchall()]

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

    async def cancel_job(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> JobState | None:
        """Cancel, or ask for it (RUNNING); None: unknown to the tenant."""
        state = await self._value(conn, "cancel_job", job_id, tenant)
        return None if state is None else JobState(state)

    async def retry_job(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> UUID | None:
        """Enqueue a dead or cancelled job anew; the new id, or None for an unknown job."""
        found: UUID | None = await self._value(conn, "retry_job", job_id, tenant)
        return found

    async def read_outcomes(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]]) -> list[EndedJob]:
        """Read (job id, tenant) pairs for their waiters; unknown ones give nothing."""
        cursor = await self.execute(conn, "read_outcomes", (array(job_id for job_id, _ in jobs), [tenant for _, tenant in jobs]))
        return [_ended(row) for row in await cursor.fetchall()]

    async def follow(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]]) -> list[EndedJob]:
        """Do as read_outcomes does for those who watch the jobs: with where those under way stand, and how far they are."""
        cursor = await self.execute(conn, "follow", (array(job_id for job_id, _ in jobs), [tenant for _, tenant in jobs]))
        found = []
        for *ended, stage, value, message, at in await cursor.fetchall():
            progress = None if value is None else Progress(value, message, at)
            found.append(replace(_ended(ended), stage=None if stage is None else JobState(stage), progress=progress))
        return found

    async def report(self, conn: AsyncConnection[Any], reports: str) -> None:
        """Write how far running jobs are (JSON text, see sql/functions/report.sql)."""
        await self.execute(conn, "report", (reports,))

    async def sweep_progress(self, conn: AsyncConnection[Any], *, limit: int) -> int:
        """Delete up to `limit` reports that count no more; their number."""
        return int(await self._value(conn, "sweep_progress", limit))

    async def job_status(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> JobStatus | None:
        """Read one job's state; None: unknown to the tenant."""
        cursor = await self.execute(conn, "job_status", (job_id, tenant))
        row = await cursor.fetchone()
        if row is None:
            return None
        error = None if row[15] is None else AttemptError(**dict(zip(AttemptError.__slots__, row[15:23], strict=True)))
        facts = dict(zip(JobStatus.__slots__, row[:15], strict=False))
        facts.update(state=JobState(row[5]), error=error, progress=None if row[23] is None else Progress(*row[23:26]))
        return JobStatus(**facts)

    async def notify(self, conn: AsyncConnection[Any], kind: str) -> None:
        """Send the hint 'ready', 'done' or 'progress'; on a connection in autocommit."""
        await self._rows(conn, "notify", (kind,))

    def hint(self, conn: PoolConnection, kind: str) -> Trip:
        """Return that hint, to be sent with something else. Not through a pooler."""
        hint = Trip(conn)
        hint.add(self.wired["notify"], [kind], prepare=True)
        return hint

    async def ended_transactions(self, conn: AsyncConnection[Any], xids: Sequence[int]) -> set[int]:
        """Return those of the transactions (pg_current_xact_id) that have ended."""
        cursor = await self.execute(conn, "ended_transactions", (array(xids),))
        return {int(row[0]) for row in await cursor.fetchall()}

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
