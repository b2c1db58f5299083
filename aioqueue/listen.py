"""The one listening session of a process: LISTEN, callbacks without data, reconnecting for ever.

The connection is private to `Listener.run`, which talks to libpq without blocking, so that cancelling it is
prompt also against a server that hangs. A notification is a hint only: nothing may depend on its arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol, get_args

import psycopg
from psycopg import AsyncConnection, pq

from .events import DatabaseLost, DatabaseRecovered, ListenerConnected, Observers, logger
from .sql import quote_schema

Kind = Literal["ready", "done", "progress"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Callback = Callable[[], None]

SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between attempts to connect; doubling, jittered."""
PROBE_INTERVAL = 10.0
"""Seconds of silence after which the session is asked for a sign of life, and notified: some proxies never send a reset."""
ANSWER_TIMEOUT = 5.0
"""Seconds that an answer may take before the session counts as lost."""


class Hints(Protocol):
    """Sends hints to whoever listens, in this process and others: the notifier."""

    def hint(self, kind: Kind) -> None:
        """Send one soon; returns at once."""
        ...

    def take(self, kind: Kind) -> bool:
        """Whether such a hint is due: then whoever asks sends it, in a round trip that he has to make anyway."""
        ...


def channel(schema: str, kind: Kind) -> str:
    """Return the channel's name, as sql/functions/notify.sql makes it; it needs no quoting."""
    digest = hashlib.md5(f"{quote_schema(schema)}.".encode(), usedforsecurity=False).hexdigest()
    return f"aioqueue_{digest[:16]}_{kind}"


class Listener:
    """Calls back whenever a hint may have come: on a notification, and once after every (re)connection.

    Callbacks run on the event loop and must not block. Everything is to be called from the loop's thread.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[AsyncConnection[Any]]],
        *,
        schema: str,
        observers: Observers,
        notify: Callable[[str], Awaitable[object]],
    ) -> None:
        """`notify` sends a notification to a channel from another connection, within about ANSWER_TIMEOUT."""
        self._connect = connect
        self._notify = notify
        self._own = f"aioqueue_probe_{secrets.token_hex(8)}"
        self._heard_own = False
        self._hears = False
        """Whether LISTEN has been in force for something."""
        self._watched: int | None = None
        """The socket that the event loop tells of; None: it does not, since libpq may have closed it."""
        self._observers = observers
        self._channels: dict[Kind, str] = {kind: channel(schema, kind) for kind in KINDS}
        self._callbacks: dict[Kind, list[Callback]] = {kind: [] for kind in KINDS}
        self._event = asyncio.Event()  # something to read, or subscriptions have changed
        self._lost: float | None = None  # since when, by the monotonic clock
        self.connected = False
        """Whether LISTEN is in force for all subscriptions but the newest."""

    def subscribe(self, kind: Kind, callback: Callback) -> None:
        """Call `callback` on every hint of that kind, and once as soon as LISTEN is in force."""
        self._callbacks[kind].append(callback)
        self._event.set()

    def unsubscribe(self, kind: Kind, callback: Callback) -> None:
        """Undo one `subscribe`; an unknown callback is ignored."""
        if callback in self._callbacks[kind]:
            self._callbacks[kind].remove(callback)
            self._event.set()

    async def run(self) -> None:
        """Listen for ever, until cancelled; emit ListenerConnected, DatabaseLost and DatabaseRecovered, once per change."""
        pause = SHORTEST_PAUSE
        while True:
            try:
                conn = await self._connect()
                try:
                    await self._serve(conn)
                finally:
                    await conn.close()
            except (psycopg.Error, OSError) as error:
                if self.connected:
                    pause = SHORTEST_PAUSE
                if self._lost is None:
                    self._lost = time.monotonic()
                    self._observers.emit(DatabaseLost("listener", f"{type(error).__name__}: {error}".strip()))
            finally:
                self.connected = False
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _serve(self, conn: AsyncConnection[Any]) -> None:
        loop = asyncio.get_running_loop()
        self._watched = conn.fileno()
        loop.add_reader(self._watched, self._on_readable, loop, conn.pgconn)
        try:
            listening: set[Kind] = set()
            await self._probe(conn.pgconn)
            await self._ask(conn.pgconn, f"LISTEN {self._own}")
            await self._probe_delivery(conn.pgconn)
            while True:
                # Nothing may wait between here and the wait below unless the loop then begins anew.
                self._event.clear()
                wanted: set[Kind] = {kind for kind, callbacks in self._callbacks.items() if callbacks}
                if wanted != listening:
                    await self._change(conn, listening, wanted)
                    listening = wanted
                    continue
                if not self.connected:
                    self.connected = True
                    if self._lost is not None:
                        self._observers.emit(DatabaseRecovered("listener", time.monotonic() - self._lost))
                        self._lost = None
                    self._observers.emit(ListenerConnected())
                self._hear(conn.pgconn)
                self._hears = True
                try:
                    async with asyncio.timeout(PROBE_INTERVAL):
                        await self._event.wait()
                except TimeoutError:
                    await self._probe(conn.pgconn)
                    await self._probe_delivery(conn.pgconn)
        finally:
            self._hears = False
            # Before the connection is closed: its number may be another socket's at once.
            self._unwatch(loop)

    async def _change(self, conn: AsyncConnection[Any], listening: set[Kind], wanted: set[Kind]) -> None:
        for kind in sorted(listening - wanted):
            await self._ask(conn.pgconn, f"UNLISTEN {self._channels[kind]}")
        for kind in sorted(wanted - listening):
            await self._ask(conn.pgconn, f"LISTEN {self._channels[kind]}")
            # Catch up: what came before LISTEN was in force has made no notification.
            self._call(kind)

    async def _probe(self, pgconn: pq.abc.PGconn) -> None:
        """Ask for a sign of life. Where nothing can be written nobody notifies: it is the wrong server after a failover."""
        if await self._ask(pgconn, "SHOW transaction_read_only") != b"off":
            raise psycopg.OperationalError("the server is read-only")

    async def _probe_delivery(self, pgconn: pq.abc.PGconn) -> None:
        """Have another connection notify us. A session that answers may hear nothing: a pooler's, another database's."""
        self._heard_own = False
        try:
            await self._notify(self._own)
        except psycopg.Error:
            return  # it could not be sent, which says nothing of this session
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT):
                while True:
                    self._event.clear()
                    self._hear(pgconn)
                    if self._heard_own:
                        return
                    await self._event.wait()
        raise psycopg.OperationalError("the session answers, but notifications of another connection do not arrive")

    async def _ask(self, pgconn: pq.abc.PGconn, statement: str) -> bytes | None:
        """Run a statement; the first value of its last row, if any."""
        # Not by AsyncConnection.execute(): cancelled against a hung server, that waits up to 10 s.
        pgconn.send_query(statement.encode())
        value: bytes | None = None
        async with asyncio.timeout(ANSWER_TIMEOUT):
            while True:
                self._event.clear()
                pgconn.flush()
                pgconn.consume_input()
                while not pgconn.is_busy():
                    result = pgconn.get_result()
                    if result is None:
                        return value
                    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
                        raise psycopg.OperationalError(f"{statement}: {result.get_error_message()}")
                    if result.ntuples:
                        value = result.get_value(result.ntuples - 1, 0)
                await self._event.wait()

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        descriptor, self._watched = self._watched, None
        if descriptor is not None:
            loop.remove_reader(descriptor)

    def _on_readable(self, loop: asyncio.AbstractEventLoop, pgconn: pq.abc.PGconn) -> None:
        self._event.set()
        if self._hears:
            # At once, and not when the loop above has its turn: an idle worker's job waits for it.
            with contextlib.suppress(psycopg.Error):  # which finds the same, and connects anew
                self._hear(pgconn)
            if pgconn.status != pq.ConnStatus.OK:
                self._unwatch(loop)  # its socket is closed, and another may have its number before that has its turn

    def _hear(self, pgconn: pq.abc.PGconn) -> None:
        pgconn.consume_input()
        heard: set[bytes] = set()
        while (notify := pgconn.notifies()) is not None:
            heard.add(notify.relname)
        self._heard_own = self._heard_own or self._own.encode() in heard
        for kind, name in self._channels.items():
            if name.encode() in heard:
                self._call(kind)

    def _call(self, kind: Kind) -> None:
        for callback in list(self._callbacks[kind]):
            try:
                callback()
            except Exception:
                logger.exception("callback %r of the listener failed", callback)
