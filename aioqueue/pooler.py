"""What is different behind a pooler in transaction mode (PgBouncer): no session is ours, so what a direct connection has from its
start is set here for each transaction. Finds out whether one stands between; decides nothing about which connection is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Cursor, IsolationLevel, sql
from psycopg.pq import PipelineStatus, TransactionStatus

from .pool_connection import PoolConnection

CLIENT_CHECK = {"client_connection_check_interval": "5s"}
"""With it a client that has gone is noticed in the middle of a statement, too."""
SESSION = {
    "statement_timeout": "5s",
    "lock_timeout": "2s",
    # A policy on our own tables is an error, not an empty queue.
    "row_security": "off",
    **CLIENT_CHECK,
}
"""What the runtime's statements run under, on every connection."""
REPORTED = ("client_encoding", "DateStyle", "TimeZone", "IntervalStyle", "application_name", "standard_conforming_strings")
"""Settings that a pooler keeps for each client, and sets on the server before it lends it."""

_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE"
# A stranger's SET ROLE may stand on the server's session.
_OWN_ROLE = "SET LOCAL role TO DEFAULT"
_LOCAL = sql.SQL("SELECT {}").format(sql.SQL(", ").join([sql.SQL("pg_catalog.set_config(%s, %s, true)")] * len(SESSION)))
_LOCAL_VALUES = [part for pair in SESSION.items() for part in pair]


class SharedConnection(PoolConnection):
    """A connection through a pooler in transaction mode: from one transaction to the next the server's session is another."""

    reported: dict[str, str]
    """The settings that are kept for this client, as they were at its start."""

    def is_idle(self) -> bool:
        """Whether nobody has begun a transaction or a pipeline on it."""
        return self.info.transaction_status == TransactionStatus.IDLE and self.pgconn.pipeline_status == PipelineStatus.OFF

    @classmethod
    async def connect(cls, *args: Any, **options: Any) -> Self:
        """Connect, as psycopg does; transactions begin as READ COMMITTED, READ WRITE whatever the session's defaults are."""
        conn = await super().connect(*args, **options)
        await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)
        await conn.set_read_only(False)
        found = {name: conn.info.parameter_status(name) for name in REPORTED}
        conn.reported = {name: value for name, value in found.items() if value is not None}
        return conn


async def execute(cursor: AsyncCursor[Any], statement: Any, params: Any = None) -> None:
    """Execute one of the runtime's statements; through a pooler in a transaction of its own, under the runtime's settings.

    One round trip either way. In a transaction, or in a pipeline, that somebody has begun it is their settings that hold.
    """
    conn = cursor.connection
    if not isinstance(conn, SharedConnection) or not conn.is_idle():
        await cursor.execute(statement, params)
        return
    async with _in_transaction(conn):
        await cursor.execute(statement, params)


async def execute_all(conn: AsyncConnection[Any], statement: Any, params: Iterable[Any]) -> None:
    """Execute one of the runtime's statements for each of the parameters, all or none, in a transaction of its own.

    One round trip: the next parameters are asked for while the server works on those before. Nobody has begun a transaction yet.
    """
    async with _in_transaction(conn):
        for each in params:
            await conn.execute(statement, each)


@contextlib.asynccontextmanager
async def _in_transaction(conn: AsyncConnection[Any]) -> AsyncIterator[None]:
    """Send what the block executes as one transaction, in one go."""
    try:
        async with conn.pipeline():
            await conn.execute(_BEGIN)
            if isinstance(conn, SharedConnection):
                await conn.execute(_OWN_ROLE)
                await conn.execute(_LOCAL, _LOCAL_VALUES)
            yield
            await conn.execute("COMMIT")
    except psycopg.errors.FeatureNotSupported as error:
        await conn.close()
        raise psycopg.errors.ReadOnlySqlTransaction(str(error)) from error  # a standby's word for it, at BEGIN … READ WRITE
    except Exception:
        if not conn.closed and conn.info.transaction_status != TransactionStatus.IDLE:
            await conn.rollback()
        raise
    except BaseException:
        await conn.close()  # cancelled: who has it next must not find it in a transaction
        raise


def execute_in_thread(cursor: Cursor[Any], statement: Any, params: Any = None) -> None:
    """Execute one of the runtime's statements on a connection that blocks, in a transaction of its own, pooler or not.

    An error closes the connection.
    """
    conn = cursor.connection
    try:
        with conn.pipeline():
            conn.execute(_BEGIN)
            conn.execute(_OWN_ROLE)
            conn.execute(_LOCAL, _LOCAL_VALUES)
            cursor.execute(statement, params)
            conn.execute("COMMIT")
    except BaseException:
        conn.close()
        raise


async def through_pooler(conn: AsyncConnection[Any]) -> bool:
    """Whether a pooler stands between: the server's process is not the one that the connection was told of at its start.

    Asked twice, outside of a transaction: in transaction mode the second answer may come from yet another process.
    """
    for _ in range(2):
        row = await (await conn.execute("SELECT pg_catalog.pg_backend_pid()")).fetchone()
        if row is None or row[0] != conn.info.backend_pid:
            return True
    return False


def refuses_options(error: psycopg.Error) -> bool:
    """Whether a pooler refuses the options that a direct connection starts with; such an error has no SQLSTATE."""
    return "unsupported startup parameter" in str(error)
