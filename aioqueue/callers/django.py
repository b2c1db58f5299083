"""Django: `django.db.connection`, `connections["name"]`."""

from __future__ import annotations

import sys
from typing import Any

from aioqueue.errors import InvalidOption, TransactionAborted

from .caller import Statement, SyncCaller, is_a
from .transactions import SeenByStatus


def recognise(on: object) -> SyncCaller | None:
    """Return what writes on the connection, or None."""
    found = is_a(on, "django.db.backends.base.base", "BaseDatabaseWrapper") or is_a(
        on, "django.utils.connection", "ConnectionProxy"
    )
    return Blocking(on) if found else None


class Blocking(SyncCaller):
    """A connection of Django's, on psycopg or psycopg2."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement; see SyncCaller."""
        if self._conn.vendor != "postgresql":
            raise InvalidOption("on", f"expected Django's connection to PostgreSQL, got one to {self._conn.vendor!r}")
        try:
            with self._conn.cursor() as cursor:
                cursor.execute(statement.percent, params)
                row = cursor.fetchone()
        except sys.modules["django.db"].transaction.TransactionManagementError:
            raise TransactionAborted from None
        return None if row is None else row[0]

    def transaction(self) -> SeenByStatus:
        """See SyncCaller."""
        return SeenByStatus(self._conn.connection)

    def notify_after_commit(self, statement: Statement) -> None:
        """Give the hint on this connection, once it is in autocommit again.

        None is left out that another one right before it would seem to cover: the worker may have looked in between.
        """
        if self._conn.in_atomic_block or self._conn.get_autocommit():
            self._conn.on_commit(lambda: self.fetch(statement, "ready"), robust=True)
