"""Tenants within a job's session: what nested.py makes their blocks of, on SQLAlchemy's AsyncSession; a base of `OpenSession`.

And how the runtime's own statements are sent on its connection. Neither begins nor ends the transaction.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from .callers.caller import Statement
from .callers.sqlalchemy import as_text
from .session_guard import SessionConnection, SessionGuard

PLAIN = {"stream_results": False, "yield_per": None}
"""Whatever user code has set for the connection's statements."""


@functools.lru_cache(maxsize=100)
def runtime_text(statement: str) -> Any:
    """Return a statement with placeholders %s as SQLAlchemy takes it; `named` has what goes in their places."""
    return as_text(Statement(tuple(statement.split("%s"))))


def named(params: Sequence[object]) -> dict[str, object]:
    """Return the parameters of a `runtime_text`, in its order, by their names there."""
    return {f"p{number}": value for number, value in enumerate(params, 1)}


class NestedSession:
    """One job's session, for `Nesting`: see `Savepoints` in nested.py."""

    face: Any
    """The session that user code is given; there once it has begun."""
    _conn: SessionConnection
    _guard: SessionGuard

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open one, with an identity map of its own: what was loaded for one tenant is not found by another."""
        face = self.face
        await face.flush()
        outer = list(face.sync_session)
        face.expunge_all()
        try:
            async with face.begin_nested():
                await AsyncSession.connection(face)  # SAVEPOINT is sent with the first use of it
                yield
        finally:
            face.expunge_all()
            face.add_all(outer)

    async def switch_local(self, names: Sequence[str], values: Mapping[str, str]) -> Sequence[str | None]:
        """Flush what is the tenant's so far, then read and set; see nested.py."""
        await self.face.flush()
        calls = ", ".join(["pg_catalog.set_config(%s, %s, true)"] * len(values))
        reads = ", ".join(["pg_catalog.current_setting(%s, true)"] * len(names))
        params = [part for pair in values.items() for part in pair] + list(names)
        with self._guard.as_runtime():
            row = await self._fetch(f"SELECT s.*, {calls} FROM (SELECT {reads} OFFSET 0) s", params)  # noqa: S608 - fixed parts
        return list(row)[: len(names)]

    async def set_role(self, role: str) -> None:
        """Take a role for the rest of the transaction."""
        with self._guard.as_runtime():
            await self._fetch("SELECT pg_catalog.set_config('role', %s, true)", [role])

    async def _fetch(self, statement: str, params: Sequence[object] = ()) -> Sequence[Any]:
        result = await AsyncConnection.execute(self._conn, runtime_text(statement), named(params), execution_options=PLAIN)
        return result.one()
