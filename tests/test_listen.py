"""The listener: every hint is heard, every loss is mended and caught up, and stopping leaves nothing behind."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, pq
from psycopg.conninfo import make_conninfo

from aioqueue import listen
from aioqueue.connector import connection_string
from aioqueue.events import DatabaseLost, DatabaseRecovered, Event, ListenerConnected, Observers
from aioqueue.listen import Kind, Listener, channel
from aioqueue.store import Store
from tests.kit import PATIENCE, turn_until, until
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

NAME = "the listener"


class Heard:
    """A callback that counts; `wait` waits until it has been called so often."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._event.set()

    async def wait(self, number: int) -> None:
        while self.count < number:
            self._event.clear()
            await self._event.wait()


class Sessions:
    """Opens the listener's connections and keeps them for the test to look at."""

    def __init__(self, dsn: str) -> None:
        self.conninfo = make_conninfo(connection_string(dsn), application_name=NAME)
        self.all: list[AsyncConnection[Any]] = []
        self._opened = asyncio.Event()

    async def connect(self) -> AsyncConnection[Any]:
        conn = await AsyncConnection.connect(self.conninfo, autocommit=True)
        self.all.append(conn)
        self._opened.set()
        return conn

    async def wait(self, number: int) -> None:
        """Wait until so many connections have been opened."""
        while len(self.all) < number:
            self._opened.clear()
            await self._opened.wait()

    @property
    def pid(self) -> int:
        return self.all[-1].info.backend_pid


@asynccontextmanager
async def running(listener: Listener) -> "AsyncIterator[asyncio.Task[None]]":
    task = asyncio.create_task(listener.run())
    try:
        yield task
    finally:
        task.cancel()
        (end,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(end, asyncio.CancelledError), end


@pytest.fixture
def sessions(worker_dsn: str) -> Sessions:
    return Sessions(worker_dsn)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def observers(events: list[Event]) -> Observers:
    return Observers([events.append])


@pytest.fixture
async def boss(database: Database, schema: str) -> AsyncIterator[Session]:
    """A superuser's session, which may look at and end the listener's."""
    async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as conn:
        yield Session(conn, Store(schema))


def notified(boss: Session) -> Callable[[str], Awaitable[object]]:
    """Notifies from the superuser's session."""
    return lambda name: boss.rows("SELECT pg_notify(%s, '')", name)


NONE_LISTENS = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = %s)"


async def listening(boss: Session) -> int:
    return int(await boss.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", NAME))


async def test_each_kind_is_heard_by_its_own_callbacks(sessions: Sessions, observers: Observers, boss: Session) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    ready, also_ready, done = Heard(), Heard(), Heard()
    listener.subscribe("ready", ready)
    listener.subscribe("ready", also_ready)
    listener.subscribe("done", done)
    async with running(listener):
        for heard in (ready, also_ready, done):
            await heard.wait(1)  # once when LISTEN is in force
        await boss.store.notify(boss.conn, "ready")
        await ready.wait(2)
        await also_ready.wait(2)
        await boss.store.notify(boss.conn, "done")
        await done.wait(2)
        assert (ready.count, also_ready.count, done.count) == (2, 2, 2)


async def test_the_channel_carries_the_schema(boss: Session) -> None:
    await boss.rows(f"LISTEN {channel(boss.store.schema, 'done')}")
    await boss.store.notify(boss.conn, "done")
    heard = [notify async for notify in boss.conn.notifies(timeout=10, stop_after=1)]
    assert [(notify.channel, notify.payload) for notify in heard] == [(channel(boss.store.schema, "done"), "")]
    names = {channel(schema, kind) for schema in ("aioqueue", "Aioqueue", "other") for kind in ("ready", "done")}
    assert len(names) == 6
    assert all(len(name) <= 63 for name in (channel("ü" * 31, "ready"), *names))


async def test_a_channel_is_added_and_removed_while_idle(sessions: Sessions, observers: Observers, boss: Session) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    ready, done = Heard(), Heard()
    listener.subscribe("ready", ready)
    async with running(listener):
        await ready.wait(1)
        listener.subscribe("done", done)
        await done.wait(1)
        await boss.store.notify(boss.conn, "done")
        await done.wait(2)
        listener.unsubscribe("done", done)
        listener.unsubscribe("done", done)
        await boss.store.notify(boss.conn, "done")
        await boss.store.notify(boss.conn, "ready")
        await ready.wait(2)
        assert done.count == 2
        assert len(sessions.all) == 1


async def test_a_subscription_before_any_other_makes_the_first_channel(
    sessions: Sessions, observers: Observers, boss: Session
) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    connected, done = Heard(), Heard()
    observers.add(lambda _: connected())
    async with running(listener):
        await connected.wait(1)
        listener.subscribe("done", done)
        await done.wait(1)


async def test_fifty_lost_sessions_are_each_replaced_and_caught_up(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session
) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    ready, done = Heard(), Heard()
    listener.subscribe("ready", ready)
    listener.subscribe("done", done)
    async with running(listener):
        await ready.wait(1)
        await done.wait(1)
        for round_ in range(2, 52):
            await boss.rows("SELECT pg_terminate_backend(%s)", sessions.pid)
            await ready.wait(round_)
            await done.wait(round_)
            assert await listening(boss) <= 2
        await boss.store.notify(boss.conn, "ready")
        await ready.wait(52)
        for conn in sessions.all[:-1]:
            assert conn.closed
        assert listener.connected
    await until(boss, NONE_LISTENS, NAME)
    assert [type(event) for event in events] == [ListenerConnected, *[DatabaseLost, DatabaseRecovered, ListenerConnected] * 50]
    assert all(event.loop == "listener" for event in events if isinstance(event, DatabaseLost | DatabaseRecovered))


async def test_the_number_of_a_lost_session_is_free_at_once(sessions: Sessions, observers: Observers, boss: Session) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    ready = Heard()
    listener.subscribe("ready", ready)
    loop = asyncio.get_running_loop()
    async with running(listener):
        await ready.wait(1)
        await boss.store.notify(boss.conn, "ready")
        await ready.wait(2)
        (lost,) = sessions.all
        number = lost.fileno()
        await boss.rows("SELECT pg_terminate_backend(%s)", lost.info.backend_pid)
        await turn_until(lambda: lost.pgconn.status != pq.ConnStatus.OK)
        # libpq has closed the socket: the next one has its number, and is told to the loop before the listener has its turn.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            here, there = (one, other) if one.fileno() == number else (other, one)
            assert here.fileno() == number
            here.bind("")
            heard = asyncio.Event()
            loop.add_reader(number, heard.set)
            await ready.wait(3)
            there.sendto(b"!", here.getsockname())
            async with asyncio.timeout(PATIENCE):
                await heard.wait()
            loop.remove_reader(number)


async def test_two_hundred_starts_and_stops_leave_no_session_and_no_task(
    sessions: Sessions, observers: Observers, boss: Session
) -> None:
    tasks = asyncio.all_tasks()
    for _ in range(200):
        listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
        done = Heard()
        listener.subscribe("done", done)
        async with running(listener):
            await done.wait(1)
        assert not listener.connected
        assert sessions.all[-1].closed
    assert asyncio.all_tasks() == tasks
    await until(boss, NONE_LISTENS, NAME)


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """A server process that hangs: its socket is open and nothing ever comes."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_stopping_waits_for_no_server(sessions: Sessions, observers: Observers, boss: Session) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    done = Heard()
    listener.subscribe("done", done)
    task = asyncio.create_task(listener.run())
    await done.wait(1)
    async with stopped(sessions.pid):
        # It is in the midst of a question that gets no answer.
        listener.unsubscribe("done", done)
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert task.cancelled()
        assert sessions.all[-1].closed


async def test_a_session_that_hangs_is_found_and_replaced(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "PROBE_INTERVAL", 0.05)
    monkeypatch.setattr(listen, "ANSWER_TIMEOUT", 1.0)
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    done = Heard()
    listener.subscribe("done", done)
    async with running(listener):
        await done.wait(1)
        async with stopped(sessions.pid):
            await done.wait(2)
        assert len(sessions.all) >= 2
        assert any(isinstance(event, DatabaseLost) for event in events)


async def test_a_session_that_answers_its_probes_stays(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "PROBE_INTERVAL", 0.001)
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    done = Heard()
    listener.subscribe("done", done)
    async with running(listener):
        await done.wait(1)
        question = "SELECT query FROM pg_stat_activity WHERE pid = %s"
        while (await boss.value(question, sessions.pid)).startswith("LISTEN "):
            pass
        # Hints that come together with an answer are heard too.
        for number in range(2, 30):
            await boss.store.notify(boss.conn, "done")
            await done.wait(number)
        assert len(sessions.all) == 1
        assert events == [ListenerConnected()]


class Refusals:
    """A server that refuses the first connections."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection[Any]]], number: int) -> None:
        self.connect = connect
        self.left = number
        self.times: list[float] = []

    async def __call__(self) -> AsyncConnection[Any]:
        self.times.append(time.monotonic())
        if self.left:
            self.left -= 1
            raise psycopg.OperationalError("connection refused")
        return await self.connect()


async def test_an_outage_is_said_once_and_pauses_grow(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session
) -> None:
    refusals = Refusals(sessions.connect, 4)
    listener = Listener(refusals, schema=boss.store.schema, observers=observers, notify=notified(boss))
    done = Heard()
    listener.subscribe("done", done)
    async with running(listener):
        await done.wait(1)
    assert [type(event) for event in events] == [DatabaseLost, DatabaseRecovered, ListenerConnected]
    gaps = [later - sooner for sooner, later in pairwise(refusals.times)]
    for number, gap in enumerate(gaps):
        assert gap >= listen.SHORTEST_PAUSE * 2**number / 2 - 0.002


async def test_a_refused_listen_is_an_outage(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    monkeypatch.setitem(listener._channels, "done", "not a name")
    done = Heard()
    listener.subscribe("done", done)
    async with running(listener):
        await sessions.wait(3)
        assert not listener.connected
        assert done.count == 0
    (lost,) = events
    assert isinstance(lost, DatabaseLost)
    assert "syntax error" in lost.error
    assert all(conn.closed for conn in sessions.all)


async def test_a_callback_that_fails_harms_no_other(
    sessions: Sessions, observers: Observers, boss: Session, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("broken callback")

    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
    done = Heard()
    kind: Kind = "done"
    listener.subscribe(kind, broken)
    listener.subscribe(kind, done)
    async with running(listener):
        await done.wait(1)
        await boss.store.notify(boss.conn, kind)
        await done.wait(2)
    assert "broken callback" in caplog.text


async def test_a_connection_attempt_is_cancelled_at_once(database: Database, observers: Observers, boss: Session) -> None:
    # A server that takes connections and never says a word.
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        arrived.set()
        writer.close()

    arrived, asked = asyncio.Event(), asyncio.Event()

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await asyncio.start_server(silent, "127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]

        async def connect() -> AsyncConnection[Any]:
            asked.set()
            return await AsyncConnection.connect(f"host=127.0.0.1 port={port} dbname=x sslmode=disable")

        listener = Listener(connect, schema=boss.store.schema, observers=observers, notify=notified(boss))
        async with running(listener):
            await asked.wait()
        await arrived.wait()  # the socket is closed, or read() would not have ended


async def test_a_session_that_answers_but_hears_nothing_is_given_up_and_said_once(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr(listen, "SHORTEST_PAUSE", 0.01)

    async def lost(_: str) -> None:
        """A notification that does not arrive, as through a pooler in transaction mode."""

    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=lost)
    ready = Heard()
    listener.subscribe("ready", ready)
    async with running(listener):
        await sessions.wait(4)
        assert not listener.connected
    (said,) = events
    assert isinstance(said, DatabaseLost) and "do not arrive" in said.error


@pytest.mark.parametrize("sent", [True, False])
async def test_in_silence_another_connection_notifies_it_and_what_cannot_be_sent_says_nothing(
    sessions: Sessions, observers: Observers, events: list[Event], boss: Session, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    monkeypatch.setattr(listen, "PROBE_INTERVAL", 0.02)
    probed = Heard()

    async def notify(name: str) -> None:
        probed()
        if not sent:
            raise psycopg.OperationalError("no connection is free")
        await notified(boss)(name)

    listener = Listener(sessions.connect, schema=boss.store.schema, observers=observers, notify=notify)
    listener.subscribe("ready", Heard())
    async with running(listener):
        await probed.wait(5)
        assert listener.connected
    assert len(sessions.all) == 1
    assert events == [ListenerConnected()]
