"""The connection object of one job: all of psycopg works on it, and nothing of it is left once its job has ended."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue import JobContext, JobTransaction
from aioqueue.job_connection import JobConnection
from aioqueue.outcome import Failed, Reason
from aioqueue.pool_connection import PoolConnection
from tests.kit import Bench, passed, until
from tests.shop import add_probe, assert_clean, notes, write
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Conn = AsyncConnection[Any]


async def pipelined(conn: Conn) -> object:
    async with conn.pipeline():
        first = await conn.execute("SELECT 1")
        second = await conn.execute("SELECT 2")
        return await first.fetchone(), await second.fetchone()


async def savepoints(conn: Conn) -> object:
    with contextlib.suppress(psycopg.Error):
        async with conn.transaction():
            async with conn.transaction():
                await conn.execute("INSERT INTO shop.parent VALUES (1)")
            await conn.execute("SELECT 1 / 0")
    async with conn.transaction(force_rollback=True):
        await conn.execute("INSERT INTO shop.parent VALUES (2)")
    async with conn.pipeline(), conn.transaction():
        await conn.execute("INSERT INTO shop.parent VALUES (3)")
    return await (await conn.execute("SELECT id FROM shop.parent")).fetchall()


async def server_cursor(conn: Conn) -> object:
    async with conn.cursor("numbers", scrollable=True) as cursor:
        await cursor.execute("SELECT * FROM generate_series(1, 250)")
        await cursor.scroll(240)
        return await cursor.fetchmany(3), len(await cursor.fetchall())


async def streamed(conn: Conn) -> object:
    return [row async for row in conn.cursor().stream("SELECT * FROM generate_series(1, 3)")]


async def copied(conn: Conn) -> object:
    async with conn.cursor().copy("COPY shop.parent FROM STDIN") as copy:
        for number in range(3):
            await copy.write_row((number,))
    async with conn.cursor().copy("COPY (SELECT count(*) FROM shop.parent) TO STDOUT") as copy:
        return b"".join([bytes(part) async for part in copy])


async def many(conn: Conn) -> object:
    cursor = conn.cursor()
    await cursor.executemany("INSERT INTO shop.parent VALUES (%s) RETURNING id", [(n,) for n in range(3)], returning=True)
    rows = [await cursor.fetchone()]
    while cursor.nextset():
        rows.append(await cursor.fetchone())
    return rows


async def noticed(conn: Conn) -> object:
    said: list[str | None] = []
    conn.add_notice_handler(lambda diagnostic: said.append(diagnostic.message_primary))
    await conn.execute("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
    return said


async def cancelled(conn: Conn) -> object:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30) as patience, conn.transaction():
            conn.add_notice_handler(lambda _: patience.reschedule(0.0))  # once the server is inside the statement
            await asyncio.create_task(conn.execute("DO $$ BEGIN RAISE NOTICE 'inside'; PERFORM pg_sleep(1000); END $$"))
    return await (await conn.execute("SELECT 1")).fetchone()


async def prepared(conn: Conn) -> object:
    cursor = await conn.execute("SELECT %s::int + 1", [1], prepare=True)
    for _ in range(2):
        cursor = await conn.execute("SELECT %s::int + 1", [1], prepare=True)
    return await cursor.fetchone(), conn.prepare_threshold, conn.prepared_max


WORKS: dict[str, tuple[Callable[[Conn], Awaitable[object]], object]] = {
    "pipeline": (pipelined, ((1,), (2,))),
    "savepoints": (savepoints, [(3,)]),
    "server cursor": (server_cursor, ([(241,), (242,), (243,)], 7)),
    "stream": (streamed, [(1,), (2,), (3,)]),
    "COPY": (copied, b"3\n"),
    "executemany": (many, [(0,), (1,), (2,)]),
    "notices": (noticed, ["hello"]),
    "a cancelled statement": (cancelled, (1,)),
    "prepared statements": (prepared, ((2,), 1, 100)),
}


@pytest.mark.parametrize("name", WORKS)
async def test_what_psycopg_can_do_works_on_it(at: Bench, shop: Session, name: str) -> None:
    found = add_probe(at)
    act, expected = WORKS[name]
    answers: list[object] = []

    async def work(tx: JobTransaction) -> None:
        answers.append(await act(tx.connection))

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    pid = found["pid"]
    for _ in range(2):
        assert await at.run("work", tenant="a") is None, at.outcomes
        await shop.rows("DELETE FROM shop.parent")
        await assert_clean(at, found)
        assert found["pid"] == pid, "the connection is kept"
    assert answers == [expected] * 2


# -- nothing is left of it -----------------------------------------------------------------------------------------------


async def _execute(kept: dict[str, Any]) -> None:
    await kept["connection"].execute("INSERT INTO shop.note (body) VALUES ('late')")


async def _cursor(kept: dict[str, Any]) -> None:
    await kept["cursor"].execute("INSERT INTO shop.note (body) VALUES ('late')")


async def _new_cursor(kept: dict[str, Any]) -> None:
    kept["connection"].cursor()


async def _own_cursor(kept: dict[str, Any]) -> None:
    await psycopg.AsyncCursor(kept["connection"]).execute("SELECT 1")


async def _transaction(kept: dict[str, Any]) -> None:
    async with kept["connection"].transaction():
        await _execute(kept)


async def _pipeline(kept: dict[str, Any]) -> None:
    async with kept["connection"].pipeline():
        await _execute(kept)


async def _commit(kept: dict[str, Any]) -> None:
    await kept["connection"].commit()


async def _mode(kept: dict[str, Any]) -> None:
    await kept["connection"].set_autocommit(False)


async def _copy(kept: dict[str, Any]) -> None:
    async with kept["cursor"].copy("COPY shop.parent FROM STDIN") as copy:
        await copy.write_row((1,))


async def _server_cursor(kept: dict[str, Any]) -> None:
    await kept["server cursor"].fetchone()


async def _notifies(kept: dict[str, Any]) -> None:
    await anext(kept["connection"].notifies(timeout=0))


async def _cancel(kept: dict[str, Any]) -> None:
    kept["connection"].cancel()
    await kept["connection"].cancel_safe()
    await kept["connection"].close()
    kept["connection"].fileno()


REFUSED = r"closed|can't|lost"
USES = (
    _execute,
    _cursor,
    _new_cursor,
    _own_cursor,
    _transaction,
    _pipeline,
    _commit,
    _mode,
    _copy,
    _server_cursor,
    _notifies,
    _cancel,
)


@pytest.mark.parametrize("fails", [False, True], ids=["succeeded", "failed"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__.strip("_"))
async def test_a_reference_that_was_kept_is_of_no_use_to_anybody(
    at: Bench, shop: Session, use: Callable[[dict[str, Any]], Awaitable[None]], fails: bool
) -> None:
    """Not between two jobs, nor while the next one has the same connection; which notices nothing."""
    kept: dict[str, Any] = {}
    pids: list[int] = []

    async def keep(tx: JobTransaction) -> None:
        conn = tx.connection
        pids.append(conn.info.backend_pid)
        kept["connection"] = conn
        kept["cursor"] = await conn.execute("SELECT 1")
        kept["server cursor"] = conn.cursor("left")
        await kept["server cursor"].execute("SELECT 1")
        kept["server cursor"]._closed = True  # or its end would be warned of; it is as open as ever
        if fails:
            raise ValueError("mine")

    async def victim(tx: JobTransaction) -> None:
        pids.append(tx.connection.info.backend_pid)
        with pytest.raises(psycopg.Error, match=REFUSED):
            await use(kept)
        await write(tx, "mine")

    at.tasks.task(name="keep")(keep)
    at.tasks.task(name="victim")(victim)
    assert isinstance(await at.run("keep", tenant="keeper"), Failed if fails else type(None))
    with pytest.raises(psycopg.Error, match=REFUSED):
        await use(kept)
    assert await at.run("victim", tenant="victim") is None, at.outcomes
    assert pids[0] == pids[1]
    assert kept["connection"].closed
    assert await notes(shop) == [("victim", "mine")]


async def test_a_task_that_lives_on_gets_nothing_more_done(at: Bench, shop: Session) -> None:
    """It goes on writing for as long as it is let, while its job ends and others have the connection."""
    ended = asyncio.Event()
    alive: list[asyncio.Task[None]] = []
    between = asyncio.Event()
    errors: list[BaseException] = []

    async def go_on(conn: Conn) -> None:
        try:
            while True:
                between.clear()
                await conn.execute("INSERT INTO shop.note (body) VALUES ('from the background')")
                between.set()
                await asyncio.sleep(0)
        except psycopg.Error as error:
            errors.append(error)
        ended.set()

    async def work(tx: JobTransaction) -> None:
        alive.append(asyncio.create_task(go_on(tx.connection)))
        await passed(between)

    async def other(tx: JobTransaction) -> list[Any]:
        return await tx.fetch_all("SELECT tenant FROM shop.note WHERE body <> 'other'")

    at.tasks.task(name="work")(work)
    at.tasks.task(name="other")(other)
    outcome = await at.run("work", tenant="a")
    for _ in range(5):
        assert await at.run("other", tenant="b") is None, at.outcomes
    await passed(ended)
    assert len(errors) == 1
    # Either it was between two statements, or one was under way: then the job failed, and nothing of it was kept.
    if outcome is None:
        assert {tenant for tenant, _ in await notes(shop)} == {"a"}
    else:
        assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION and "under way" in outcome.error.message
        assert await notes(shop) == []


@pytest.mark.parametrize("short", [False, True], ids=["own transaction", "short transaction"])
async def test_a_statement_that_is_under_way_at_the_end_fails_the_job(at: Bench, shop: Session, short: bool) -> None:
    found = add_probe(at)
    alive: list[asyncio.Task[Any]] = []
    waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"

    async def leave(tx: JobTransaction) -> None:
        await write(tx, "one")
        alive.append(asyncio.create_task(tx.execute("SELECT pg_sleep(1000)")))
        await until(shop, waits)

    async def in_short(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await leave(tx)

    at.tasks.task(name="work")(in_short if short else leave)
    await assert_clean(at, found)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert "under way" in outcome.error.message
    with pytest.raises(psycopg.Error):
        await alive[0]
    assert await notes(shop) == []
    await assert_clean(at, found)


async def test_a_statement_that_waits_for_its_turn_at_the_end_is_refused(at: Bench, shop: Session) -> None:
    """Its turn would have been between the check and COMMIT, or after it."""
    alive: list[asyncio.Task[Any]] = []

    async def work(tx: JobTransaction) -> None:
        await write(tx, "mine")
        # Not awaited, and not yet begun when the job ends.
        alive.append(asyncio.create_task(write(tx, "late")))

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    with pytest.raises((psycopg.Error, RuntimeError)):
        await alive[0]
    assert await notes(shop) == [("a", "mine")]


async def test_a_thread_that_keeps_it_gets_nothing_more_done(at: Bench, shop: Session) -> None:
    kept: list[Conn] = []
    said: list[BaseException | None] = []

    def in_thread() -> None:
        async def use() -> None:
            await kept[0].execute("INSERT INTO shop.note (body) VALUES ('late')")

        try:
            asyncio.run(use())
        except psycopg.Error as error:
            said.append(error)

    async def work(tx: JobTransaction) -> None:
        kept.append(tx.connection)

    async def victim(tx: JobTransaction) -> None:
        thread = threading.Thread(target=in_thread)
        thread.start()
        await asyncio.to_thread(thread.join)
        await write(tx, "mine")

    at.tasks.task(name="work")(work)
    at.tasks.task(name="victim")(victim)
    assert await at.run("work", tenant="a") is None
    assert await at.run("victim", tenant="b") is None, at.outcomes
    assert isinstance(said[0], psycopg.OperationalError)
    assert await notes(shop) == [("b", "mine")]


async def test_a_thread_in_the_middle_of_a_statement_at_the_end_sees_its_connection_shut(at: Bench, shop: Session) -> None:
    """Its lock is another loop's: the job's end must neither wait for that for ever nor close what the thread still reads."""
    said: list[BaseException] = []
    threads: list[threading.Thread] = []

    async def work(tx: JobTransaction) -> None:
        conn = tx.connection

        def in_thread() -> None:
            try:
                asyncio.run(sleep())
            except psycopg.Error as error:
                said.append(error)

        async def sleep() -> None:
            await conn.execute("SELECT pg_sleep(1000)")

        await write(tx, "mine")
        threads.append(threading.Thread(target=in_thread))
        threads[0].start()
        await until(shop, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and "under way" in outcome.error.message
    await asyncio.to_thread(threads[0].join)
    assert isinstance(said[0], psycopg.OperationalError)
    assert await notes(shop) == []


async def test_nothing_runs_after_a_commit_in_sql(at: Bench, shop: Session) -> None:
    """The statement itself raises, and whatever user code does about it, no later one runs without the tenant."""
    raised: list[BaseException] = []

    async def work(tx: JobTransaction) -> None:
        conn = tx.connection
        for text in ("COMMIT", "SELECT 1", "INSERT INTO shop.parent VALUES (1)", "SET app.tenant = 'victim'", "BEGIN"):
            try:
                await conn.execute(text)
            except Exception as error:
                raised.append(error)

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION
    assert len(raised) == 5
    assert await shop.rows("SELECT * FROM shop.parent") == []


async def test_notifications_of_jobs_are_gathered_nowhere(at: Bench) -> None:
    async def work(tx: JobTransaction) -> None:
        await tx.execute("LISTEN job")
        await tx.execute("NOTIFY job")

    at.tasks.task(name="work")(work)
    for _ in range(3):
        assert await at.run("work") is None, at.outcomes
    async with at.database.runtime() as conn:
        assert not conn._notifies_backlog


async def test_a_connection_that_user_code_closes_fails_the_job(at: Bench, shop: Session) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "one")
        await tx.connection.close()

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION
    assert "closed its connection" in outcome.error.message
    assert await notes(shop) == []
    await assert_clean(at, found)


async def test_it_has_whatever_a_connection_of_psycopg_has(worker_dsn: str) -> None:
    """It is not made by psycopg's own __init__, to which a later release may add."""
    async with await PoolConnection.connect(worker_dsn, autocommit=True) as pooled:
        plain: AsyncConnection[Any] = AsyncConnection(pooled.pgconn)
        plain._pool = None  # so that it warns nobody of not having been closed
        given = JobConnection(pooled, lambda: None)
        for name, value in vars(plain).items():
            assert name == "_pool" or type(getattr(given, name)) is type(value), name
        given.kill()
