"""A job's transaction begins in the round trip that ends the one before it: whatever becomes of that one, or of who waits."""

import asyncio
import os
import select
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus

from aioqueue import JobTransaction, Snooze
from aioqueue.attempt import Cause
from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.outcome import Cancelled, Failed, Outcome, Reason, Snoozed
from aioqueue.pool_connection import PoolConnection
from aioqueue.trip import Trip
from tests.kit import PATIENCE, Bench, passed, turn_until, until, wait_until_true
from tests.shop import notes, write
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

End = Callable[[JobTransaction, asyncio.Event], Awaitable[object]]


class Chain:
    """Two jobs of other tenants for one connection: the second waits while the first runs."""

    def __init__(self, at: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = at
        self.running = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.together = 0
        """Beginnings that were sent with another's end."""
        self.seen: list[Any] = []
        run = Trip.run

        async def counted(trip: Trip, seconds: float) -> Any:
            self.together += trip.then is not None
            return await run(trip, seconds)

        monkeypatch.setattr(Trip, "run", counted)

    async def begin(self, end: End) -> tuple[Claimed, Claimed]:
        """Start both; the first has begun then, and ends with `end` once it goes on."""

        async def first(tx: JobTransaction) -> None:
            await write(tx, "first")
            self.running.set()
            await passed(self.goes_on)
            await end(tx, self.goes_on)

        async def second(tx: JobTransaction) -> None:
            await write(tx, "second")
            assert await tx.fetch_value("SHOW transaction_isolation") == "read committed"
            self.seen.append((await tx.fetch_value("SELECT current_setting('app.tenant')"), str(tx.tenant)))

        self.at.tasks.task(name="first")(first)
        self.at.tasks.task(name="second")(second)
        one = await self.at.start("first", tenant="a")
        await passed(self.running)
        two = await self.at.start("second", tenant="b")
        await turn_until(lambda: self.at.database.waiting)
        return one, two


@pytest.fixture
def chain(at: Bench, monkeypatch: pytest.MonkeyPatch) -> Chain:
    return Chain(at, monkeypatch)


async def nothing(_: JobTransaction, __: asyncio.Event) -> None:
    pass


async def leave_settings(tx: JobTransaction, _: asyncio.Event) -> None:
    await tx.execute("SET app.tenant = 'a'")
    await tx.execute("SET search_path = shop, pg_temp")
    await tx.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE")
    await tx.execute("CREATE TEMP TABLE note AS SELECT 'x' AS body")


async def change_tenant(tx: JobTransaction, _: asyncio.Event) -> None:
    await tx.execute("SET LOCAL app.tenant = 'b'")


async def raise_error(_: JobTransaction, __: asyncio.Event) -> None:
    raise ValueError


async def swallow(tx: JobTransaction, _: asyncio.Event) -> None:
    try:
        await tx.execute("SELECT 1 / 0")
    except psycopg.Error:
        pass


async def snooze(_: JobTransaction, __: asyncio.Event) -> None:
    raise Snooze(60)


async def commit(tx: JobTransaction, _: asyncio.Event) -> None:
    await tx.execute("COMMIT")


async def read_only(tx: JobTransaction, _: asyncio.Event) -> None:
    await tx.execute("SET TRANSACTION READ ONLY")


async def deallocate(tx: JobTransaction, _: asyncio.Event) -> None:
    await tx.execute("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")


async def deferred(tx: JobTransaction, _: asyncio.Event) -> None:
    await tx.execute("CREATE TEMP TABLE child (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP")
    await tx.execute("INSERT INTO child VALUES (1), (1)")


ENDS: dict[str, tuple[End, type[Outcome] | None, int]] = {
    "nothing": (nothing, None, 1),
    "leaves settings": (leave_settings, None, 1),
    "another tenant": (change_tenant, Failed, 1),
    "an exception": (raise_error, Failed, 0),
    "a swallowed error": (swallow, Failed, 0),
    "snoozes": (snooze, Snoozed, 0),
    "COMMIT": (commit, Failed, 0),
    "READ ONLY": (read_only, Failed, 1),
    "DEALLOCATE ALL, unseen": (deallocate, None, 1),
    "a deferred constraint": (deferred, Failed, 1),
}


@pytest.mark.parametrize("name", ENDS)
async def test_the_next_job_begins_clean_however_the_one_before_it_ends(
    at: Bench, shop: Session, chain: Chain, name: str
) -> None:
    end, outcome, together = ENDS[name]
    one, two = await chain.begin(end)
    chain.goes_on.set()
    await at.end()
    found = at.outcomes.get(one.job_id)
    assert found is None if outcome is None else isinstance(found, outcome), found
    assert two.job_id not in at.outcomes
    assert chain.together == together
    assert chain.seen == [("b", "b")]
    assert await notes(shop) == [("a", "first")] * (outcome is None or name == "COMMIT") + [("b", "second")]
    assert await at.state(two) == "succeeded"
    assert at.database.free_for_jobs == 1
    assert await at.run("second", tenant="c") is None


async def test_a_job_that_is_cancelled_after_its_beginning_was_sent_leaves_nothing(
    at: Bench, shop: Session, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await chain.begin(nothing)
    wait = PoolConnection.wait

    async def cancel_meanwhile(conn: PoolConnection, *args: Any, **options: Any) -> Any:
        answer = await wait(conn, *args, **options)
        if chain.together:
            at.stop(two, Cause.CANCELLED)
            monkeypatch.setattr(PoolConnection, "wait", wait)
        return answer

    monkeypatch.setattr(PoolConnection, "wait", cancel_meanwhile)
    chain.goes_on.set()
    await at.end()
    assert one.job_id not in at.outcomes
    assert isinstance(at.outcomes[two.job_id], Cancelled)
    assert await notes(shop) == [("a", "first")]
    assert (chain.seen, at.database.free_for_jobs, at.database.waiting) == ([], 1, 0)
    assert await at.run("second", tenant="c") is None
    assert chain.seen == [("c", "c")]


async def test_a_transaction_that_had_begun_for_a_job_that_is_cancelled_as_it_gets_it_is_nobody_else_s(
    at: Bench, shop: Session, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third one waits, and must not go on in it: what is set there is the second's."""
    one, two = await chain.begin(nothing)
    guest: Any = at.database._shares._waiting["job"][0].guest
    object.__setattr__(guest._identity, "settings", {**guest._identity.settings, "app.region": "north"})
    found: list[object] = []

    async def third(tx: JobTransaction) -> None:
        found.append(await tx.fetch_value("SELECT current_setting('app.region', true)"))

    at.tasks.task(name="third")(third)
    three = await at.start("third", tenant="c")
    await turn_until(lambda: at.database.waiting >= 2)
    take_back = Database.take_back

    async def cancel_at_once(database: Database, conn: PoolConnection) -> None:
        monkeypatch.setattr(Database, "take_back", take_back)
        await take_back(database, conn)
        at.stop(two, Cause.CANCELLED)

    monkeypatch.setattr(Database, "take_back", cancel_at_once)
    chain.goes_on.set()
    await at.end()
    assert chain.together >= 1 and isinstance(at.outcomes[two.job_id], Cancelled)
    assert {one.job_id, three.job_id}.isdisjoint(at.outcomes)
    assert found == [None] and await notes(shop) == [("a", "first")]
    assert (at.database.free_for_jobs, at.database._lent) == (1, {})


async def test_a_job_with_other_settings_than_the_one_before_it_has_its_connection(
    at: Bench, shop: Session, chain: Chain
) -> None:
    """The statement that sets them is another, prepared on the way: nothing that the first one could have deallocated."""
    _, two = await chain.begin(nothing)
    guest: Any = at.database._shares._waiting["job"][0].guest
    object.__setattr__(guest._identity, "settings", {**guest._identity.settings, "app.region": "north"})
    (conn,) = at.database._lent
    chain.goes_on.set()
    await at.end()
    assert two.job_id not in at.outcomes
    assert chain.together == 1 and not conn.closed
    assert guest._conn is conn


async def test_a_connection_that_dies_between_is_the_next_job_s_to_replace(
    at: Bench, shop: Session, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(tx: JobTransaction, _: asyncio.Event) -> None:
        pid = tx.connection.info.backend_pid
        await shop.rows("SELECT pg_terminate_backend(%s)", pid)
        await until(shop, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", pid)

    one, two = await chain.begin(die)
    chain.goes_on.set()
    await at.end()
    assert isinstance(at.outcomes[one.job_id], Failed)
    assert two.job_id not in at.outcomes
    assert await notes(shop) == [("b", "second")]


async def test_a_job_whose_beginning_is_refused_fails_alone(at: Bench, shop: Session, chain: Chain) -> None:
    """Its role cannot be had; the one before it is committed by then."""
    one, two = await chain.begin(nothing)
    # What the second job is about to send is wrong.
    (waiting,) = at.database._shares._waiting["job"]
    guest: Any = waiting.guest
    object.__setattr__(guest._identity, "role", "nobody_of_that_name")
    chain.goes_on.set()
    await at.end()
    assert one.job_id not in at.outcomes
    found = at.outcomes[two.job_id]
    assert isinstance(found, Failed) and found.reason is Reason.ERROR
    assert "nobody_of_that_name" in found.error.message
    assert await notes(shop) == [("a", "first")]


# -- a trip by itself ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def conn(worker_dsn: str) -> Any:
    # What a test leaves under way ends by itself: it would hold the horizon of the tests to come.
    options = "-c statement_timeout=5s"
    made = await PoolConnection.connect(worker_dsn, autocommit=True, prepare_threshold=1, options=options)
    yield made
    await made.close()


async def test_answers_come_in_order_and_end_with_the_first_error(conn: PoolConnection) -> None:
    trip = Trip(conn)
    trip.add(b"BEGIN")
    assert trip.add(b"SELECT $1::int + $2", (1, 2), prepare=True) == 1
    trip.add(b"SELECT 1 / $1::int", (0,), prepare=True)
    trip.add(b"SELECT 1")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await trip.run(10)
    assert [ExecStatus(answer.status).name for answer in trip.answers] == ["COMMAND_OK", "TUPLES_OK"]
    assert trip.answers[1].get_value(0, 0) == b"3"
    assert conn.pgconn.pipeline_status == PipelineStatus.OFF
    assert conn.info.transaction_status == TransactionStatus.INERROR
    await conn.rollback()


async def test_what_is_prepared_stands_among_psycopg_s_own_and_goes_with_it(conn: PoolConnection) -> None:
    async def prepared() -> int:
        row = await (await conn.execute("SELECT count(*) FROM pg_prepared_statements", prepare=False)).fetchone()
        assert row is not None
        return int(row[0])

    async def ask() -> None:
        trip = Trip(conn)
        trip.add(b"SELECT $1::int", (1,), prepare=True)
        await trip.run(10)

    for _ in range(3):
        await ask()
        assert await prepared() == len(conn._prepared._names) == 1
    await conn.execute("DEALLOCATE ALL")
    assert await prepared() == len(conn._prepared._names) == 0
    await ask()
    conn.prepared_max = 1  # another one drives it out
    for _ in range(3):
        await conn.execute("SELECT 'another'")
    await ask()
    await prepared()
    assert await prepared() == len(conn._prepared._names) == 1


async def test_a_server_that_hangs_costs_the_connection(conn: PoolConnection) -> None:
    trip = Trip(conn)
    trip.add(b"SELECT pg_sleep(1000)")
    with pytest.raises(psycopg.OperationalError):
        await trip.run(0.05)
    assert conn.closed


async def test_an_answer_that_lies_ready_when_something_has_blocked_the_loop_costs_nothing(conn: PoolConnection) -> None:
    trip = Trip(conn)
    trip.add(b"SELECT 1")
    under_way = asyncio.create_task(trip.run(0.01))
    await asyncio.sleep(0)  # it is sent
    select.select([conn.fileno()], [], [], PATIENCE)  # this is what blocks
    time.sleep(0.3)  # noqa: ASYNC251 - its time is over, for longer than a busy loop takes to look
    (answer,) = await under_way
    assert answer.get_value(0, 0) == b"1"
    assert await (await conn.execute("SELECT 2")).fetchone() == (2,)


def ended(pid: int) -> bool:
    """Whether a process of the server is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_server_that_ends_the_connection_while_something_blocks_the_loop_is_asked_why(conn: PoolConnection) -> None:
    trip = Trip(conn)
    trip.add(b"BEGIN")
    trip.add(b"SET LOCAL idle_in_transaction_session_timeout = 50")
    under_way = asyncio.create_task(trip.run(10))
    await asyncio.sleep(0)  # it is sent
    with ThreadPoolExecutor(1) as thread:  # its result blocks; meanwhile its answers come, and the end of the connection
        thread.submit(wait_until_true, partial(ended, conn.info.backend_pid)).result()
    await under_way
    with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
        await conn.execute("SELECT 1")


async def test_a_cancelled_trip_ends_its_statement_and_the_pipeline(conn: PoolConnection) -> None:
    trip = Trip(conn)
    trip.add(b"SELECT pg_sleep(1000)")
    task = asyncio.create_task(trip.run(60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert conn.closed or conn.pgconn.pipeline_status == PipelineStatus.OFF


async def test_what_was_sent_along_and_is_refused_at_its_commit_was_not_sent(conn: PoolConnection) -> None:
    await conn.execute("CREATE TEMP TABLE child (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    for values in (b"(1), (1)", b"(2)"):
        along = Trip(conn)
        along.add(b"INSERT INTO child VALUES " + values)
        trip = Trip(conn, then=along)
        trip.add(b"SELECT 1")
        (answer,) = await trip.run(10)
        assert answer.get_value(0, 0) == b"1"
        assert len(along.answers) == 1
        assert along.was_sent is (values == b"(2)")
    assert await (await conn.execute("SELECT id FROM child")).fetchall() == [(2,)]
