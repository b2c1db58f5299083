"""The pool: its values on every connection, two that jobs never get, and deadlines that hold against a server that hangs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from aioqueue import pool as pool_module
from aioqueue.connector import CLIENT, ISOLATION, KEEPALIVES, connection_string
from aioqueue.database import Database, NoFreeConnection
from aioqueue.errors import ConfigurationError
from aioqueue.pool import RESERVED, AllInUse
from aioqueue.pool_connection import PoolConnection, sever
from aioqueue.pooler import SESSION
from aioqueue.server import connection_lost, deadline
from aioqueue.settings import PoolSettings
from tests.kit import passed, until_true
from tests.postgres import Database as ServerDatabase

pytestmark = pytest.mark.anyio

NOWHERE = "host=127.0.0.1 port=1 dbname=x"


@asynccontextmanager
async def opened(dsn: str, settings: PoolSettings) -> AsyncIterator[Database]:
    database = Database(dsn, settings)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def lent(database: Database, wait: float | None) -> AsyncIterator[PoolConnection]:
    """A connection of a job's transaction."""
    conn = await database.lend(wait)
    try:
        yield conn
    finally:
        await database.take_back(conn)


@pytest.fixture
async def pool(worker_dsn: str) -> AsyncIterator[Database]:
    """A pool of four with short deadlines."""
    async with opened(worker_dsn, PoolSettings(deadline=0.2)) as database:
        yield database


@pytest.fixture
async def conn(worker_dsn: str) -> AsyncIterator[AsyncConnection]:
    """A connection that the test may break."""
    connection = await AsyncConnection.connect(worker_dsn, autocommit=True)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """A server process that hangs: its socket is open and nothing ever comes."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_connections_that_nobody_needs_any_more_are_closed(worker_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has no work keeps one, and its listener's."""
    monkeypatch.setattr(pool_module, "UNUSED", 0.1)
    async with opened(worker_dsn, PoolSettings(size=4)) as database:
        async with AsyncExitStack() as stack:
            conns = [await stack.enter_async_context(database.runtime()) for _ in range(4)]
            pids = {conn.info.backend_pid for conn in conns}
        assert len(pids) == 4
        await until_true(lambda: sum(not conn.closed for conn in conns) <= 1)


async def test_looks_by_the_clock_come_one_after_the_other_but_wait_for_none_that_hangs(
    pool: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    async def look(name: str, began: asyncio.Event, goes_on: asyncio.Event) -> None:
        async with pool.in_turn():
            order.append(name)
            began.set()
            await goes_on.wait()
            order.append(f"{name} over")

    monkeypatch.setattr("aioqueue.pool.TURN", 60.0)
    events = [asyncio.Event() for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        group.create_task(look("a", events[0], events[1]))
        await passed(events[0])
        group.create_task(look("b", events[2], events[1]))
        await asyncio.sleep(0)
        assert order == ["a"]
        events[1].set()
    assert order == ["a", "a over", "b", "b over"]
    monkeypatch.setattr("aioqueue.pool.TURN", 0.001)
    hangs, beside = asyncio.Event(), asyncio.Event()
    events[0].clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(look("c", events[0], hangs))
        await passed(events[0])
        group.create_task(look("d", beside, hangs))
        await passed(beside)
        hangs.set()
    async with asyncio.timeout(10), pool.in_turn():
        pass


async def test_every_connection_has_the_runtimes_values(pool: Database) -> None:
    listener = await pool.connect_listener()
    try:
        async with pool.runtime() as runtime, lent(pool, 1) as job:
            for connection in (runtime, job, listener):
                cursor = await connection.execute("SELECT name, reset_val, source FROM pg_catalog.pg_settings")
                found = {name: (value, source) for name, value, source in await cursor.fetchall()}
                # What RESET ALL returns to, in the server's units.
                assert found["statement_timeout"] == ("5000", "client")
                assert found["lock_timeout"] == ("2000", "client")
                assert found["row_security"] == ("off", "client")
                assert {found[name][1] for name in {**SESSION, **KEEPALIVES}} == {"client"}
                assert found["application_name"] == ("aioqueue", "client")
                assert connection.autocommit
    finally:
        await listener.close()


async def test_connections_read_what_is_committed_whatever_the_database_or_the_dsn_says(
    database: ServerDatabase, worker_dsn: str
) -> None:
    name = sql.Identifier(database.name)
    async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as boss:
        dsn = make_conninfo(worker_dsn, options="-c default_transaction_isolation=serializable")
        await boss.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'").format(name))
        try:
            async with opened(dsn, PoolSettings()) as opened_database, opened_database.runtime() as conn:
                for _ in range(2):
                    cursor = await conn.execute("SELECT current_setting('transaction_isolation')")
                    assert await cursor.fetchone() == ("read committed",)
                    await conn.execute("RESET ALL")
        finally:
            await boss.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_isolation").format(name))


def test_what_the_dsn_says_wins() -> None:
    text = connection_string("postgresql://u:p%40ss@h:5/d?connect_timeout=9&application_name=mine")
    assert conninfo_to_dict(text) == {
        **CLIENT,
        **{"user": "u", "password": "p@ss", "host": "h", "port": "5", "dbname": "d"},
        "connect_timeout": "9",
        "application_name": "mine",
        "client_encoding": "UTF8",
        "options": " ".join([*(f"-c {name}={value}" for name, value in {**SESSION, **KEEPALIVES}.items()), ISOLATION]),
    }


async def test_options_of_the_dsn_are_added_and_win(worker_dsn: str) -> None:
    dsn = f"{worker_dsn}&options=-c%20statement_timeout%3D7s%20-c%20work_mem%3D1MB"
    async with opened(dsn, PoolSettings()) as database, database.runtime() as conn:
        cursor = await conn.execute(
            "SELECT current_setting('statement_timeout'), current_setting('work_mem'), current_setting('lock_timeout')"
        )
        assert await cursor.fetchone() == ("7s", "1MB", "2s")


def test_a_dsn_in_words_an_empty_one_and_one_that_is_none() -> None:
    assert conninfo_to_dict(connection_string("dbname=d host='a b'"))["host"] == "a b"
    assert "host" not in conninfo_to_dict(connection_string(""))
    for broken in ("postgresql//x", "nonsense=1", "dbname='d"):
        with pytest.raises(ConfigurationError, match="DSN"):
            connection_string(broken)


async def test_a_deadline_ends_the_wait_for_a_server_that_hangs(conn: AsyncConnection) -> None:
    async with stopped(conn.info.backend_pid):
        with pytest.raises(psycopg.OperationalError):
            async with deadline(conn, 0.05):
                await conn.execute("SELECT 1")
        assert conn.closed


async def test_a_deadline_ends_a_cancellation_that_waits_for_a_server_that_hangs(conn: AsyncConnection) -> None:
    started = asyncio.Event()

    async def ask() -> None:
        async with deadline(conn, 0.2):
            started.set()
            await conn.execute("SELECT 1")

    async with stopped(conn.info.backend_pid):
        task = asyncio.create_task(ask())
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        assert conn.closed


async def test_a_deadline_that_is_met_leaves_the_connection_alone(conn: AsyncConnection) -> None:
    async with deadline(conn, 0.0):
        pass  # the timer is due, and must not fire afterwards
    for _ in range(3):
        await asyncio.sleep(0)
    cursor = await conn.execute("SELECT 1")
    assert await cursor.fetchone() == (1,)


async def test_severing_is_harmless_on_a_connection_that_is_closed(conn: AsyncConnection) -> None:
    sever(conn)
    with pytest.raises(psycopg.OperationalError):
        await conn.execute("SELECT 1")
    sever(conn)
    await conn.close()
    sever(conn)


async def test_a_runtime_call_to_a_server_that_hangs_costs_only_its_connection(pool: Database) -> None:
    async with AsyncExitStack() as stack:
        used = []
        with pytest.raises(psycopg.OperationalError):
            async with pool.runtime() as conn:
                used.append(conn)
                await stack.enter_async_context(stopped(conn.info.backend_pid))
                await conn.execute("SELECT 1")
        async with pool.runtime() as another:
            assert another not in used
            await another.execute("SELECT 1")


async def test_jobs_never_get_the_last_two_connections(pool: Database) -> None:
    async with AsyncExitStack() as stack:
        held: list[AsyncConnection[Any]] = [
            await stack.enter_async_context(lent(pool, 1)) for _ in range(pool.settings.size - RESERVED)
        ]
        assert pool.free_for_jobs == 0
        with pytest.raises(NoFreeConnection, match=r"within 0.01 s"):
            await stack.enter_async_context(lent(pool, 0.01))
        assert pool.waiting == 0
        for _ in range(RESERVED):
            held.append(await stack.enter_async_context(pool.runtime(10)))
        assert len(set(held)) == pool.settings.size
    assert pool.free_for_jobs == pool.settings.size - RESERVED
    async with lent(pool, 1) as conn:
        await conn.execute("SELECT 1")


async def test_a_job_that_waits_gets_the_connection_that_comes_back(pool: Database) -> None:
    async def job() -> None:
        async with lent(pool, None) as conn:
            await conn.execute("SELECT 1")

    async with AsyncExitStack() as stack:
        for _ in range(pool.free_for_jobs):
            await stack.enter_async_context(lent(pool, 1))
        tasks = [asyncio.create_task(job()) for _ in range(20)]
        await asyncio.sleep(0)
        assert pool.waiting == 20
        for task in tasks[:5]:
            task.cancel()
        await asyncio.wait(tasks[:5])
        assert pool.waiting == 15
    await asyncio.gather(*tasks[5:])
    assert pool.waiting == 0
    assert pool.free_for_jobs == pool.settings.size - RESERVED


async def test_a_connection_that_comes_back_goes_to_the_next_job_without_the_pool(pool: Database) -> None:
    used: list[object] = []

    async def job() -> None:
        async with lent(pool, None) as conn:
            await conn.execute("SELECT 1")
            used.append(conn)

    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(lent(pool, 1)) for _ in range(pool.free_for_jobs)]
        tasks = [asyncio.create_task(job()) for _ in range(4)]
        await asyncio.sleep(0)
    # One is cancelled at the moment when it has got its turn: what it got goes on to the others.
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[0].cancelled() and len(used) == 3
    assert set(used) <= set(held)
    assert (pool.waiting, pool.free_for_jobs) == (0, pool.settings.size - RESERVED)
    async with AsyncExitStack() as stack:  # and none is lost
        for _ in range(pool.free_for_jobs):
            await stack.enter_async_context(lent(pool, 1))
        for _ in range(RESERVED):
            await stack.enter_async_context(pool.runtime(10))


async def test_a_connection_left_for_a_job_that_is_cancelled_goes_back_to_the_pool(pool: Database) -> None:
    async def job() -> None:
        async with lent(pool, None):
            raise AssertionError

    async with AsyncExitStack() as stack:
        for _ in range(pool.free_for_jobs):
            await stack.enter_async_context(lent(pool, 1))
        task = asyncio.create_task(job())
        await asyncio.sleep(0)
        assert pool.waiting == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with AsyncExitStack() as stack:
        for _ in range(pool.free_for_jobs):
            await stack.enter_async_context(lent(pool, 1))


async def test_what_a_job_has_left_open_or_closed_goes_to_no_other_job(pool: Database) -> None:
    async def job() -> None:
        async with lent(pool, None) as conn:
            assert (await (await conn.execute("SELECT 1")).fetchone()) == (1,)

    async with AsyncExitStack() as stack:
        for number in range(pool.free_for_jobs):
            conn = await stack.enter_async_context(lent(pool, 1))
            await (conn.execute("BEGIN") if number else conn.close())
        tasks = [asyncio.create_task(job()) for _ in range(4)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert pool.free_for_jobs == pool.settings.size - RESERVED


async def test_callers_leave_the_last_two_connections_to_the_runtime(pool: Database) -> None:
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(pool.for_caller(10)) for _ in range(pool.settings.size - RESERVED)]
        assert pool.free_for_jobs == 0
        with pytest.raises(PoolTimeout, match=r"within 0.01 s: other calls and jobs have all there are"):
            await stack.enter_async_context(pool.for_caller(0.01))
        held += [await stack.enter_async_context(pool.runtime(10)) for _ in range(RESERVED)]
        assert len(set(held)) == pool.settings.size
    async with pool.for_caller(), lent(pool, 1):
        pass


async def test_who_waits_while_connections_are_opened_is_not_told_that_others_have_them(worker_dsn: str) -> None:
    """As after a crash of the server: an enqueue tries again then, while behind others it would only make things worse."""
    answers = asyncio.Event()

    async def rehearse(conn: AsyncConnection[Any]) -> None:
        await answers.wait()

    database = Database(worker_dsn, PoolSettings())
    database.rehearse = rehearse
    await database.open()
    try:
        for get in (database.runtime, database.for_caller):
            with pytest.raises(PoolTimeout, match="not all are open yet") as caught:
                async with get(0.01):
                    pass
            assert not isinstance(caught.value, AllInUse)
        answers.set()
        async with AsyncExitStack() as stack:
            for _ in range(database.settings.size):
                await stack.enter_async_context(database.runtime(60))
            for get in (database.runtime, database.for_caller):
                with pytest.raises(AllInUse, match="all are in use"):
                    async with get(0.01):
                        pass
    finally:
        answers.set()
        await database.close()


async def test_one_caller_comes_through_while_jobs_have_their_whole_share(pool: Database) -> None:
    async def call() -> None:
        async with pool.for_caller() as conn:
            await conn.execute("SELECT 1")

    async with AsyncExitStack() as stack:
        for _ in range(pool.settings.size - RESERVED):
            await stack.enter_async_context(lent(pool, 1))
        await asyncio.gather(*(call() for _ in range(20)))
        async with pool.for_caller(), pool.runtime() as runtime:
            await runtime.execute("SELECT 1")
            with pytest.raises(PoolTimeout):
                await stack.enter_async_context(pool.for_caller(0.01))
    assert pool.free_for_jobs == pool.settings.size - RESERVED


async def test_cancelled_calls_lose_no_connection(worker_dsn: str) -> None:
    async def call(database: Database, job: bool) -> None:
        async with lent(database, None) if job else database.for_caller() as conn:
            await conn.execute("SELECT pg_sleep(60)")

    async with opened(worker_dsn, PoolSettings()) as database:
        for number in range(20):
            task = asyncio.create_task(call(database, job=number % 2 == 0))
            # At any moment: before the connection, in the statement, in between.
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert database.free_for_jobs == database.settings.size - RESERVED
        async with AsyncExitStack() as stack:
            for _ in range(database.settings.size):
                await stack.enter_async_context(database.runtime())


@pytest.mark.parametrize("job", [True, False])
async def test_a_call_that_is_cancelled_as_it_gives_its_connection_back_does_not_lose_it(worker_dsn: str, job: bool) -> None:
    """However many wait for a lock of the pool's, one that is cancelled there would take its connection with it."""
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def call(database: Database) -> None:
        async with lent(database, None) if job else database.for_caller():
            asked.set()
            await goes_on.wait()

    async with opened(worker_dsn, PoolSettings(acquire_timeout=2)) as database:
        assert database._pool is not None
        for _ in range(database.settings.size):
            asked.clear()
            goes_on.clear()
            task = asyncio.create_task(call(database))
            await asked.wait()
            async with database._pool._lock:
                goes_on.set()
                for _ in range(3):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            assert task.cancelled()
        assert database.free_for_jobs == database.settings.size - RESERVED
        async with AsyncExitStack() as stack:
            for _ in range(database.settings.size):
                await stack.enter_async_context(database.runtime())


async def test_a_job_without_a_server_gets_no_connection_and_holds_no_place() -> None:
    async with opened(NOWHERE, PoolSettings(acquire_timeout=0.1)) as database:
        with pytest.raises(NoFreeConnection, match=r"^no connection to the database within 0.1 s: (?!no connection)"):
            async with lent(database, 1):
                raise AssertionError("there is no server")
        assert database.free_for_jobs == database.settings.size - RESERVED
        with pytest.raises(psycopg.OperationalError) as refused:
            async with database.runtime():
                raise AssertionError("there is no server")
        assert connection_lost(refused.value)


async def test_severing_the_jobs_connections_ends_their_transactions_only(pool: Database) -> None:
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(pool.runtime(10))
        with pytest.raises(psycopg.OperationalError):
            async with lent(pool, 1) as job:
                pool.sever_jobs()
                await job.execute("SELECT 1")
        pool.sever_jobs()
        await runtime.execute("SELECT 1")


async def test_opening_waits_for_no_server_and_closing_is_repeatable(worker_dsn: str) -> None:
    database = Database(NOWHERE, PoolSettings())
    await database.open()
    await database.open()
    states = [database.is_open]
    await database.close()
    await database.close()
    assert [*states, database.is_open] == [True, False]
    with pytest.raises(ConfigurationError, match="not open"):
        async with database.runtime():
            raise AssertionError("it is closed")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (psycopg.OperationalError("server closed the connection unexpectedly"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (psycopg.errors.AdminShutdown("terminating connection"), True),
        (psycopg.errors.CannotConnectNow("starting up"), True),
        (psycopg.errors.TooManyConnections("no slots"), True),
        (psycopg.errors.ReadOnlySqlTransaction("in recovery"), True),
        (psycopg.errors.ConnectionFailure("gone"), True),
        (psycopg.errors.QueryCanceled("statement timeout"), False),
        (psycopg.errors.LockNotAvailable("lock timeout"), False),
        (psycopg.errors.SerializationFailure("again"), False),
        (psycopg.errors.UniqueViolation("there already"), False),
        (psycopg.errors.UndefinedTable("no such table"), False),
        (ValueError("not of the database"), False),
    ],
)
def test_which_errors_say_that_the_connection_is_lost(error: Exception, lost: bool) -> None:
    assert connection_lost(error) is lost


async def test_a_cancellation_that_the_pool_swallows_is_not_lost(pool: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool waits by wait_for(), which before Python 3.12 returns what it waited for when both come at once."""
    lend = AsyncConnectionPool.getconn

    async def swallowing(self: AsyncConnectionPool, timeout: float | None = None) -> AsyncConnection:
        lent = await lend(self, timeout)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return lent
        raise AssertionError("not cancelled")

    async def call() -> None:
        async with pool.runtime():
            raise AssertionError("the call went on")

    with monkeypatch.context() as patched:
        patched.setattr(AsyncConnectionPool, "getconn", swallowing)
        task = asyncio.create_task(call())
        with pytest.raises(asyncio.CancelledError):
            await task
    assert task.cancelled()
    async with AsyncExitStack() as stack:  # and the connection is back
        for _ in range(PoolSettings().size):
            await stack.enter_async_context(pool.runtime())
