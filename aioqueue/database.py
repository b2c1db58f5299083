"""The one pool of a process, with two connections kept back for the runtime, and a deadline on every call of the runtime.

A deadline shuts the connection's socket, which returns at once also against a server that hangs; cancelling the call would
wait for the server. Finds out whether a pooler stands between; opens no transaction and runs no statement of its own besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from .connector import POOL, POOL_LOGGER, Connector, connection_string
from .errors import AioQueueError, ConfigurationError
from .overdue import Overdue
from .pool_connection import PoolConnection, sever
from .pooler import SharedConnection, refuses_options, through_pooler
from .settings import PoolSettings
from .shares import Shares, Waiting

PASSED_ON = 60.0
"""Seconds for which a connection goes from job to job; then the pool sees it again, which ends it when it is old."""
SOON = 0.25
"""Seconds that a claimed job may have to wait for a connection, as long as the others take what they took lately."""
UNUSED = 10.0
"""Seconds after which the pool closes a connection that nobody needed, one at a time."""
AHEAD = 15
"""Jobs at most that wait for each connection."""
TURN = 0.1
"""Seconds that a look by the clock waits for another one at most."""
RESERVED = 2
"""Connections that are the runtime's; callers get one of them while jobs have all the others."""


@contextlib.asynccontextmanager
async def deadline(conn: AsyncConnection[Any], seconds: float) -> AsyncIterator[None]:
    """Shut the connection if the block takes longer than `seconds`."""
    timer = asyncio.get_running_loop().call_later(seconds, sever, conn)
    try:
        yield
    finally:
        timer.cancel()


def connection_lost(error: BaseException) -> bool:
    """Whether the error says that the connection or the server is gone, rather than that the statement is wrong."""
    if isinstance(error, psycopg.OperationalError):
        state = error.sqlstate
        # 08 connection, 57P0x shutdown, 53300 slots, 25006 read-only (a demoted primary), 28 a changed password, 3D000.
        return state is None or state[:2] in ("08", "28", "53") or state.startswith("57P")
    return isinstance(error, psycopg.errors.ReadOnlySqlTransaction | psycopg.InterfaceError)


Pool = AsyncConnectionPool[PoolConnection]

_lent: Overdue[PoolConnection] = Overdue(sever)
_puts: set[asyncio.Task[None]] = set()
"""Connections on their way into the pool whose user was cancelled."""


class AllInUse(PoolTimeout):
    """Every connection was in use for too long; the server refuses none. To ask again would make it worse."""


class NoFreeConnection(AioQueueError):
    """A job got no connection for its transaction; user code has not begun."""


async def _put(conn: PoolConnection) -> None:
    """Give a job's connection back to its pool, also when that was closed meanwhile; of a job nothing is committed here."""
    conn.stays_watched_by = None
    conn.unwatch()
    if conn.pgconn.transaction_status != TransactionStatus.IDLE:
        await conn.close()
    pool = conn._pool
    if isinstance(pool, AsyncConnectionPool):
        await _put_into(pool, conn)


async def _put_into(pool: Pool, conn: PoolConnection) -> None:
    """Give a connection back, also when whoever does is cancelled as the pool waits for a lock of its own: it would be lost."""
    try:
        await pool.putconn(conn)
    except asyncio.CancelledError:
        conn._pool = pool
        task = asyncio.get_running_loop().create_task(pool.putconn(conn), context=contextvars.Context())
        _puts.add(task)
        task.add_done_callback(_puts.discard)
        raise


class Lent:
    """A connection of the pool for a block, with a share of it for a caller's; see `Database.runtime` and `for_caller`."""

    __slots__ = ("_conn", "_database", "_pool", "_seconds", "_share", "_under_way")

    _conn: PoolConnection
    _pool: Pool
    _under_way: dict[PoolConnection, float]

    def __init__(self, database: Database, seconds: float, *, share: Shares[PoolConnection] | None) -> None:
        self._database = database
        self._seconds = seconds
        self._share = share

    async def __aenter__(self) -> PoolConnection:
        self._pool, self._conn = await self._database.take(self._seconds, self._share)
        self._under_way = _lent.add(self._conn, self._seconds)
        return self._conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        conn = self._conn
        self._under_way.pop(conn, None)
        try:
            if isinstance(error, psycopg.Error) and self._database.lost(error):
                await conn.close()
            # What pool.connection() does, but for a COMMIT of nothing, which costs as much as the rest together.
            if error is not None or conn.pgconn.transaction_status != TransactionStatus.IDLE:
                await conn.__aexit__(kind, error, traceback)
        finally:
            try:
                await _put_into(self._pool, conn)
            finally:
                if self._share is not None:
                    self._share.leave("caller")


class Database:
    """The pool of one app: `runtime()` for a worker's loops, `lend()` for jobs' transactions, `for_caller()` for all else."""

    def __init__(self, dsn: str, settings: PoolSettings, *, listen_dsn: str | None = None) -> None:
        self.settings = settings
        self.conninfo = connection_string(dsn)
        self.pooler = False
        """Whether a pooler stands between; `connect` finds out."""
        self._dsn, self._listen_dsn = dsn, listen_dsn
        self._direct = None if listen_dsn is None else connection_string(listen_dsn)
        self._pool: Pool | None = None
        self._made: weakref.WeakSet[PoolConnection] = weakref.WeakSet()
        """The pool's connections, from when they could be lent."""
        self._shares: Shares[PoolConnection] = Shares(settings.size - RESERVED)
        self._lent: dict[PoolConnection, float] = {}
        """Those that jobs' transactions have, and since when."""
        self._promised: dict[PoolConnection, Waiting[PoolConnection]] = {}
        self._held = 0.0
        """Seconds that a job's transaction has had its connection lately."""
        self.severed_with_jobs: set[Callable[[], None]] = set()
        """Shut the connections of jobs that are no pool's of ours, when the lease is over."""
        self._connector = Connector()
        self.rehearse: Callable[[AsyncConnection[Any]], Awaitable[None]] | None = None
        """What each new connection of ours is made ready with before anybody has it; it raises nothing."""
        self._turn = asyncio.Lock()
        self.losses = 0
        """Calls so far whose connection was lost: after a crash the server may have gone back, without a new start time."""
        self.waiting = 0
        """Jobs that wait for a connection now."""
        self._share = 0.0
        """Which share of the jobs that run has a connection, or waits for one."""

    @property
    def is_open(self) -> bool:
        """Whether the pool is open."""
        return self._pool is not None

    @property
    def of_worker(self) -> int:
        """Connections of the server that a worker's process takes at most: the pool, its listener, its guard.

        Those that lead through a pooler are the pooler's.
        """
        return (0 if self.pooler else self.settings.size) + (2 if self.can_listen else 0)

    @property
    def free_for_jobs(self) -> int:
        """Connections that a job's transaction could have at once."""
        return self._shares.free

    def bounded(self, limit: int, *, busy: int, coming: int) -> int:
        """How many jobs to claim, `limit` at most, so that those of them that take a connection have one soon.

        How many do is taken to be as among the `busy` ones that run. `coming`: jobs that another claim has asked
        for, or that wait for a slot.
        """
        if busy:
            now = min(1.0, self._shares.jobs / busy)
            self._share = max(now, self._share + (now - self._share) / 8)  # it rises at once, and falls by and by
        # While none comes back, what the last one has taken so far counts.
        last = max(self._lent.values(), default=None)
        held = max(self._held, 0.0 if last is None else time.monotonic() - last)
        each = min(AHEAD, SOON / held) if held else AHEAD
        most = int(self._shares.limit * (1 + each))
        room = max(self._shares.free, most - self._shares.jobs - int(coming * self._share))
        if self.waiting and room < most // 4:
            return 0  # a few at a time would cost more than they bring
        return min(limit, int(room / self._share)) if self._share * limit > room else limit

    @property
    def can_listen(self) -> bool:
        """Whether there is a connection on which LISTEN can be in force: a direct one."""
        return self._direct is not None or not self.pooler

    @property
    def listens_apart(self) -> bool:
        """Whether listener and guard have a DSN of their own."""
        return self._direct is not None

    @property
    def own_conninfo(self) -> str:
        """How listener and guard connect, whose connections are their own: directly where that is possible."""
        return self._direct or self.conninfo

    async def open(self) -> None:
        """Open the pool without waiting for the server; through a pooler if `connect` has found one."""
        if self._pool is None:
            prepare = not self.pooler if self.settings.prepare is None else self.settings.prepare
            # reconnect_timeout is short because the pool doubles its pauses up to it; who asks next begins anew.
            pool: Pool = AsyncConnectionPool(
                self.conninfo,
                connection_class=self._connector.connection_class,
                kwargs={"autocommit": True, "prepare_threshold": 1 if prepare else None},
                min_size=self.settings.min_size,
                max_size=self.settings.size,
                timeout=self.settings.acquire_timeout,
                max_idle=UNUSED,
                reconnect_timeout=3.0,
                name=POOL,
                configure=self._configure,
                open=False,
            )
            POOL_LOGGER.addFilter(self._connector.filter)
            await pool.open()
            self._pool = pool

    async def _configure(self, conn: PoolConnection) -> None:
        if self.rehearse is not None and not self.pooler:
            async with deadline(conn, self.settings.deadline):
                await self.rehearse(conn)
        self._made.add(conn)

    async def close(self) -> None:
        """Close the pool; connections in use are closed when they come back."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(timeout=1.0)
            if self._connector.refusal is None:
                POOL_LOGGER.removeFilter(self._connector.filter)  # otherwise a last attempt may still be under way

    def _opened(self) -> Pool:
        if self._pool is None:
            raise ConfigurationError("the pool is not open")
        return self._pool

    def lost(self, error: BaseException) -> bool:
        """Take note of an error of a call; whether it says that the connection is lost."""
        found = connection_lost(error)
        self.losses += found
        return found

    async def take(self, seconds: float, share: Shares[PoolConnection] | None) -> tuple[Pool, PoolConnection]:
        """Take a connection from the pool for `Lent`, within `seconds` and the time that the settings give it."""
        pool, wait = self._opened(), min(seconds, self.settings.acquire_timeout)
        if share is None:
            return pool, await self._get(pool, wait)
        try:
            await share.enter("caller", wait=wait)
        except TimeoutError:
            raise self._timed_out(wait, "other calls and jobs have all there are") from self._connector.refusal
        try:
            return pool, await self._get(pool, wait)
        except BaseException:
            share.leave("caller")
            raise

    async def _get(self, pool: Pool, wait: float) -> PoolConnection:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            conn = await pool.getconn(wait)
        except PoolTimeout:
            raise self._timed_out(wait, "all are in use") from self._connector.refusal
        if task and task.cancelling() > before:
            # The pool waits by wait_for(), which before Python 3.12 swallows a cancellation that comes with the connection.
            await _put(conn)
            raise asyncio.CancelledError
        return conn

    def _timed_out(self, seconds: float, why: str) -> PoolTimeout:
        refusal = self._connector.refusal
        begin = f"no connection to the database within {seconds:g} s: "
        if refusal is not None:
            return PoolTimeout(f"{begin}{refusal}")
        # After an outage the pool opens them after pauses: whoever waits meanwhile waits for the server, not for others.
        opening = sum(not conn.closed for conn in self._made) < self.settings.size
        if opening and self._pool is not None and self._pool.get_stats()["requests_waiting"]:
            return PoolTimeout(f"{begin}not all are open yet")
        return AllInUse(begin + why)

    def runtime(self, seconds: float | None = None) -> Lent:
        """Lend a worker's loop a connection in autocommit; shut it after `seconds` (default: the pool's deadline).

        One whose server is gone, or can only read (a demoted primary), is closed: the next call finds another server.
        """
        return Lent(self, seconds or self.settings.deadline, share=None)

    def for_caller(self, seconds: float | None = None) -> Lent:
        """Lend a connection as `runtime` does, to whoever is no worker's loop: however many these are, they delay no beat.

        PoolTimeout when none is free in time; such a call must not wait for another while it has one.
        """
        return Lent(self, seconds or self.settings.deadline, share=self._shares)

    @contextlib.asynccontextmanager
    async def in_turn(self, *, asked: bool = False) -> AsyncIterator[None]:
        """For looks that only the clock asks for: one after the other, so that an idle worker is content with one connection.

        The pool opens another whenever all are in use, and keeps what is in use once in `UNUSED` seconds. None waits for long,
        and one that was `asked` for, by work, not at all.
        """
        mine = False
        if not asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN):
                    mine = await self._turn.acquire()
        try:
            yield
        finally:
            if mine:
                self._turn.release()

    async def lend(self, wait: float | None, guest: object = None) -> PoolConnection:
        """Lend one to a job's transaction; `take_back` follows exactly if this returns. `guest`: see `promise`.

        NoFreeConnection when there is none within `wait` seconds.
        """
        conn: PoolConnection | None = None
        if self._shares.free and not self.waiting:
            await self._shares.enter("job")
        else:
            conn = await self._wait_for_turn(wait, guest)
        try:
            if conn is None:
                conn = await self._get(self._opened(), self.settings.acquire_timeout)
                conn.stays_watched_by = asyncio.get_running_loop()
                conn.pass_on_until = time.monotonic() + PASSED_ON
        except psycopg.OperationalError as error:
            self._shares.leave("job")
            raise NoFreeConnection(f"no connection to the database: {error}") from error
        except BaseException:
            self._shares.leave("job")
            raise
        self._lent[conn] = time.monotonic()
        return conn

    async def _wait_for_turn(self, wait: float | None, guest: object) -> PoolConnection | None:
        self.waiting += 1
        try:
            return await self._shares.enter("job", guest, wait)
        except TimeoutError:
            raise NoFreeConnection(f"no connection was free for a job within {wait:g} s") from None
        finally:
            self.waiting -= 1
            while self._shares.left_over:
                conn = self._shares.left_over.pop()
                self._lent.pop(conn, None)
                await _put(conn)

    def promise(self, conn: PoolConnection) -> object:
        """Promise a connection that is about to come back to the job that waits first; its `guest`, None: nobody waits.

        So that its transaction may begin in the round trip that ends this one. It takes the connection as it comes back, unless
        the promise is broken.
        """
        waiting = self._shares.first() if time.monotonic() < conn.pass_on_until else None
        if waiting is None:
            return None
        self._promised[conn] = waiting
        return waiting.guest

    def break_promise(self, conn: PoolConnection) -> None:
        """Let the job that was promised the connection wait for another."""
        waiting = self._promised.pop(conn, None)
        if waiting is not None:
            self._shares.put_back(waiting)

    async def take_back(self, conn: PoolConnection) -> None:
        """Take one back that was lent; the next job that waits has it at once."""
        now = time.monotonic()
        self._held += (now - self._lent.pop(conn) - self._held) / 16
        promised = self._promised.pop(conn, None)
        if promised is not None and self._shares.pass_on(promised, conn):
            self._lent[conn] = now
            return
        if self.waiting and conn.pgconn.transaction_status == TransactionStatus.IDLE and now < conn.pass_on_until:
            if not self._shares.leave("job", conn):
                await _put(conn)
            return
        try:
            await _put(conn)
        finally:
            self._shares.leave("job")

    def sever_jobs(self) -> None:
        """Shut the connections of all jobs' transactions: the lease is over, they must not commit."""
        for conn in self._lent:
            sever(conn)
        for shut in list(self.severed_with_jobs):
            shut()

    async def connect(self) -> PoolConnection:
        """Open one connection outside the pool, in autocommit. The first one finds out whether a pooler stands between."""
        if not self.pooler:
            try:
                conn = await PoolConnection.connect(self.conninfo, autocommit=True)
            except psycopg.OperationalError as error:
                if not refuses_options(error) or not self._meet_pooler():
                    raise
            else:
                try:
                    async with deadline(conn, self.settings.deadline):
                        pooler = await through_pooler(conn)
                except BaseException:
                    await conn.close()
                    raise
                if not pooler:
                    return conn
                await conn.close()
                self._meet_pooler()
        return await SharedConnection.connect(self.conninfo, autocommit=True, prepare_threshold=None)

    def _meet_pooler(self) -> bool:
        """Send a pooler none of our options; whether that changes anything: what the DSN itself asks for is left in."""
        self.pooler = True
        self._connector = Connector(SharedConnection)
        before, self.conninfo = self.conninfo, connection_string(self._dsn, pooler=True)
        return self.conninfo != before

    async def doubt_listener(self, conn: AsyncConnection[TupleRow]) -> str | None:
        """Say what is wrong with the way of listener and guard, beside `conn`; None: nothing, or nobody answers for now."""
        try:
            own = await self._connect_own()
        except psycopg.OperationalError:
            return None  # listener and guard try again, and say so
        try:
            where = "SELECT pg_catalog.current_database(), pg_catalog.pg_postmaster_start_time()"
            async with deadline(own, self.settings.deadline):
                if await (await own.execute(where)).fetchone() != await (await conn.execute(where)).fetchone():
                    return "it leads to another database, whose wake-ups are not ours"
                if await through_pooler(own):
                    return "it leads through a pooler as well; unless that is in session mode there are no wake-ups"
        finally:
            await own.close()
        return None

    async def _connect_own(self) -> AsyncConnection[TupleRow]:
        try:
            return await self.connect_listener()
        except psycopg.OperationalError as error:
            if self._listen_dsn is None or not refuses_options(error):
                raise
        self._direct = connection_string(self._listen_dsn, pooler=True)
        return await self.connect_listener()

    async def connect_listener(self) -> AsyncConnection[TupleRow]:
        """Open one connection outside the pool on which LISTEN can be in force; see `can_listen`."""
        return await AsyncConnection.connect(self.own_conninfo, autocommit=True)
