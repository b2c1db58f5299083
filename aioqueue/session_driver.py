"""The driver's connection below a session's: whether it is in a transaction, shutting it at once, and the scrub after a job.

It is the application's own, from its own pool: whatever a job has left on its session is taken away, and what the application
has set when it connected is set again. Commits and rolls back nothing.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import AsyncCursor
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL

from .callers.caller import Statement
from .pool_connection import sever

SET_BEFORE = (
    "SELECT pg_catalog.json_object_agg(s.name, pg_catalog.current_setting(s.name)) FROM pg_catalog.pg_settings s"
    " WHERE s.source = 'session' AND s.name NOT IN ('transaction_isolation', 'transaction_read_only', 'transaction_deferrable')"
)
"""What somebody has SET on the session: JSON object, or NULL. PostgreSQL does not tell of settings of one's own (with a dot)."""


class Below(ABC):
    """One connection of a driver."""

    def __init__(self, conn: Any, adapter: Any) -> None:
        self.conn = conn
        self.adapter = adapter
        """SQLAlchemy's, around it."""

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Whether a transaction is open on it, also one that has failed."""
        raise NotImplementedError

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it is known to be closed."""
        raise NotImplementedError

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a task waits for an answer on it."""
        raise NotImplementedError

    @abstractmethod
    def sever(self) -> None:
        """Shut it: whoever waits on it gets an error at once. Never blocks, never raises."""
        raise NotImplementedError

    async def until_free(self) -> None:  # noqa: B027 - asyncpg's waiters are told at once
        """Once it is severed, wait until whoever waits on it has seen its end."""

    @property
    @abstractmethod
    def prepared(self) -> int:
        """How many statements the client believes to be prepared on the server."""
        raise NotImplementedError

    @abstractmethod
    async def fetch(self, statement: Statement, params: Sequence[str] = ()) -> Any:
        """Run a statement outside of any transaction; the first value of its row."""
        raise NotImplementedError

    async def scrub(self, scrub: str, before: Mapping[str, str]) -> bool:
        """Take away what a job left, and set again what was set `before`; False: it must not be used again."""
        prepared = await self.fetch(Statement((scrub,)))
        if before:
            calls = ", ".join(["pg_catalog.set_config(%s, %s, false)"] * len(before))
            await self.fetch(Statement(tuple(f"SELECT {calls}".split("%s"))), [part for pair in before.items() for part in pair])
        # A job may have deallocated statements without the client's knowing: they would fail for whoever has it next.
        return bool(prepared >= self.prepared)


class BelowPsycopg(Below):
    """psycopg's AsyncConnection."""

    @property
    def in_transaction(self) -> bool:
        """See Below."""
        return self.conn.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)

    @property
    def closed(self) -> bool:
        """See Below."""
        return bool(self.conn.closed)

    @property
    def busy(self) -> bool:
        """See Below."""
        return bool(self.conn.lock.locked())

    def sever(self) -> None:
        """See Below."""
        sever(self.conn)

    async def until_free(self) -> None:
        """See Below: a number of the socket that is used again would be waited on, too."""
        async with self.conn.lock:
            pass

    @property
    def prepared(self) -> int:
        """See Below."""
        return len(self.conn._prepared._names)

    async def fetch(self, statement: Statement, params: Sequence[str] = ()) -> Any:
        """See Below."""
        before = self.conn.autocommit
        await self.conn.set_autocommit(True)
        cursor = AsyncCursor(self.conn, row_factory=tuple_row)
        await cursor.execute(SQL(statement.percent), params, prepare=False)  # pyright: ignore[reportArgumentType] - our own text
        row = await cursor.fetchone()
        await self.conn.set_autocommit(before)
        return None if row is None else row[0]


class BelowAsyncpg(Below):
    """asyncpg's Connection."""

    @property
    def in_transaction(self) -> bool:
        """See Below."""
        return not self.conn.is_closed() and bool(self.conn.is_in_transaction())

    @property
    def closed(self) -> bool:
        """See Below."""
        return bool(self.conn.is_closed())

    @property
    def busy(self) -> bool:
        """See Below: SQLAlchemy has a lock of its own around it."""
        return bool(self.adapter._execute_mutex.locked())

    def sever(self) -> None:
        """See Below."""
        if not self.conn.is_closed():
            self.conn.terminate()

    @property
    def prepared(self) -> int:
        """See Below."""
        return len(getattr(self.adapter, "_prepared_statement_cache", None) or ())

    async def fetch(self, statement: Statement, params: Sequence[str] = ()) -> Any:
        """See Below."""
        return await self.conn.fetchval(statement.joined(lambda number: f"${number}"), *params)


def below(conn: Any) -> Below:
    """Return the driver's connection of SQLAlchemy's PoolProxiedConnection."""
    driver = conn.driver_connection
    asyncpg = sys.modules.get("asyncpg")
    kind = BelowPsycopg if asyncpg is None or not isinstance(driver, asyncpg.Connection) else BelowAsyncpg
    return kind(driver, conn.dbapi_connection)
