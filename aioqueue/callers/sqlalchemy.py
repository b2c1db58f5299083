"""SQLAlchemy 2: sessions and connections, awaited and blocking, on any of its drivers for PostgreSQL; SQLModel's sessions.

All goes through their own `execute`. On the driver's connection below, asyncpg would autocommit before SQLAlchemy's own first
statement, and the job would survive the rollback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from aioqueue.errors import InvalidOption, TransactionAborted

from . import asyncpg
from .caller import AsyncCaller, Statement, SyncCaller, is_a
from .transactions import OpenTransaction, SeenByStatus, Unseen


def recognise(on: Any) -> AsyncCaller | SyncCaller | None:
    """Return what writes with the session or on the connection, or None."""
    if is_a(on, "sqlalchemy.ext.asyncio", "async_scoped_session") or is_a(on, "sqlalchemy.orm", "scoped_session"):
        on = on()
    if is_a(on, "sqlalchemy.ext.asyncio", "AsyncSession"):
        return Awaited(on, on.sync_session)
    if is_a(on, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        return Awaited(on, None)
    if is_a(on, "sqlalchemy.orm", "Session") or is_a(on, "sqlalchemy", "Connection"):
        return Blocking(on)
    return None


def transaction_of(driver_connection: Any) -> OpenTransaction:
    """Return what shows the end of the transaction of the connection below SQLAlchemy's."""
    if asyncpg.recognise(driver_connection) is not None:
        return asyncpg.transaction_of(driver_connection)
    if hasattr(getattr(driver_connection, "info", None), "transaction_status"):
        return SeenByStatus(driver_connection)
    return Unseen(driver_connection)


def as_text(statement: Statement) -> Any:
    """Return the statement with parameters :p1, :p2, …; other colons are escaped (a schema's name has no backslash)."""
    text = statement.joined(lambda number: f":p{number}", lambda part: part.replace(":", "\\:"))
    return sys.modules["sqlalchemy"].text(text)


class Blocking(SyncCaller):
    """A `Session` or `Connection`."""

    def __init__(self, on: Any) -> None:
        self._on = on
        self._transaction: OpenTransaction | None = None

    def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement; see SyncCaller."""
        errors = sys.modules["sqlalchemy.exc"]
        try:
            # A session begins of itself here, as with any first statement.
            conn = self._on.connection() if is_a(self._on, "sqlalchemy.orm", "Session") else self._on
            if conn.dialect.name != "postgresql":
                raise InvalidOption("on", f"expected SQLAlchemy on PostgreSQL, got its dialect {conn.dialect.name!r}")
            named = {f"p{number}": value for number, value in enumerate(params, 1)}
            answer: str | None = self._on.execute(as_text(statement), named).scalar()
        except errors.PendingRollbackError:
            raise TransactionAborted from None
        self._transaction = transaction_of(conn.connection.driver_connection)
        return answer

    def transaction(self) -> OpenTransaction:
        """See SyncCaller."""
        assert self._transaction is not None, "fetch comes first"  # noqa: S101 - by the order of enqueue.py
        return self._transaction


class Awaited(AsyncCaller):
    """An `AsyncSession` or `AsyncConnection`, which runs what is blocking inside it."""

    def __init__(self, on: Any, session: Any) -> None:
        self._on = on
        self._session = session
        self._inside: Blocking | None = None

    async def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement; see AsyncCaller."""

        def run(inside: Any) -> str | None:
            self._inside = Blocking(inside)
            return self._inside.fetch(statement, *params)

        answer: str | None = await self._on.run_sync(run)
        return answer

    def transaction(self) -> OpenTransaction:
        """See AsyncCaller."""
        assert self._inside is not None, "fetch comes first"  # noqa: S101 - by the order of enqueue.py
        return self._inside.transaction()

    def after_commit(self, call: Callable[[object], None]) -> None:
        """Call back while the connection is still the session's: another may have it before anybody looks."""
        event = sys.modules["sqlalchemy"].event
        if self._session is not None and not event.contains(self._session, "after_commit", call):
            event.listen(self._session, "after_commit", call)
