"""How a pooled connection waits: its socket stays with the loop while jobs have it, and never longer than the socket is open."""

import asyncio
import concurrent.futures
import contextvars
import gc
import inspect
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.errors import Diagnostic
from psycopg.generators import notifies
from psycopg.pq import ConnStatus
from psycopg.waiting import Wait

from aioqueue import AioQueue, JobTransaction, pool_connection
from aioqueue.database import Database
from aioqueue.outcome import Failed, Reason
from aioqueue.pool_connection import PoolConnection
from aioqueue.settings import PoolSettings
from tests.kit import Bench, bench, turn_until
from tests.postgres import Database as ServerDatabase
from tests.sql.engine import Session
from tests.tls import encrypted

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture
async def conn(worker_dsn: str) -> AsyncIterator[PoolConnection]:
    """One that the loop watches from its first statement on, as while a job has it."""
    connection = await PoolConnection.connect(worker_dsn, autocommit=True)
    connection.stays_watched_by = asyncio.get_running_loop()
    await connection.execute("SELECT 1")
    assert watched(connection)
    try:
        yield connection
    finally:
        await connection.close()


def watched(conn: PoolConnection) -> bool:
    return conn._watched_by is not None


async def end_session(dsn: str, conn: PoolConnection) -> None:
    async with await AsyncConnection.connect(dsn, autocommit=True) as other:
        await other.execute("SELECT pg_terminate_backend(%s, 10000)", [conn.info.backend_pid])


async def one_with_its_number(dsn: str, number: int) -> None:
    """Connections that are opened next get the number of a socket that was closed; they must be heard, too."""
    async with asyncio.timeout(10):
        others = [await AsyncConnection.connect(dsn, autocommit=True) for _ in range(4)]
        try:
            assert number in [other.fileno() for other in others]
            for other in others:
                await other.execute("SELECT pg_sleep(0.01)")
        finally:
            for other in others:
                await other.close()


async def test_a_server_that_ends_a_session_which_nobody_uses_is_not_listened_to_for_ever(
    conn: PoolConnection, worker_dsn: str, database: ServerDatabase
) -> None:
    number = conn.fileno()
    await end_session(database.dsn("superuser"), conn)
    await turn_until(lambda: not watched(conn))
    with pytest.raises(psycopg.OperationalError):
        await conn.execute("SELECT 1")
    assert conn.closed and not watched(conn)
    await one_with_its_number(worker_dsn, number)


async def test_a_session_that_ends_in_a_statement_leaves_its_number_to_the_next(
    conn: PoolConnection, worker_dsn: str, database: ServerDatabase
) -> None:
    number = conn.fileno()
    statement = asyncio.create_task(conn.execute("SELECT pg_sleep(60)"))
    await asyncio.sleep(0)
    await end_session(database.dsn("superuser"), conn)
    with pytest.raises(psycopg.OperationalError):
        await statement
    assert not watched(conn)
    await one_with_its_number(worker_dsn, number)


async def test_closing_leaves_the_number_to_the_next(conn: PoolConnection, worker_dsn: str) -> None:
    number = conn.fileno()
    await conn.close()
    assert not watched(conn)
    await one_with_its_number(worker_dsn, number)


async def test_a_cancelled_statement_is_ended_and_the_next_one_gets_its_own_answer(
    conn: PoolConnection, database: ServerDatabase
) -> None:
    runs = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep')"
    async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as other:
        for number in range(3):
            statement = asyncio.create_task(conn.execute("SELECT pg_sleep(60)"))
            async with asyncio.timeout(10):
                while await (await other.execute(runs, [conn.info.backend_pid])).fetchone() != (True,):
                    pass
            statement.cancel()
            with pytest.raises(asyncio.CancelledError):
                await statement
            assert await (await conn.execute("SELECT %s::int", [number])).fetchone() == (number,)
            assert watched(conn)


async def test_a_statement_that_is_cancelled_as_its_answer_has_come_leaves_none_to_read(conn: PoolConnection) -> None:
    for number in range(3):
        statement = asyncio.create_task(conn.execute("SELECT -1"))
        await asyncio.sleep(0)
        await turn_until(lambda: conn._answer is None or conn._answer.done())
        if statement.cancel():
            with pytest.raises(asyncio.CancelledError):
                await statement
        assert await (await conn.execute("SELECT %s::int", [number])).fetchone() == (number,)


async def test_what_is_too_much_for_one_write_is_sent_and_copied_as_by_psycopg(conn: PoolConnection) -> None:
    text = "x" * 20_000_000
    row = await (await conn.execute("SELECT %s::text", [text])).fetchone()
    assert row == (text,)
    async with conn.cursor() as cursor:
        await cursor.execute("CREATE TEMP TABLE copied (line text)")
        async with cursor.copy("COPY copied FROM STDIN") as copy:
            for number in range(2000):
                await copy.write_row([f"{number:0>2000}"])
        assert await (await cursor.execute("SELECT count(*) FROM copied")).fetchone() == (2000,)
        assert [row async for row in cursor.stream("SELECT length(line) FROM copied LIMIT 2")] == [(2000,), (2000,)]


async def test_a_handler_of_notices_finds_the_context_of_who_waits(conn: PoolConnection) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    seen: list[str] = []

    def take(_: Diagnostic) -> None:
        seen.append(name.get())

    async def say(value: str) -> None:
        name.set(value)
        await conn.execute("DO $$ BEGIN RAISE WARNING 'x'; END $$")

    conn.add_notice_handler(take)
    for value in ("one", "two"):
        await asyncio.create_task(say(value))
    assert seen == ["one", "two"]


async def test_the_loop_keeps_nothing_of_whoever_used_it(worker_dsn: str) -> None:
    class Thing:
        pass

    kept: contextvars.ContextVar[Thing] = contextvars.ContextVar("kept")
    conn = await PoolConnection.connect(worker_dsn, autocommit=True)
    conn.stays_watched_by = asyncio.get_running_loop()

    async def use() -> weakref.ref[Thing]:
        thing = Thing()
        kept.set(thing)
        await conn.execute("SELECT 1")
        return weakref.ref(thing)

    thing = await asyncio.create_task(use())
    await asyncio.sleep(0)
    gc.collect()
    assert watched(conn) and thing() is None
    await conn.close()


async def test_a_thread_with_a_loop_of_its_own_may_use_it_meanwhile(conn: PoolConnection) -> None:
    async def ask() -> object:
        return await (await conn.execute("SELECT pg_sleep(0.05)")).fetchone()

    for here in (True, False):
        assert await asyncio.to_thread(lambda: asyncio.run(ask())) == ("",)
        assert await (await conn.execute("SELECT 1")).fetchone() == (1,)
        assert conn._watched_by is asyncio.get_running_loop()
        if here:
            conn.unwatch()  # a thread that is the first to use it is not to go on watching


async def test_the_pool_gets_back_what_the_loop_does_not_watch_any_more(worker_dsn: str) -> None:
    database = Database(worker_dsn, PoolSettings(size=3))
    await database.open()
    try:
        conn = await database.lend(1.0)
        await conn.execute("SELECT 1")
        assert watched(conn)
        await database.take_back(conn)
        assert not watched(conn)
        async with database.runtime() as other:
            assert isinstance(other, PoolConnection)
            await other.execute("SELECT 1")
            assert not watched(other)
    finally:
        await database.close()


# -- ends, and other loops -------------------------------------------------------------------------------------------------


async def test_who_waits_as_the_connection_is_closed_hears_of_it(conn: PoolConnection, worker_dsn: str) -> None:
    """A COPY that a task reads holds no lock: where the job's transaction ends nobody knows of that task."""
    number = conn.fileno()
    async with conn.cursor() as cursor:
        reads = asyncio.create_task(copy_slowly(cursor))
        await turn_until(lambda: conn._answer is not None)
        await conn.close()
        await asyncio.wait([reads], timeout=10)
        assert reads.done()
        with pytest.raises(psycopg.OperationalError):
            await reads
    await one_with_its_number(worker_dsn, number)


async def copy_slowly(cursor: psycopg.AsyncCursor[Any]) -> None:
    async with cursor.copy("COPY (SELECT pg_sleep(60)) TO STDOUT") as copy:
        async for _ in copy:
            pass


async def test_a_second_cancellation_leaves_nothing_to_the_next_of_that_number(conn: PoolConnection, worker_dsn: str) -> None:
    number = conn.fileno()
    statement = asyncio.create_task(conn.execute("SELECT pg_sleep(60)"))
    await turn_until(lambda: conn._answer is not None)
    statement.cancel()
    await turn_until(lambda: conn._severing is not None)
    statement.cancel()
    with pytest.raises(asyncio.CancelledError):
        await statement
    assert not watched(conn) and conn._severing is None
    await conn.close()
    await one_with_its_number(worker_dsn, number)


async def test_a_second_wait_at_the_same_time_is_refused_and_the_first_has_its_answer(conn: PoolConnection) -> None:
    statement = asyncio.create_task(conn.execute("SELECT 7, pg_sleep(0.2)"))
    await turn_until(lambda: conn._answer is not None)
    with pytest.raises(psycopg.OperationalError, match="another statement"):
        await conn.wait(notifies(conn.pgconn))
    row = await (await statement).fetchone()
    assert row is not None and row[0] == 7


async def test_a_wait_whose_socket_another_has_taken_from_the_loop_looks_again(
    conn: PoolConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a waiter of psycopg's does that was closed under, when the number of its socket is that of a new one by now."""
    monkeypatch.setattr(pool_connection, "LOOK_AGAIN", 0.1)
    statement = asyncio.create_task(conn.execute("SELECT pg_sleep(0.1)"))
    await turn_until(lambda: conn._answer is not None)
    asyncio.get_running_loop().remove_reader(conn.fileno())
    async with asyncio.timeout(10):
        await statement
    assert watched(conn)


async def test_a_wait_whose_connection_was_closed_under_it_takes_no_other_s_number(
    conn: PoolConnection, worker_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_connection, "LOOK_AGAIN", 0.1)
    number = conn.fileno()
    statement = asyncio.create_task(conn.execute("SELECT pg_sleep(60)"))
    await turn_until(lambda: conn._answer is not None)
    conn.pgconn.finish()
    await asyncio.wait([statement], timeout=10)
    assert statement.done() and isinstance(statement.exception(), psycopg.OperationalError)
    await one_with_its_number(worker_dsn, number)


async def test_a_cancelled_statement_is_over_as_soon_as_its_connection_is_shut(
    conn: PoolConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network swallows the request to cancel, too; the end of a lease does not wait for it."""
    asked = asyncio.Event()

    async def swallowed(_: PoolConnection, seconds: float) -> None:
        asked.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(PoolConnection, "_ask_to_cancel", swallowed)
    monkeypatch.setattr(pool_connection, "CANCEL_SECONDS", 3600.0)
    statement = asyncio.create_task(conn.execute("SELECT pg_sleep(60)"))
    await turn_until(lambda: conn._answer is not None)
    statement.cancel()
    await asked.wait()
    pool_connection.sever(conn)
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(20):
            await statement


async def test_what_is_cancelled_while_it_is_written_reaches_no_other(conn: PoolConnection) -> None:
    """The socket is full: the server reads no more of what is far larger than its buffers."""
    statement = asyncio.create_task(conn.execute("SELECT length(%s::text)", ["x" * 50_000_000]))
    await asyncio.sleep(0)
    statement.cancel()
    with pytest.raises(asyncio.CancelledError):
        await statement
    try:
        assert await (await conn.execute("SELECT 7")).fetchone() == (7,)
    except psycopg.OperationalError:
        assert conn.pgconn.status != ConnStatus.OK or conn.closed


def test_an_interruption_in_the_middle_of_an_answer_is_no_answer(worker_dsn: str) -> None:
    def interrupted(conn: PoolConnection) -> PQGen[str]:
        conn.pgconn.send_query(b"SELECT 1")
        yield Wait.R
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    conn = loop.run_until_complete(PoolConnection.connect(worker_dsn, autocommit=True))
    try:
        waits = loop.create_task(conn.wait(interrupted(conn)))
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(waits)
        with pytest.raises(psycopg.OperationalError):
            loop.run_until_complete(asyncio.wait_for(waits, 10))
        loop.run_until_complete(conn.close())
    finally:
        loop.close()


def test_a_connection_of_a_loop_that_is_closed_serves_the_next_one(worker_dsn: str) -> None:
    async def begin() -> PoolConnection:
        conn = await PoolConnection.connect(worker_dsn, autocommit=True)
        conn.stays_watched_by = asyncio.get_running_loop()
        await conn.execute("SELECT 1")
        return conn

    async def go_on(conn: PoolConnection) -> object:
        row = await (await conn.execute("SELECT 2")).fetchone()
        await conn.close()
        return row

    conn = asyncio.run(begin())
    assert asyncio.run(go_on(conn)) == (2,) and not watched(conn)


async def test_another_thread_uses_no_socket_that_this_loop_still_watches(
    conn: PoolConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it closed there, its number would be taken for watched here."""
    seen: list[bool] = []
    wait = AsyncConnection.wait

    async def look(self: PoolConnection, *args: Any, **options: Any) -> Any:
        seen.append(watched(self))
        return await wait(self, *args, **options)

    async def ask() -> object:
        return await (await conn.execute("SELECT 1")).fetchone()

    monkeypatch.setattr(AsyncConnection, "wait", look)
    assert await asyncio.to_thread(lambda: asyncio.run(ask())) == (1,)
    assert seen and not any(seen)


async def test_a_thread_that_this_loop_is_blocked_by_goes_on(conn: PoolConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_connection, "TAKE_OVER_SECONDS", 0.05)

    async def ask() -> object:
        return await (await conn.execute("SELECT 1")).fetchone()

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: asyncio.run(ask())).result(timeout=30) == (1,)
    assert await (await conn.execute("SELECT pg_sleep(0.05)")).fetchone() == ("",)


async def test_loops_of_two_threads_are_told_of_their_sockets_at_once(worker_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=10)

    async def ask() -> object:
        loop = asyncio.get_running_loop()
        async with await PoolConnection.connect(worker_dsn, autocommit=True) as conn:
            add_reader = loop.add_reader

            def meet_first(*args: Any) -> None:
                meet.wait()
                add_reader(*args)

            with monkeypatch.context() as patch:
                patch.setattr(loop, "add_reader", meet_first)
                return await (await conn.execute("SELECT 1")).fetchone()

    both = await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(ask())) for _ in range(2)))
    assert both == [(1,), (1,)]


async def test_a_wait_that_a_job_leaves_behind_is_no_other_job_s(at: Bench) -> None:
    """It holds no lock and the transaction is idle; cancelled later, it would take another's answer away."""
    left: list[asyncio.Task[Any]] = []

    async def leave(tx: JobTransaction) -> None:
        left.append(asyncio.create_task(tx.connection.wait(notifies(tx.connection.pgconn))))
        await asyncio.sleep(0)

    at.tasks.task(name="leave")(leave)
    outcome = await at.run("leave")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION
    await asyncio.wait(left, timeout=10)
    assert left[0].done() and isinstance(left[0].exception(), psycopg.OperationalError)


# -- over TLS --------------------------------------------------------------------------------------------------------------


async def test_answers_of_any_length_come_over_tls(worker_dsn: str, tmp_path: Path) -> None:
    """What is decrypted already is in no socket: nobody may wait for that to become readable."""
    async with encrypted(worker_dsn, tmp_path) as dsn, await PoolConnection.connect(dsn, autocommit=True) as conn:
        conn.stays_watched_by = asyncio.get_running_loop()
        assert conn.pgconn.ssl_in_use
        async with asyncio.timeout(60):
            for length in (*range(7000, 70000, 513), 5_000_000):
                row = await (await conn.execute("SELECT repeat('x', %s)", [length])).fetchone()
                assert row is not None and len(row[0]) == length


async def test_a_job_s_transaction_over_tls(database: ServerDatabase, shop: Session, tmp_path: Path) -> None:
    seen: list[object] = []
    async with (
        encrypted(database.dsn("worker"), tmp_path) as dsn,
        bench(dsn, shop, AioQueue(schema=shop.store.schema)) as at,
    ):

        async def much(tx: JobTransaction) -> None:
            seen.append(tx.connection.pgconn.ssl_in_use)
            seen.append(len(await tx.fetch_value("SELECT repeat('x', 5000000)")))
            seen.append(await tx.fetch_value("SELECT length(%s::text)", ["y" * 5_000_000]))

        at.tasks.task(name="much")(much)
        assert await at.run("much") is None
    assert seen == [True, 5_000_000, 5_000_000]


# -- psycopg's own parts ---------------------------------------------------------------------------------------------------


async def test_the_private_parts_of_psycopg_that_we_build_on_are_what_they_were(worker_dsn: str) -> None:
    """pool_connection, job_connection, trip and open_transaction use these; another release of psycopg may have others."""
    async with await PoolConnection.connect(worker_dsn, autocommit=True, prepare_threshold=1) as conn:
        prepared: Any = conn._prepared
        await conn.execute("SELECT 1", prepare=True)
        assert list(prepared._names) == [(b"SELECT 1", ())], "the key of what is prepared"
        assert (prepared._prepared_idx, list(prepared._to_flush)) == (1, [])
        assert prepared.prepare_threshold == 1 and prepared.prepared_max > 1
        assert conn._get_tx_start_command() == b"BEGIN"
        assert (conn._autocommit, conn._num_transactions) == (True, 0)
    assert list(inspect.signature(AsyncConnection.wait).parameters)[:3] == ["self", "gen", "interval"]
    assert "timeout" in inspect.signature(AsyncConnection._try_cancel).parameters
    assert "self._try_cancel(" in inspect.getsource(AsyncConnection.wait), "what is called when a wait is cancelled"
