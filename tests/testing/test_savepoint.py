"""In a test that rolls its own transaction back: what was enqueued in it, and a job that runs within it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg import AsyncConnection
from psycopg.rows import DictRow, TupleRow, dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from aioqueue import AioQueue, JobContext, JobTransaction, Retry, TenantSettings, testing
from aioqueue.identity import MARKER
from tests.kit import MakeApp
from tests.postgres import Database
from tests.sql.engine import Session
from tests.testing.tasks import Broken, Order, register

pytestmark = pytest.mark.anyio

Conn = AsyncConnection[TupleRow]


@pytest.fixture
async def conn(worker_dsn: str, notes: Conn) -> AsyncIterator[Conn]:
    """The test's transaction, rolled back at its end."""
    async with await AsyncConnection.connect(worker_dsn) as conn:
        await conn.execute("SET LOCAL app.tenant = '42'")
        yield conn
        await conn.rollback()


async def value(conn: Conn, query: str) -> Any:
    row = await (await conn.execute(query.encode())).fetchone()
    return None if row is None else row[0]


async def test_job_and_test_see_what_the_other_has_written(
    app: AioQueue[Any], queue: testing.Queue, conn: Conn, boss: Session
) -> None:
    @app.task(name="count")
    async def count(tx: JobTransaction) -> int:
        await tx.execute("INSERT INTO notes.note (tenant, text) VALUES (%s, 'by the job')", [str(tx.tenant)])
        found: int = await tx.fetch_value("SELECT count(*) FROM notes.note")
        return found

    await conn.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'by the test')")
    job = await count.options(tenant="42", on=conn).enqueue()
    await queue.assert_enqueued(count, tenant="42", on=conn)
    await queue.refute_enqueued()
    ran = await queue.run_job(job, on=conn)
    assert (ran.state, ran.result, ran.attempt) == ("succeeded", 2, 1)
    assert await value(conn, "SELECT count(*) FROM notes.note") == 2
    (found,) = await queue.enqueued(on=conn)
    assert found.state == "succeeded"
    await conn.rollback()
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 0
    assert await boss.value("SELECT count(*) FROM notes.note") == 0
    assert await boss.value("SELECT count(*) FROM aioqueue.worker") == 0


async def test_settings_and_role_are_as_before(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    @app.task(name="whoami")
    async def whoami(tx: JobTransaction) -> str:
        found: str = await tx.fetch_value("SELECT current_setting('app.tenant')")
        return found

    await conn.execute("CREATE TEMPORARY TABLE kept (n int)")
    await conn.execute("SET app.other = 'kept'")
    ran = await queue.run_job(whoami.options(tenant="43", on=conn).enqueue(), on=conn)
    assert ran.result == "43"
    assert await value(conn, "SELECT current_setting('app.tenant')") == "42"
    assert await value(conn, f"SELECT current_setting('{MARKER}', true)") in ("", None)
    assert await value(conn, "SELECT current_setting('app.other')") == "kept"
    assert await value(conn, "SELECT count(*) FROM kept") == 0


async def test_another_role_for_the_job_alone(make_app: MakeApp, database: Database) -> None:
    app = make_app(database.dsn("superuser"), tenants=TenantSettings(role="aioqueue_worker"))

    @app.task(name="whoami")
    async def whoami(tx: JobTransaction) -> str:
        found: str = await tx.fetch_value("SELECT current_user::text")
        return found

    async with testing.queue(app) as queue, await AsyncConnection.connect(database.dsn("superuser")) as conn:
        await conn.execute("SELECT 1")
        ran = await queue.run_job(whoami.options(on=conn).enqueue(), on=conn)
        assert ran.result == "aioqueue_worker"
        assert await value(conn, "SELECT current_user::text") == "postgres"
        await conn.rollback()


async def test_a_failure_rolls_back_the_job_alone(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    @app.task(name="half", retry=Retry(max_attempts=2))
    async def half(tx: JobTransaction) -> None:
        await tx.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'by the job')")
        raise Broken

    await conn.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'by the test')")
    job = await half.options(tenant="42", on=conn).enqueue()
    with pytest.raises(Broken):
        await queue.run_job(job, on=conn)
    assert await value(conn, "SELECT string_agg(text, ',') FROM notes.note") == "by the test"
    (found,) = await queue.enqueued(on=conn)
    assert (found.state, found.attempt) == ("scheduled", 1)
    assert await value(conn, "SELECT current_setting('app.tenant')") == "42"


async def test_an_error_of_the_server_s_rolls_back_the_job_alone(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    job = await app.get("note").options(tenant="42", on=conn).enqueue("hello")
    await conn.execute("CREATE TEMPORARY TABLE kept (n int)")

    @app.task(name="wrong")
    async def wrong(tx: JobTransaction) -> None:
        await tx.execute("SELECT * FROM missing")

    with pytest.raises(psycopg.errors.UndefinedTable):
        await queue.run_job(wrong.options(tenant="42", on=conn).enqueue(), on=conn)
    assert await value(conn, "SELECT count(*) FROM kept") == 0
    assert (await queue.run_job(job, on=conn)).result == "hello"


async def test_transactions_on_the_way_are_savepoints_too(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    @app.task(name="two")
    async def two(ctx: JobContext) -> str:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'kept')")
        try:
            async with ctx.transaction() as tx:
                await tx.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'rolled back')")
                raise Broken
        except Broken:
            return "done"

    assert (await queue.run_job(two.options(tenant="42", on=conn).enqueue(), on=conn)).result == "done"
    assert await value(conn, "SELECT string_agg(text, ',') FROM notes.note") == "kept"


async def test_what_the_job_enqueues_is_in_the_test_s_transaction(
    app: AioQueue[Any], queue: testing.Queue, conn: Conn, boss: Session
) -> None:
    @app.task(name="both")
    async def both(tx: JobTransaction) -> None:
        await app.get("add").enqueue(1)
        await app.get("add").options(on=app).enqueue(2)

    await queue.run_job(app.get("parent").options(on=conn).enqueue(2), on=conn)
    await queue.run_job(both.options(tenant="42", on=conn).enqueue(), on=conn)
    await queue.assert_enqueued("add", count=4, on=conn)
    await queue.assert_enqueued("add", tenant="42", count=1, on=conn)
    await conn.rollback()
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 0
    await app.get("add").enqueue(1)  # the pool serves again
    await queue.assert_enqueued("add", count=1)


async def test_a_task_that_ends_the_test_s_transaction_is_told(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    @app.task(name="commit")
    async def commit(tx: JobTransaction) -> None:
        await tx.execute("ROLLBACK")

    job = await commit.options(tenant="42", on=conn).enqueue()
    with pytest.raises((testing.TestingError, psycopg.Error)):
        await queue.run_job(job, on=conn)


async def test_a_job_that_takes_too_long_is_cancelled_and_rolled_back_alone(
    app: AioQueue[Any], queue: testing.Queue, conn: Conn
) -> None:
    ended: list[str] = []

    @app.task(name="hang")
    async def hang(tx: JobTransaction) -> None:
        await tx.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'by the job')")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cancelled")

    await conn.execute("INSERT INTO notes.note (tenant, text) VALUES ('42', 'by the test')")
    job = await hang.options(tenant="42", on=conn).enqueue()
    with pytest.raises(testing.TestingError, match="what still ran was cancelled"):
        await queue.run_job(job, on=conn, timeout=0.5)
    assert ended == ["cancelled"]
    assert await value(conn, "SELECT string_agg(text, ',') FROM notes.note") == "by the test"
    (found,) = await queue.enqueued(on=conn)
    assert (found.state, found.attempt) == ("ready", 0)


async def test_a_task_that_changes_its_tenant_fails(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    @app.task(name="switch")
    async def switch(tx: JobTransaction) -> None:
        await tx.execute("SET LOCAL app.tenant = '43'")

    ran = await queue.run_job(switch.options(tenant="42", on=conn).enqueue(), on=conn, raises=False)
    assert (ran.state, ran.reason) == ("scheduled", "transaction violation")
    assert await value(conn, "SELECT current_setting('app.tenant')") == "42"


async def test_notices_reach_the_test_as_before(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    heard: list[str | None] = []
    conn.add_notice_handler(lambda notice: heard.append(notice.message_primary))
    await queue.run_job(app.get("note").options(tenant="42", on=conn).enqueue("hello"), on=conn)
    await conn.execute("DO $$ BEGIN RAISE NOTICE 'heard'; END $$")
    assert heard == ["heard"]


async def test_with_rows_of_another_shape_and_in_a_block(
    app: AioQueue[Any], queue: testing.Queue, worker_dsn: str, notes: Conn
) -> None:
    async with await AsyncConnection[DictRow].connect(worker_dsn, autocommit=True, row_factory=dict_row) as conn:
        async with conn.transaction(force_rollback=True), conn.transaction():
            job = await app.get("note").options(tenant="42", on=conn).enqueue("hello")
            assert (await queue.run_job(job, on=conn)).result == "hello"
            await queue.assert_enqueued("note", state="succeeded", on=conn)


async def test_drain_says_that_jobs_are_not_committed(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    job = await app.get("add").options(on=conn).enqueue(1)
    with pytest.raises(testing.TestingError, match=r"drain\(\) runs committed jobs, and 1 are enqueued .* run_job\(job, on=…\)"):
        await queue.drain()
    with pytest.raises(testing.TestingError, match="still open"):
        await queue.run_job(job)
    with pytest.raises(AssertionError, match="1 more are enqueued in a transaction of this process"):
        await queue.assert_enqueued("add")
    await conn.commit()
    assert (await queue.drain()).states == ["succeeded"]


async def test_a_worker_cannot_die_in_the_test_s_transaction(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    queue.crash_worker_at("before_record")
    job = await app.get("add").options(on=conn).enqueue(1)
    with pytest.raises(testing.TestingError, match="crash_worker_at needs run_job without on"):
        await queue.run_job(job, on=conn)
    await conn.commit()
    assert (await queue.drain()).states == ["lost", "succeeded"]


async def test_needs_an_open_transaction(app: AioQueue[Any], queue: testing.Queue, worker_conn: Conn) -> None:
    job = await app.get("add").enqueue(1)
    with pytest.raises(testing.TestingError, match="with an open transaction; this one is IDLE"):
        await queue.run_job(job, on=worker_conn)


async def test_the_next_attempt_fails_here_too(app: AioQueue[Any], queue: testing.Queue, conn: Conn) -> None:
    queue.fail_next("note", Broken)
    ran = await queue.run_job(app.get("note").options(tenant="42", on=conn).enqueue("hello"), on=conn)
    assert (ran.state, ran.expected) == ("scheduled", True)


async def test_on_a_session_of_sqlalchemy(app: AioQueue[Any], queue: testing.Queue, worker_dsn: str, notes: Conn) -> None:
    engine = create_async_engine(sqlalchemy.make_url(worker_dsn).set(drivername="postgresql+psycopg"))
    insert = sqlalchemy.text("INSERT INTO notes.note VALUES ('42', 'by the test')")
    count = sqlalchemy.text("SELECT count(*) FROM notes.note")
    async with AsyncSession(engine) as session:
        await session.execute(sqlalchemy.text("SET LOCAL app.tenant = '42'"))
        await session.execute(insert)
        job = await app.get("note").options(tenant="42", on=session).enqueue("by the job")
        await queue.assert_enqueued("note", payload={"text": "by the job"}, on=session)
        async with session.begin_nested():
            assert (await queue.run_job(job, on=session)).state == "succeeded"
        assert (await session.execute(count)).scalar() == 2
        await session.rollback()
    await engine.dispose()
    await queue.refute_enqueued()


async def test_on_asyncpg_what_was_enqueued_is_seen_and_jobs_are_refused(
    app: AioQueue[Any], queue: testing.Queue, worker_dsn: str
) -> None:
    conn = await asyncpg.connect(worker_dsn)
    transaction = conn.transaction()
    await transaction.start()
    job = await app.get("order").options(on=conn).enqueue(Order(customer="Ada"))
    await queue.assert_enqueued("order", payload={"customer": "Ada"}, on=conn)
    await queue.refute_enqueued("add", on=conn)
    with pytest.raises(testing.TestingError, match="needs a transaction of psycopg"):
        await queue.run_job(job, on=conn)
    await transaction.rollback()
    await conn.close()
    await queue.refute_enqueued()


async def test_a_synchronous_connection_is_asked_too(app: AioQueue[Any], queue: testing.Queue, worker_dsn: str) -> None:
    with psycopg.connect(worker_dsn) as conn:
        app.get("add").options(on=conn).enqueue_sync(1)
        await queue.assert_enqueued("add", on=conn)
        conn.rollback()


async def test_what_is_no_connection_is_said_so(make_app: MakeApp, worker_dsn: str) -> None:
    app = make_app()
    register(app)
    async with testing.queue(app) as queue:
        with pytest.raises(testing.TestingError, match="got str"):
            await queue.enqueued(on=worker_dsn)
