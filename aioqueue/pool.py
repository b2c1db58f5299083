"""The one pool of a process, with two connections kept back for the runtime: opened, closed, lent for a block with a deadline.

However a block ends, its connection goes back. Opens no transaction and runs no statement; what jobs' transactions get of the
pool stands in database.py, who may have how much of it is counted in shares.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from .connector import POOL, POOL_LOGGER
from .errors import ConfigurationError
from .overdue import Overdue
from .pool_connection import PoolConnection, sever
from .server import Server, deadline
from .settings import PoolSettings
from .shares import Shares

UNUSED = 10.0
"""Seconds after which the pool closes a connection that nobody needed, one at a time."""
TURN = 0.1
"""Seconds that a look by the clock waits for another one at most."""
RESERVED = 2
"""Connections that are the runtime's; callers get one of them while jobs have all the others."""

PsycopgPool = AsyncConnectionPool[PoolConnection]

_lent: Overdue[PoolConnection] = Overdue(sever)
_puts: set[asyncio.Task[None]] = set()
"""Connections on their way into the pool whose user was cancelled."""


class AllInUse(PoolTimeout):
    """Every connection was in use for too long; the server refuses none. To ask again would make it worse."""


async def give_back(conn: PoolConnection) -> None:
    """Give a job's connection back to its pool, also when that was closed meanwhile; of a job nothing is committed here."""
    conn.stays_watched_by = None
    conn.unwatch()
    if conn.pgconn.transaction_status != TransactionStatus.IDLE:
        await conn.close()
    pool = conn._pool
    if isinstance(pool, AsyncConnectionPool):
        await _put_into(pool, conn)


async def _put_into(pool: PsycopgPool, conn: PoolConnection) -> None:
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
    """A connection of the pool for a block, with a share of it for a caller's; see `Pool.runtime` and `for_caller`."""

    __slots__ = ("_conn", "_pool", "_seconds", "_share", "_source", "_under_way")

    _conn: PoolConnection
    _pool: PsycopgPool
    _under_way: dict[PoolConnection, float]

    def __init__(self, source: Pool, seconds: float, *, share: Shares[PoolConnection] | None) -> None:
        self._source = source
        self._seconds = seconds
        self._share = share

    async def __aenter__(self) -> PoolConnection:
        self._pool, self._conn = await self._source.take(self._seconds, self._share)
        self._under_way = _lent.add(self._conn, self._seconds)
        return self._conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        conn = self._conn
        self._under_way.pop(conn, None)
        try:
            if isinstance(error, psycopg.Error) and self._source.lost(error):
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


class Pool(Server):
    """The pool of one app: `runtime()` for a worker's loops, `for_caller()` for all but the transactions of jobs."""

    def __init__(self, dsn: str, settings: PoolSettings, *, listen_dsn: str | None = None) -> None:
        super().__init__(dsn, settings, listen_dsn=listen_dsn)
        self._pool: PsycopgPool | None = None
        self._made: weakref.WeakSet[PoolConnection] = weakref.WeakSet()
        """The pool's connections, from when they could be lent."""
        self._shares: Shares[PoolConnection] = Shares(settings.size - RESERVED)
        self.rehearse: Callable[[AsyncConnection[Any]], Awaitable[None]] | None = None
        """What each new connection of ours is made ready with before anybody has it; it raises nothing."""
        self._turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the pool is open."""
        return self._pool is not None

    async def open(self) -> None:
        """Open the pool without waiting for the server; through a pooler if `connect` has found one."""
        if self._pool is None:
            prepare = not self.pooler if self.settings.prepare is None else self.settings.prepare
            # reconnect_timeout is short because the pool doubles its pauses up to it; who asks next begins anew.
            pool: PsycopgPool = AsyncConnectionPool(
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

    def _opened(self) -> PsycopgPool:
        if self._pool is None:
            raise ConfigurationError("the pool is not open")
        return self._pool

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

    async def take(self, seconds: float, share: Shares[PoolConnection] | None) -> tuple[PsycopgPool, PoolConnection]:
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

    async def _get(self, pool: PsycopgPool, wait: float) -> PoolConnection:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            conn = await pool.getconn(wait)
        except PoolTimeout:
            raise self._timed_out(wait, "all are in use") from self._connector.refusal
        if task and task.cancelling() > before:
            # The pool waits by wait_for(), which before Python 3.12 swallows a cancellation that comes with the connection.
            await give_back(conn)
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
