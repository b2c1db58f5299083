"""A pooler is found out at the start and said once; without a direct way there are no wake-ups, and all works by looking."""

import asyncio
import logging
from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from aioqueue import AioQueue
from aioqueue.database import Database
from aioqueue.events import DatabaseLost, ListenerConnected, PoolerFound, WorkerStarted
from aioqueue.pooler import SESSION, execute, through_pooler
from aioqueue.settings import PoolSettings, WorkerSettings
from benchmarks.pgbouncer import PROGRAM, PgBouncer, pgbouncer
from tests.kit import PATIENCE, MakeApp, Seen, session, until
from tests.pooler.conftest import POOL_SIZE, tell_every_session
from tests.postgres import Database as ServerDatabase

pytestmark = pytest.mark.anyio


async def test_a_pooler_that_refuses_options_is_found_and_said_once(
    make_pooled: MakeApp, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_pooled()

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    with caplog.at_level(logging.WARNING, logger="aioqueue"):
        async with app, app.worker() as worker:
            assert await (await double.enqueue(number=21)).result(timeout=30) == 42
            assert worker.problems() == []
    assert seen.all(PoolerFound) == [PoolerFound(listening=False)]
    assert [record.getMessage() for record in caplog.records] == [
        "a pooler stands between this process and the database: no session state, no prepared statements, no wake-ups but a "
        "look every 1 s; listen_dsn, a direct way, brings them"
    ]
    assert not seen.all(ListenerConnected)
    assert not seen.all(DatabaseLost)


async def test_a_pooler_that_ignores_options_is_found_too(worker_dsn: str) -> None:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(worker_dsn, ignore_startup_parameters="options") as pooler:
        database = Database(pooler.dsn(worker_dsn), PoolSettings())
        async with await database.connect():
            assert database.pooler
        assert "options" not in conninfo_to_dict(database.conninfo)


async def test_a_direct_connection_is_none(worker_dsn: str, make_app: MakeApp, seen: Seen) -> None:
    async with await psycopg.AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
        assert not await through_pooler(conn)
    async with make_app():
        pass
    assert not seen.all(PoolerFound)


async def test_options_of_the_dsn_itself_are_not_dropped(pooled_dsn: str) -> None:
    database = Database(make_conninfo(pooled_dsn, options="-c search_path=tenants"), PoolSettings())
    with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter"):
        await database.connect()


async def test_statements_run_under_the_runtimes_values_whatever_stands_on_the_session(pooled_dsn: str) -> None:
    dirt = "statement_timeout = '1ms'", "default_transaction_isolation = 'serializable'", "row_security = on"
    try:
        for setting in (*dirt, "default_transaction_read_only = on"):
            await tell_every_session(pooled_dsn, f"SET {setting}")
        database = Database(pooled_dsn, PoolSettings())
        names = [*SESSION, "transaction_isolation", "transaction_read_only"]
        query = sql.SQL("SELECT ") + sql.SQL(", ").join(sql.SQL("current_setting({})").format(name) for name in names)
        async with await database.connect() as conn:
            for _ in range(2 * POOL_SIZE):
                cursor = conn.cursor()
                await execute(cursor, query)
                row = await cursor.fetchone()
                assert row is not None
                assert dict(zip(names, row, strict=True)) == {
                    **SESSION, "transaction_isolation": "read committed", "transaction_read_only": "off",
                }  # fmt: skip
    finally:
        await tell_every_session(pooled_dsn, "RESET ALL")


async def test_a_statement_that_fails_leaves_the_connection_as_it_was(pooled_dsn: str) -> None:
    async with await Database(pooled_dsn, PoolSettings()).connect() as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await execute(conn.cursor(), "SELECT 1 / 0")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        cursor = conn.cursor()
        await execute(cursor, "SELECT %s::int", [7])
        assert await cursor.fetchone() == (7,)


async def test_a_cancelled_statement_leaves_no_transaction(pooled_dsn: str, database: ServerDatabase, schema: str) -> None:
    asleep = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(600)' AND state <> 'idle')"
    async with session(database.dsn("superuser"), schema) as boss:
        conn = await Database(pooled_dsn, PoolSettings()).connect()
        call = asyncio.create_task(execute(conn.cursor(), "SELECT pg_sleep(600)"))
        await until(boss, asleep)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert conn.closed
        await until(boss, asleep.replace("SELECT EXISTS", "SELECT NOT EXISTS"))


async def test_a_direct_way_brings_wake_ups(
    make_pooled: MakeApp, pooler: PgBouncer, worker_dsn: str, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_pooled(listen_dsn=worker_dsn, worker=WorkerSettings(poll=3600.0))

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with app, app.worker():
        await seen.wait(ListenerConnected)
        await seen.wait(WorkerStarted)
        # Found by a wake-up, and its end told by one: nobody looks within the hour.
        assert await (await double.enqueue(number=21)).result(timeout=PATIENCE) == 42
    assert seen.all(PoolerFound) == [PoolerFound(listening=True)]
    assert "wake-ups come through listen_dsn" in caplog.text


async def test_listener_and_guard_go_the_direct_way(pooled_dsn: str, worker_dsn: str) -> None:
    database = Database(pooled_dsn, PoolSettings(), listen_dsn=worker_dsn)
    async with await database.connect() as conn, await database.connect_listener() as own:
        assert (await through_pooler(conn), await through_pooler(own)) == (True, False)
        assert await database.doubt_listener(conn) is None
    assert database.can_listen
    assert "options" in conninfo_to_dict(database.own_conninfo)


@pytest.mark.parametrize("ignored", ["", "options"])
async def test_a_direct_way_that_is_none_is_doubted(worker_dsn: str, ignored: str) -> None:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(worker_dsn, ignore_startup_parameters=ignored) as pooler:
        dsn = pooler.dsn(worker_dsn)
        database = Database(dsn, PoolSettings(), listen_dsn=dsn)
        async with await database.connect() as conn:
            assert "leads through a pooler as well" in (await database.doubt_listener(conn) or "")


async def test_a_direct_way_to_elsewhere_is_doubted(
    pooled_dsn: str, fresh_database: Callable[[], ServerDatabase], make_pooled: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_pooled(listen_dsn=fresh_database().dsn("worker"))
    async with app:
        pass
    assert "listen_dsn: it leads to another database, whose wake-ups are not ours" in caplog.text


async def test_a_pooler_in_session_mode_can_listen(worker_dsn: str, schema: str, seen: Seen) -> None:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(worker_dsn, pool_mode="session") as pooler:
        dsn = pooler.dsn(worker_dsn)
        app = AioQueue(dsn, listen_dsn=dsn, schema=schema, observers=[seen], worker=WorkerSettings(poll=3600.0))

        @app.task
        async def double(number: int) -> int:
            return 2 * number

        async with app, app.worker():
            await seen.wait(ListenerConnected)
            await seen.wait(WorkerStarted)
            assert await (await double.enqueue(number=21)).result(timeout=PATIENCE) == 42
