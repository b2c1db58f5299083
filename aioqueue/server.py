"""How the server is reached: directly or through a pooler, by a way of its own for LISTEN; and what says that it is lost.

The first connection finds out whether a pooler stands between. A deadline shuts the connection's socket, which returns at once
also against a server that hangs; cancelling the call would wait for the server. Tries nothing again; the pool is pool.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from .connector import Connector, connection_string
from .pool_connection import PoolConnection, sever
from .pooler import SharedConnection, refuses_options, through_pooler
from .settings import PoolSettings


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


class Server:
    """The server of one app, and the ways to it."""

    def __init__(self, dsn: str, settings: PoolSettings, *, listen_dsn: str | None = None) -> None:
        self.settings = settings
        self.conninfo = connection_string(dsn)
        self.pooler = False
        """Whether a pooler stands between; `connect` finds out."""
        self._dsn, self._listen_dsn = dsn, listen_dsn
        self._direct = None if listen_dsn is None else connection_string(listen_dsn)
        self._connector = Connector()
        self.losses = 0
        """Calls so far whose connection was lost: after a crash the server may have gone back, without a new start time."""

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

    def lost(self, error: BaseException) -> bool:
        """Take note of an error of a call; whether it says that the connection is lost."""
        found = connection_lost(error)
        self.losses += found
        return found

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
