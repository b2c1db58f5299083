"""Sessions on the storage engine for its tests: transactions that interleave, lock waits, sabotaged functions.

A session is one connection in autocommit; BEGIN and COMMIT are plain statements, so that a test lays out two
transactions line by line. Nothing waits for time: `blocked` waits until the server says that a session waits for a lock.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from aioqueue.claimed import Claimed
from aioqueue.floor import LaneFloor
from aioqueue.job import lane, new_job_id
from aioqueue.maintenance_store import LaneQuestion, Tick
from aioqueue.sql import as_sql, functions
from aioqueue.store import LOCKED, LOWEST_ID, Claims, LaneScan, Store
from aioqueue.transaction_store import pairs
from benchmarks.mixed_jobs import NewJob, enqueue_many

T = TypeVar("T")
LANE = lane("default", 0)
text = as_sql
GATE = 7_001
"""Advisory lock on which an instrumented function waits."""


def entry(job: Claimed, reason: str = "succeeded", **rest: object) -> dict[str, object]:
    """One outcome of a batch as record takes it: r result, d delay, s spared, t m b error, u unknown task."""
    return {"j": str(job.job_id), "l": job.lane, "v": job.vt, "a": job.attempt, "o": reason, **rest}


def progress(
    job: Claimed, value: float | None = 0.5, number: int = 1, before: Sequence[int] = (), **rest: object
) -> dict[str, object]:
    """One report of a batch as report takes it; value None: its rows go. m message."""
    fence = {"w": job.worker, "j": str(job.job_id), "l": job.lane, "v": job.vt, "a": job.attempt}
    return {**fence, "n": number, "p": value, "d": list(before), **rest}


def limit_key(kind: str, name: str, key: str | None = None) -> int:
    """The number of a limit, or of one key of a task, as sql/functions/limit_key.sql computes it."""
    text = f"{kind}:{len(name)}:{name}" + ("" if key is None else f":{key}")
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:8], "big", signed=True)


@dataclass
class Session:
    """One connection and the operations of the engine on it."""

    conn: AsyncConnection[Any]
    store: Store
    user = ""
    """The session's user when the job's transaction began."""

    @property
    def pid(self) -> int:
        return self.conn.info.backend_pid

    async def rows(self, statement: str, *params: object) -> list[tuple[Any, ...]]:
        """Run a statement that says `aioqueue.`; its rows, none for one that returns nothing."""
        cursor = await self.conn.execute(as_sql(statement, self.store.schema), params or None)
        return await cursor.fetchall() if cursor.description else []

    async def value(self, statement: str, *params: object) -> Any:
        """The first column of the first row, or None."""
        found = await self.rows(statement, *params)
        return found[0][0] if found else None

    async def begin(self, level: str = "READ COMMITTED") -> None:
        await self.rows(f"BEGIN ISOLATION LEVEL {level}")

    async def commit(self) -> None:
        await self.rows("COMMIT")

    async def rollback(self) -> None:
        await self.rows("ROLLBACK")

    async def enqueue(self, number: int = 1, **options: Any) -> list[UUID]:
        """Enqueue jobs of task `t` with the options of NewJob; their ids."""
        facts: dict[str, Any] = {"task": "t", "payload": "{}", "queue": "default", "priority": 0, "max_attempts": 5} | options
        every: list[dict[str, Any]] = [{"id": new_job_id(), **facts} for _ in range(number)]
        jobs = [NewJob(**each) for each in every]
        await enqueue_many(self.store, self.conn, jobs)
        return [job.id for job in jobs]

    async def enqueue_one(self, **options: Any) -> UUID:
        return (await self.enqueue(**options))[0]

    async def register(self, worker: int | None = None, *, lease: float = 60, tasks: Sequence[dict[str, object]] = ()) -> int:
        """Register a worker; its identity."""
        identity = secrets.randbits(62) if worker is None else worker
        await self.store.register_worker(
            self.conn, worker=identity, host="host", pid=1, version="0", queues=["default"], concurrency=10,
            lease=lease, tasks=tasks,
        )  # fmt: skip
        return identity

    async def claim(
        self, worker: int, limit: int = 10, *, lanes: Sequence[int] = (LANE,), floor: tuple[int, UUID] = (0, LOWEST_ID)
    ) -> list[Claimed]:
        """Claim from the lanes, each from the same floor."""
        return (await self.claims(worker, limit, lanes=lanes, floor=floor)).jobs

    async def claims(
        self,
        worker: int,
        limit: int = 10,
        *,
        lanes: Sequence[int] = (LANE,),
        floor: tuple[int, UUID] = (0, LOWEST_ID),
        key_floors: str = "{}",
    ) -> Claims:
        """The same with all that a claim says."""
        scans = [LaneScan(number, floor, limit) for number in lanes]
        return await self.store.claim(self.conn, worker=worker, lanes=scans, limit=limit, key_floors=key_floors)

    async def claim_one(self, worker: int, **options: Any) -> Claimed:
        (job,) = await self.claim(worker, 1, **options)
        return job

    async def limit(self, tenant: str, most: int | None, *, paused: bool = False, weight: float | None = None) -> int:
        """Give a tenant a limit, a pause, a weight, and nothing else; its key."""
        _, key = await self.store.set_tenant(self.conn, tenant, max_running=most, paused=paused, weight=weight)
        return key

    async def limit_task(self, name: str, most: int | None = None, *, per_key: int | None = None) -> tuple[int, int]:
        """Give a task limits, by a worker that registers it; the key of the task's, and of that of each of its keys."""
        task = {"name": name, "queue": "default", "priority": 0, "max_attempts": 5, "max_running": most}
        await self.register(tasks=[{**task, "max_running_per_key": per_key}])
        return limit_key("task", name), limit_key("key", name)

    async def unpark(self, *keys: int, number: int = 1) -> int:
        """Make as many jobs of each key ready as if so many had ended."""
        moved, _ = await self.store.unpark(self.conn, dict.fromkeys(keys, number))
        return moved

    async def sweep(self, **options: Any) -> int:
        """Sweep the first 50 keys, or those given; the number made ready."""
        moved, _ = await self.store.sweep_parked(self.conn, limit=1000, **options)
        return moved

    async def held(self) -> list[tuple[Any, ...]]:
        """(key, job_id) of every held row."""
        return await self.rows("SELECT key, job_id FROM aioqueue.held ORDER BY key, pos")

    async def parked(self) -> list[tuple[Any, ...]]:
        """(key, job_id) of every parked job, as they will be made ready."""
        return await self.rows("SELECT key, job_id FROM aioqueue.parked ORDER BY key, pos")

    async def record(self, worker: int, *entries: dict[str, object]) -> dict[UUID, str]:
        return await self.store.record(self.conn, worker=worker, outcomes=[json.dumps(each) for each in entries]) or {}

    async def record_all(self, worker: int, *entries: dict[str, object]) -> None:
        """Record, and send again what somebody holds: a claim that came too late keeps its locks until its end."""
        states = await self.record(worker, *entries)
        while held := [each for each in entries if states.get(UUID(str(each["j"]))) == LOCKED]:
            states = await self.record(worker, *held)

    async def open_job(self, job: Claimed, setting: str = "app.tenant") -> None:
        """Begin the job's own transaction as the runtime does: tenant and marker set locally."""
        self.user = self.conn.info.parameter_status("session_authorization") or ""
        await self.begin()
        await self.store.set_local(self.conn, {setting: job.tenant or "", "aioqueue_job.marker": "marker", "row_security": "on"})

    def _expected(self, job: Claimed) -> str:
        """As `Terms.expected` makes it."""
        return pairs({
            "app.tenant": job.tenant or "", "aioqueue_job.marker": "marker", "row_security": "on", "role": "none",
            "session_authorization": self.user,
        })  # fmt: skip

    async def finish(self, job: Claimed, result: str = "null") -> None:
        await self.store.execute(self.conn, "finish", (*job.fence, self._expected(job), result))

    async def confirm(self, job: Claimed) -> None:
        await self.store.execute(self.conn, "confirm", (*job.fence, self._expected(job)))

    async def rescue(self, worker: int = 0, limit: int = 100) -> tuple[int, int] | None:
        found = await self.store.rescue(self.conn, worker=worker, limit=limit)
        return None if found is None else found[:2]

    async def cancel(self, job_id: UUID, tenant: str | None = None) -> str | None:
        return await self.store.cancel_job(self.conn, job_id, tenant=tenant)

    async def tick(self, worker: int, claimed_vt: int = 0, upto: int | None = None, *, number: int = LANE) -> Tick:
        question = LaneQuestion(number, claimed_vt, (0, LOWEST_ID), upto)
        return await self.store.tick(self.conn, worker=worker, questions=[question])

    async def end_lease(self, *workers: int) -> None:
        """Let leases end now, as their owner's silence would; as the schema's owner."""
        await self.rows("UPDATE aioqueue.worker SET lease_until = '2020-01-01Z' WHERE id = ANY (%s)", list(workers))

    async def state(self, job_id: UUID) -> str | None:
        """The job's state as people see it."""
        return cast("str | None", await self.value("SELECT state FROM aioqueue.jobs WHERE id = %s", job_id))

    async def places(self, job_id: UUID) -> list[str]:
        """Every table of unfinished or ended jobs that holds the job: exactly one, unless something is broken."""
        found = await self.rows(
            "SELECT 'live' FROM aioqueue.live WHERE job_id = %(id)s UNION ALL"
            " SELECT 'parked' FROM aioqueue.parked WHERE job_id = %(id)s UNION ALL"
            " SELECT 'scheduled' FROM aioqueue.scheduled WHERE job_id = %(id)s UNION ALL"
            " SELECT 'outcome' FROM aioqueue.outcome WHERE job_id = %(id)s".replace("%(id)s", f"'{job_id}'")
        )
        return [name for (name,) in found]

    async def attempts(self, job_id: UUID) -> list[tuple[Any, ...]]:
        """(attempt, reason, message) of the attempts that did not succeed."""
        return await self.rows(
            "SELECT attempt, reason, error_message FROM aioqueue.attempt WHERE job_id = %s ORDER BY attempt", job_id
        )

    async def publish(self, vt: int, number: int = LANE) -> None:
        """Move the lane's virtual time, as a tick does; as the schema's owner."""
        await self.rows("SELECT aioqueue.publish(%s, %s)", number, vt)

    async def wait_blocked(self, other: "Session", by: "Session | None" = None) -> None:
        """Wait until the other session waits for a lock (of `by`)."""
        while True:
            holders = await self.value("SELECT pg_catalog.pg_blocking_pids(%s)", other.pid)
            if (by is None and holders) or (by is not None and by.pid in holders):
                return


@asynccontextmanager
async def blocked(
    watcher: Session, session: Session, call: Coroutine[Any, Any, T], *, by: Session
) -> AsyncIterator[asyncio.Task[T]]:
    """Run the call in the background and enter once it waits for a lock of `by`; await the task to get its answer."""
    task = asyncio.create_task(call)
    waiting = asyncio.create_task(watcher.wait_blocked(session, by))
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        waiting.cancel()
        raise AssertionError(f"it did not wait for the other transaction, but gave {task.result()!r}")
    await waiting
    yield task
    await task


@asynccontextmanager
async def changed(boss: Session, name: str, *changes: tuple[str, str]) -> AsyncIterator[None]:
    """Replace parts of one function's text while the block runs; each part must be there."""
    broken = functions()[name]
    for old, new in changes:
        assert old in broken, f"{name}.sql no longer says {old!r}"
        broken = broken.replace(old, new)
    await boss.rows(broken)
    try:
        yield
    finally:
        if boss.conn.info.transaction_status == TransactionStatus.INERROR:
            await boss.rollback()
        await boss.rows(functions()[name])


GATED = (
    "LANGUAGE sql VOLATILE AS $$\n    SELECT",
    "LANGUAGE plpgsql VOLATILE AS $$ DECLARE v bigint; BEGIN"
    f" IF current_setting('test.gate', true) = 'before' THEN PERFORM pg_advisory_lock({GATE}); END IF; v :=",
), (
    "\n$$;",
    f"; IF current_setting('test.gate', true) = 'after' THEN PERFORM pg_advisory_lock({GATE}); END IF; RETURN v; END $$;",
)  # fmt: skip
"""For `changed(boss, "virtual_time", *GATED)`: a session with test.gate set waits on GATE before or after it reads V."""

NO_XID = (
    "LANGUAGE sql VOLATILE AS $$\n    SELECT",
    "LANGUAGE plpgsql VOLATILE AS $$ BEGIN"
    " IF pg_current_xact_id_if_assigned() IS NULL THEN RAISE 'position before XID'; END IF; RETURN",
), ("\n$$;", "; END $$;")  # fmt: skip
"""For `changed(boss, "virtual_time", *NO_XID)`: it raises for a transaction that has no XID yet."""


class Floors:
    """What a worker does about one lane's floor: ask, observe, answer; claims from it."""

    def __init__(self, session: Session, worker: int, number: int = LANE) -> None:
        self.session = session
        self.worker = worker
        self.lane = number
        self.floor: LaneFloor[UUID] = LaneFloor(LOWEST_ID)
        self.claimed_vt = 0
        self.now = 0.0

    async def tick(self) -> Tick:
        """One tick, 50 ms after the last."""
        asked = self.floor.question
        question = LaneQuestion(self.lane, self.claimed_vt, self.floor.start, asked)
        seen = await self.session.store.tick(self.session.conn, worker=self.worker, questions=[question])
        self.now += 0.05
        self.floor.observe(seen.vts[0], seen.snapshot, self.now)
        if asked is not None:
            first = seen.firsts[0]
            self.floor.answer(question.floor, asked, None if first is None else (first.vt, first.job_id))
        return seen

    async def ticks(self, number: int = 4) -> None:
        for _ in range(number):
            await self.tick()

    async def claim(self, limit: int = 10) -> list[Claimed]:
        """Claim from the floor."""
        jobs = await self.session.claim(self.worker, limit, lanes=[self.lane], floor=self.floor.start)
        self.claimed_vt = max([self.claimed_vt, *(job.vt for job in jobs)])
        return jobs
