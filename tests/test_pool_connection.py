"""How a pooled connection waits: its socket stays with the loop while jobs have it, and never longer than the socket is open."""

import asyncio
import contextvars
import gc
import weakref
from collections.abc import AsyncIterator, Callable

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.errors import Diagnostic

from aioqueue.database import Database
from aioqueue.pooler import PoolConnection
from aioqueue.settings import PoolSettings
from tests.postgres import Database as ServerDatabase

pytestmark = pytest.mark.anyio


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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


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
    await until(lambda: not watched(conn))
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
        await until(lambda: conn._answer is None or conn._answer.done())
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
