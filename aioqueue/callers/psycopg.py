"""psycopg 3: `AsyncConnection`, and `Connection`."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL

from aioqueue.errors import TransactionAborted

from .caller import AsyncCaller, Statement, SyncCaller
from .transactions import SeenByStatus


def recognise(on: object) -> AsyncCaller | SyncCaller | None:
    """Return what writes on the connection, or None."""
    if isinstance(on, AsyncConnection):
        return AwaitedConnection(on)
    if isinstance(on, Connection):
        return BlockingConnection(on)
    return None


def _check(conn: AsyncConnection[Any] | Connection[Any]) -> None:
    # In a pipeline the server's own refusal would come as another error.
    if conn.info.transaction_status == TransactionStatus.INERROR:
        raise TransactionAborted


def _query(statement: Statement) -> SQL:
    return SQL(statement.percent)  # pyright: ignore[reportArgumentType] - the package's own text


class AwaitedConnection(AsyncCaller):
    """An `AsyncConnection`; rows are tuples and parameters %s, whatever the caller's own cursors make of them."""

    def __init__(self, conn: AsyncConnection[Any]) -> None:
        self._conn = conn

    async def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement; see AsyncCaller."""
        _check(self._conn)
        cursor = AsyncCursor(self._conn, row_factory=tuple_row)
        row = await (await cursor.execute(_query(statement), params)).fetchone()
        return None if row is None else row[0]

    def transaction(self) -> SeenByStatus:
        """See AsyncCaller."""
        return SeenByStatus(self._conn)


class BlockingConnection(SyncCaller):
    """A `Connection`; rows are tuples and parameters %s, whatever the caller's own cursors make of them."""

    def __init__(self, conn: Connection[Any]) -> None:
        self._conn = conn

    def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement; see SyncCaller."""
        _check(self._conn)
        cursor = Cursor(self._conn, row_factory=tuple_row)
        row = cursor.execute(_query(statement), params).fetchone()
        return None if row is None else row[0]

    def transaction(self) -> SeenByStatus:
        """See SyncCaller."""
        return SeenByStatus(self._conn)
