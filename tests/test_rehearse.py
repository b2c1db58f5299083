"""The rehearsal of a worker's statements: it changes nothing, leaves nothing to plan, and precedes a connection's first use."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from aioqueue import PoolSettings
from aioqueue.database import Database
from aioqueue.rehearse import Rehearsal
from aioqueue.store import Store
from tests.kit import MakeApp
from tests.postgres import Database as ServerDatabase
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

PLANS = "SELECT count(*) FROM pg_backend_memory_contexts WHERE name = 'CachedPlan'"


@asynccontextmanager
async def new_session(database: ServerDatabase, schema: str) -> AsyncIterator[Session]:
    """One whose server process has planned nothing yet; as a superuser, who may look into its memory."""
    async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as conn:
        yield Session(conn, Store(schema))


async def planned_by_a_pick_up(session: Session, worker: int) -> int:
    """Claim a job, record it and tick; how many plans that made."""
    before = await session.value(PLANS)
    job = await session.claim_one(worker)
    await session.store.record(session.conn, worker=worker, succeeded=[job], results=["1"])
    await session.tick(worker, job.vt, job.vt)
    return int(await session.value(PLANS)) - int(before)


async def test_a_rehearsed_connection_has_the_plans_of_claim_record_and_tick(
    database: ServerDatabase, schema: str, boss: Session
) -> None:
    worker = await boss.register()
    await boss.enqueue(2)
    async with new_session(database, schema) as bare, new_session(database, schema) as rehearsed:
        await Rehearsal(rehearsed.store)(rehearsed.conn)
        assert await planned_by_a_pick_up(rehearsed, worker) * 5 < await planned_by_a_pick_up(bare, worker)


async def test_it_takes_nothing_and_changes_nothing(boss: Session) -> None:
    await boss.register()
    (job_id,) = await boss.enqueue()
    rows = "SELECT l.*, l.xmax, l.xmin FROM aioqueue.live l"
    before = await boss.rows(rows)
    await Rehearsal(boss.store)(boss.conn)
    assert await boss.rows(rows) == before
    assert await boss.state(job_id) == "ready"


async def test_what_cannot_be_rehearsed_keeps_no_connection_from_its_use(boss: Session) -> None:
    await Rehearsal(Store("nowhere"))(boss.conn)
    assert await boss.value("SELECT 1") == 1


async def test_nor_does_an_answer_that_is_not_understood(boss: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    async def from_another_version(*_: object, **__: object) -> None:
        raise ValueError("too many values to unpack")

    store = Store(boss.store.schema)
    monkeypatch.setattr(store, "tick", from_another_version)
    await Rehearsal(store)(boss.conn)
    assert boss.conn.info.transaction_status == TransactionStatus.IDLE


async def test_its_transaction_is_not_left_open_by_a_loop_that_is_blocked(boss: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, seen = "SELECT current_setting('idle_in_transaction_session_timeout')", list[object]()

    async def look(*_: object, **__: object) -> None:
        seen.append(await boss.value(limit))

    store = Store(boss.store.schema)
    monkeypatch.setattr(store, "tick", look)
    await Rehearsal(store)(boss.conn)
    assert seen == ["5s"]
    assert await boss.value(limit) == "0"


async def test_each_new_connection_of_a_worker_is_rehearsed_before_anybody_has_it(worker_dsn: str) -> None:
    made: list[AsyncConnection[Any]] = []

    async def rehearse(conn: AsyncConnection[Any]) -> None:
        made.append(conn)

    database = Database(worker_dsn, PoolSettings())
    database.rehearse = rehearse
    await database.open()
    try:
        async with database.runtime() as first, database.runtime() as second, database.runtime() as third:
            assert {first, second, third} <= {*made}
    finally:
        await database.close()


async def test_a_rehearsal_on_a_connection_that_is_lost_meanwhile_is_made_up_for_by_another(worker_dsn: str) -> None:
    database = Database(worker_dsn, PoolSettings())
    lost: list[int] = []

    async def rehearse(conn: AsyncConnection[Any]) -> None:
        if not lost:
            lost.append(conn.info.backend_pid)
            with pytest.raises(psycopg.OperationalError):
                await conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    database.rehearse = rehearse
    await database.open()
    try:
        async with database.runtime() as conn:
            assert conn.info.backend_pid not in lost
    finally:
        await database.close()


async def test_a_worker_rehearses(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AsyncConnection[Any]] = []
    rehearse = Rehearsal.__call__

    async def watched(self: Rehearsal, conn: AsyncConnection[Any]) -> None:
        await rehearse(self, conn)
        seen.append(conn)

    monkeypatch.setattr(Rehearsal, "__call__", watched)
    app = make_app()
    async with app, app.worker():
        assert seen


async def test_a_table_that_is_held_keeps_no_new_connection_waiting(boss: Session, worker_dsn: str, schema: str) -> None:
    await boss.begin()
    await boss.rows("LOCK TABLE aioqueue.job IN ACCESS EXCLUSIVE MODE")
    async with await AsyncConnection.connect(worker_dsn, autocommit=True) as conn, asyncio.timeout(60):
        await conn.execute("SET lock_timeout = 0")  # it would wait for ever
        await Rehearsal(Store(schema))(conn)
        assert await (await conn.execute("SHOW lock_timeout")).fetchone() == ("0",)
    await boss.rollback()
