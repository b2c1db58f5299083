"""asyncpg: `Connection`, also as a pool lends it."""

from __future__ import annotations

import sys
from typing import Any

from .caller import AsyncCaller, Statement, is_a
from .transactions import SeenByFlag


def recognise(on: object) -> AsyncCaller | None:
    """Return what writes on the connection, or None."""
    return AwaitedConnection(on) if is_a(on, "asyncpg", "Connection") else None


def transaction_of(conn: object) -> SeenByFlag:
    """Return what shows the end of the connection's transaction."""
    return SeenByFlag(conn, sys.modules["asyncpg"].InterfaceError)


class AwaitedConnection(AsyncCaller):
    """A `Connection` of asyncpg's."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn

    async def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement; see AsyncCaller."""
        text = statement.joined(lambda number: f"${number}")
        value: str | None = await self._conn.fetchval(text, *params)
        return value

    def transaction(self) -> SeenByFlag:
        """See AsyncCaller."""
        return transaction_of(self._conn)
