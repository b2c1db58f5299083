"""Hints: few notifications for many hints, none before the end of the caller's transaction, and no lasting failure."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue import wakeup
from aioqueue.callers.transactions import SeenByStatus
from aioqueue.database import Database
from aioqueue.events import Observers
from aioqueue.job import new_job_id
from aioqueue.listen import Kind, Listener
from aioqueue.settings import PoolSettings
from aioqueue.store import Store
from aioqueue.wakeup import Notifier
from tests import postgres
from tests.kit import PATIENCE
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


class WatchedStore(Store):
    """The real store; counts what is sent and asked, and fails as often as it is told to."""

    def __init__(self, schema: str) -> None:
        super().__init__(schema)
        self.sent: list[str] = []
        self.questions = 0
        self.failures: list[Exception] = []
        self.asked = asyncio.Event()

    async def notify(self, conn: AsyncConnection[Any], kind: str) -> None:
        self.sent.append(kind)
        if self.failures:
            raise self.failures.pop()
        await super().notify(conn, kind)

    async def ended_transactions(self, conn: AsyncConnection[Any], xids: Sequence[int]) -> set[int]:
        ended = await super().ended_transactions(conn, xids)
        self.questions += 1
        self.asked.set()
        return ended

    async def wait_questions(self, number: int) -> None:
        """Wait until the server has been asked so often whether transactions have ended."""
        while self.questions < number:
            self.asked.clear()
            await self.asked.wait()


class Ears:
    """What another process hears."""

    def __init__(self) -> None:
        self.heard = {"ready": 0, "done": 0}
        self._event = asyncio.Event()

    def ready(self) -> None:
        self.heard["ready"] += 1
        self._event.set()

    def done(self) -> None:
        self.heard["done"] += 1
        self._event.set()

    async def wait(self, kind: str, number: int) -> None:
        while self.heard[kind] < number:
            self._event.clear()
            await self._event.wait()


class Process:
    """A notifier that runs, and what another process hears of it."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.database = Database(dsn, PoolSettings())
        self.store = WatchedStore(schema)
        self.notifier = Notifier(self.database, self.store)
        self.ears = Ears()
        self.listener = Listener(self.database.connect, schema=schema, observers=Observers(), notify=self._notify)

    async def _notify(self, name: str) -> None:
        async with self.database.for_caller() as conn:
            await conn.execute("SELECT pg_notify(%s, '')", (name,))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.listener.subscribe("ready", self.ears.ready)
        self.listener.subscribe("done", self.ears.done)
        await self.database.open()
        tasks = [asyncio.create_task(loop.run()) for loop in (self.listener, self.notifier)]
        try:
            await self.ears.wait("ready", 1)
            await self.ears.wait("done", 1)
            self.ears.heard.update(ready=0, done=0)
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await self.database.close()
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


@pytest.fixture
async def process(worker_dsn: str, schema: str) -> AsyncIterator[Process]:
    process = Process(worker_dsn, schema)
    async with process.running():
        yield process


@pytest.fixture
async def caller(worker_dsn: str, schema: str) -> AsyncIterator[Session]:
    """The application's own connection."""
    async with await AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
        yield Session(conn, Store(schema))


async def enqueue(process: Process, caller: Session, number: int = 1) -> list[Any]:
    """Begin a transaction, enqueue in it, and watch it."""
    await caller.begin()
    job_ids = await caller.enqueue(number)
    xid = int(await caller.value("SELECT pg_catalog.pg_current_xact_id()::text"))
    process.notifier.watch(SeenByStatus(caller.conn), xid, job_ids)
    return job_ids


async def test_ten_thousand_hints_are_one_notification(process: Process) -> None:
    for _ in range(10_000):
        process.notifier.hint("ready")
    await process.ears.wait("ready", 1)
    process.notifier.hint("ready")
    process.notifier.hint("done")
    await process.ears.wait("ready", 2)
    await process.ears.wait("done", 1)
    assert process.ears.heard == {"ready": 2, "done": 1}
    assert process.store.sent == ["ready", "done", "ready"]


async def test_who_takes_a_hint_that_waits_sends_it_or_gives_it_back(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing awaits here between the first hint and the last take: the timer comes too late."""
    monkeypatch.setattr(wakeup, "CARRY", 0.0)
    kinds: list[Kind] = ["ready", "done"]
    for kind in kinds:
        process.notifier.hint(kind)
        assert process.notifier.take("ready") is (kind == "ready"), "what others have to say is the timer's"
    await process.ears.wait("done", 1)
    assert process.store.sent == ["done"]
    process.notifier.hint("ready")
    assert process.notifier.take("ready")
    process.notifier.hint("ready")
    await process.ears.wait("ready", 1)
    monkeypatch.setattr(wakeup, "CARRY", 60.0)
    assert not process.notifier.take("ready"), "one was sent just now"


async def test_who_takes_a_hint_while_the_timer_pauses_begins_the_pause_anew(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = Notifier(process.database, process.store)
    monkeypatch.setattr(wakeup, "CARRY", 0.0)
    notifier.hint("ready")
    assert notifier.take("ready")
    taken: list[float] = []

    async def no_pause(_: float) -> None:
        if not taken:
            assert notifier.take("ready")
            taken.append(time.monotonic())
            notifier.hint("ready")

    notifier.hint("ready")
    monkeypatch.setattr(asyncio, "sleep", no_pause)
    await notifier._wait()
    monkeypatch.undo()
    assert taken and (notifier._pause_left > 0 or time.monotonic() >= taken[0] + wakeup.DEBOUNCE)
    async with asyncio.timeout(PATIENCE):
        while notifier._pause_left > 0:
            await notifier._wait()


async def test_the_hint_follows_the_commit(process: Process, caller: Session) -> None:
    job_ids = await enqueue(process, caller, 3)
    await process.store.wait_questions(2)
    assert process.store.sent == []
    assert all(process.notifier.uncommitted(job_id) for job_id in job_ids)
    await caller.commit()
    assert not any(process.notifier.uncommitted(job_id) for job_id in job_ids)
    await process.ears.wait("ready", 1)
    assert process.store.sent == ["ready"]
    assert process.notifier._watched == {}
    assert process.notifier._of_job == {}


async def test_a_rollback_ends_the_watch(process: Process, caller: Session) -> None:
    (job_id,) = await enqueue(process, caller)
    await caller.rollback()
    assert not process.notifier.uncommitted(job_id)
    await process.ears.wait("ready", 1)
    assert process.notifier._of_job == {}


async def test_an_aborted_transaction_is_open_until_its_end(process: Process, caller: Session) -> None:
    (job_id,) = await enqueue(process, caller)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await caller.rows("SELECT 1 / 0")
    assert process.notifier.uncommitted(job_id)
    await caller.rollback()
    await process.ears.wait("ready", 1)


async def test_a_commit_followed_at_once_by_the_next_transaction_is_seen(process: Process, caller: Session) -> None:
    (job_id,) = await enqueue(process, caller)
    # One message: the connection is never idle in the eyes of this process.
    await caller.rows("COMMIT; BEGIN; SELECT 1")
    await process.ears.wait("ready", 1)
    assert not process.notifier.uncommitted(job_id)
    assert process.notifier._watched == {}


async def test_the_next_enqueue_on_the_connection_ends_the_watch_before(process: Process, caller: Session) -> None:
    (first,) = await enqueue(process, caller)
    await caller.rows("COMMIT; BEGIN; SELECT 1")
    (second,) = await caller.enqueue()
    xid = int(await caller.value("SELECT pg_catalog.pg_current_xact_id()::text"))
    process.notifier.watch(SeenByStatus(caller.conn), xid, [second])
    assert not process.notifier.uncommitted(first)
    assert process.notifier.uncommitted(second)
    await process.ears.wait("ready", 1)
    await caller.commit()
    await process.ears.wait("ready", 2)


async def test_several_enqueues_of_one_transaction_are_one_watch(process: Process, caller: Session) -> None:
    (first,) = await enqueue(process, caller)
    (second,) = await caller.enqueue()
    xid = int(await caller.value("SELECT pg_catalog.pg_current_xact_id()::text"))
    process.notifier.watch(SeenByStatus(caller.conn), xid, [second])
    assert len(process.notifier._watched) == 1
    assert process.notifier.uncommitted(first)
    assert process.notifier.uncommitted(second)
    await caller.commit()
    await process.ears.wait("ready", 1)
    assert process.notifier._of_job == {}


async def test_transactions_of_many_connections_end_each_on_its_own(process: Process, caller: Session, worker_dsn: str) -> None:
    async with await AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
        another = Session(conn, caller.store)
        (first,) = await enqueue(process, caller)
        (second,) = await enqueue(process, another)
        await caller.rows("COMMIT; BEGIN; SELECT 1")
        await process.ears.wait("ready", 1)
        assert not process.notifier.uncommitted(first)
        assert process.notifier.uncommitted(second)
        await another.commit()
        await process.ears.wait("ready", 2)


async def test_a_statement_of_its_own_is_hinted_at_once(process: Process, caller: Session) -> None:
    (job_id,) = await caller.enqueue()
    process.notifier.watch(SeenByStatus(caller.conn), 1, [job_id])
    assert not process.notifier.uncommitted(job_id)
    await process.ears.wait("ready", 1)


async def test_a_closed_connection_ends_the_watch(process: Process, worker_dsn: str, caller: Session) -> None:
    conn = await AsyncConnection.connect(worker_dsn, autocommit=True)
    (job_id,) = await enqueue(process, Session(conn, caller.store))
    assert process.notifier.uncommitted(job_id)
    await conn.close()
    assert not process.notifier.uncommitted(job_id)
    await process.ears.wait("ready", 1)
    assert process.notifier._watched == {}


async def test_a_connection_that_the_server_ended_ends_the_watch(
    process: Process, database: postgres.Database, worker_dsn: str, caller: Session
) -> None:
    conn = await AsyncConnection.connect(worker_dsn, autocommit=True)
    try:
        (job_id,) = await enqueue(process, Session(conn, caller.store))
        async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as boss:
            await boss.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
        # Nobody has used the connection since: only the server knows.
        await process.ears.wait("ready", 1)
        assert not process.notifier.uncommitted(job_id)
    finally:
        await conn.close()


async def test_a_connection_that_is_garbage_is_not_kept_alive(process: Process, worker_dsn: str, caller: Session) -> None:
    conn = await AsyncConnection.connect(worker_dsn, autocommit=True)
    (job_id,) = await enqueue(process, Session(conn, caller.store))
    with pytest.warns(ResourceWarning):
        del conn
        gc.collect()
    assert not process.notifier.uncommitted(job_id)
    await process.ears.wait("ready", 1)
    assert process.notifier._watched == {}
    assert process.notifier._of_job == {}


async def test_a_connection_that_is_gone_before_its_transaction_is_watched_is_hinted_at_once(
    process: Process, worker_dsn: str, caller: Session
) -> None:
    """As when another thread's loop has enqueued and closed it while this one was busy."""
    conn = await AsyncConnection.connect(worker_dsn, autocommit=True)
    (job_id,) = await Session(conn, caller.store).enqueue()
    transaction = SeenByStatus(conn)
    await conn.close()
    del conn
    gc.collect()
    process.notifier.watch(transaction, 1, [job_id])
    assert not process.notifier.uncommitted(job_id)
    await process.ears.wait("ready", 1)
    assert process.notifier._watched == {}


async def test_a_transaction_of_another_server_is_no_error(process: Process, caller: Session) -> None:
    await caller.begin()
    process.notifier.watch(SeenByStatus(caller.conn), 2**40, [new_job_id()])
    await process.store.wait_questions(2)
    await caller.commit()
    await process.ears.wait("ready", 1)


async def test_watches_of_a_notifier_that_does_not_run_do_not_pile_up(worker_dsn: str, schema: str) -> None:
    process = Process(worker_dsn, schema)
    for _ in range(5):
        async with await AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
            await enqueue(process, Session(conn, process.store))
        assert len(process.notifier._watched) == 1


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("connection lost"),
        psycopg.errors.ReadOnlySqlTransaction("cannot execute NOTIFY during recovery"),
        psycopg.errors.InsufficientPrivilege("no"),
        ConnectionResetError(),
    ],
)
async def test_a_hint_that_failed_is_sent_later(process: Process, error: Exception) -> None:
    process.store.failures = [error, error]
    process.notifier.hint("done")
    await process.ears.wait("done", 1)
    assert process.store.sent == ["done"] * 3


async def test_hints_go_on_after_the_loss_of_all_connections(process: Process, database: postgres.Database) -> None:
    async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as boss:
        for number in range(1, 6):
            await boss.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE usename = 'aioqueue_worker' AND query NOT LIKE 'LISTEN%'"
            )
            process.notifier.hint("ready")
            await process.ears.wait("ready", number)
