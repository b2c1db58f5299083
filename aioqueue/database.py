"""The one pool of a process, with two connections kept back for the runtime, and a deadline on every call of the runtime.

A deadline shuts the connection's socket, which returns at once also against a server that hangs; cancelling the call would
wait for the server. Opens no transaction and runs no statement of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

from .errors import AioQueueError, ConfigurationError
from .settings import PoolSettings

RESERVED = 2
"""Connections that jobs never get."""

# What RESET ALL returns to. row_security off: a policy on our own tables is an error, not an empty queue. The keepalives and
# the check of the client let a vanished host's locks go in 11-20 s; PostgreSQL's own defaults take two hours.
SESSION = {
    "statement_timeout": "5s",
    "lock_timeout": "2s",
    "row_security": "off",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "client_connection_check_interval": "5s",
}
CLIENT = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "aioqueue",
}


def connection_string(dsn: str) -> str:
    """Add the runtime's values to a DSN; what the DSN says itself wins. Raises ConfigurationError for one that libpq refuses."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(f"the DSN is not one that PostgreSQL understands: {error}") from None
    options = " ".join(f"-c {name}={value}" for name, value in SESSION.items())
    own = given.pop("options", None)
    return make_conninfo("", **{**CLIENT, **given, "options": f"{options} {own}" if own else options})


def sever(conn: AsyncConnection[Any]) -> None:
    """Shut the connection's socket: whoever waits on it gets an OperationalError at once. Never blocks, never raises."""
    with contextlib.suppress(OSError, psycopg.Error):
        duplicate = socket.socket(fileno=os.dup(conn.fileno()))
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        finally:
            duplicate.close()


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


class NoFreeConnection(AioQueueError):
    """A job got no connection for its transaction; user code has not begun."""


class Database:
    """The pool of one app: `runtime()` for the runtime's calls, `for_job()` for jobs' transactions."""

    def __init__(self, dsn: str, settings: PoolSettings) -> None:
        self.settings = settings
        self.conninfo = connection_string(dsn)
        self._pool: AsyncConnectionPool[AsyncConnection[TupleRow]] | None = None
        self._jobs = asyncio.Semaphore(settings.size - RESERVED)
        self._lent: set[AsyncConnection[TupleRow]] = set()
        self.waiting = 0
        """Jobs that wait for a connection now; while there are any, the claimer asks for no more than there are free."""

    @property
    def is_open(self) -> bool:
        """Whether the pool is open."""
        return self._pool is not None

    @property
    def free_for_jobs(self) -> int:
        """Connections that a job's transaction could have at once."""
        return max(0, self._jobs._value)

    async def open(self) -> None:
        """Open the pool without waiting for the server."""
        if self._pool is None:
            # reconnect_timeout is short because the pool doubles its pauses up to it; who asks next begins anew.
            pool: AsyncConnectionPool[AsyncConnection[TupleRow]] = AsyncConnectionPool(
                self.conninfo,
                kwargs={"autocommit": True, "prepare_threshold": 1},
                min_size=self.settings.min_size,
                max_size=self.settings.size,
                timeout=self.settings.acquire_timeout,
                reconnect_timeout=3.0,
                name="aioqueue",
                open=False,
            )
            await pool.open()
            self._pool = pool

    async def close(self) -> None:
        """Close the pool; connections in use are closed when they come back."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(timeout=2.0)

    def _opened(self) -> AsyncConnectionPool[AsyncConnection[TupleRow]]:
        if self._pool is None:
            raise ConfigurationError("the pool is not open")
        return self._pool

    @contextlib.asynccontextmanager
    async def runtime(self, seconds: float | None = None) -> AsyncIterator[AsyncConnection[TupleRow]]:
        """Lend a connection in autocommit; shut it after `seconds` (default: the pool's deadline)."""
        async with self._opened().connection() as conn, deadline(conn, seconds or self.settings.deadline):
            yield conn

    @contextlib.asynccontextmanager
    async def for_job(self, wait: float | None) -> AsyncIterator[AsyncConnection[TupleRow]]:
        """Lend a connection to a job's transaction; NoFreeConnection when there is none within `wait` seconds."""
        self.waiting += 1
        try:
            async with asyncio.timeout(wait):
                await self._jobs.acquire()
        except TimeoutError:
            raise NoFreeConnection(f"no connection was free for a job within {wait:g} s") from None
        finally:
            self.waiting -= 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    conn = await stack.enter_async_context(self._opened().connection())
                except psycopg.OperationalError as error:
                    raise NoFreeConnection(f"no connection to the database: {error}") from error
                self._lent.add(conn)
                try:
                    yield conn
                finally:
                    self._lent.discard(conn)
        finally:
            self._jobs.release()

    def sever_jobs(self) -> None:
        """Shut the connections of all jobs' transactions: the lease is over, they must not commit."""
        for conn in self._lent:
            sever(conn)

    async def connect(self) -> AsyncConnection[TupleRow]:
        """Open one connection outside the pool, for the listener."""
        return await AsyncConnection.connect(self.conninfo, autocommit=True)
