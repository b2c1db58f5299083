"""The operations of a job's own transaction, one method each, the connection first; a base of `Store`.

User code may have run before, on the same connection: nothing here is found by a search path, and rows are tuples whatever it has
set. How the steps follow each other, open_transaction.py and session_transaction.py say. Finish, confirm and scrub have no method
here: they go together with others, as those modules send them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.rows import TupleRow, tuple_row

from .bound_store import BoundStore
from .claimed import Claimed

NOT_OWNED = "AQ002"
"""SQLSTATE of a finish or confirm of a job that is no longer this worker's."""
VIOLATION = "AQ003"
"""SQLSTATE of a finish or confirm in a transaction that the task broke."""

_CALLS = {
    # The settings of finish and confirm are `pairs`.
    "finish": "SELECT aioqueue.finish(%s::bigint, %s::bigint, %s::bigint, %s::pg_catalog.uuid, %s::integer, NULL,"
    " p_settings => %s::pg_catalog.text::pg_catalog.text[], p_result => %s::pg_catalog.text::pg_catalog.jsonb)",
    "confirm": "SELECT aioqueue.confirm(%s::bigint, %s::bigint, %s::bigint, %s::pg_catalog.uuid, %s::integer, NULL,"
    " p_settings => %s::pg_catalog.text::pg_catalog.text[])",
    "read_back": "SELECT aioqueue.read_back(%s::bigint, %s::bigint, %s::bigint, %s::uuid, %s::integer)",
    "scrub": "SELECT aioqueue.scrub()",
}


def pairs(values: Mapping[str, str]) -> str:
    # An array literal of names and values, two by two: what finish and confirm take as settings.
    plain = "".join([*values, *values.values()])
    if "\\" in plain or '"' in plain:
        values = {_escaped(name): _escaped(value) for name, value in values.items()}
    return "{" + ",".join([f'{{"{name}","{value}"}}' for name, value in values.items()]) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


async def _select(conn: AsyncConnection[Any], columns: Sequence[LiteralString], params: Sequence[str]) -> AsyncCursor[TupleRow]:
    # Rows are tuples and parameters %s, whatever the caller's own cursors make of them.
    cursor = AsyncCursor(conn, row_factory=tuple_row)
    return await cursor.execute(sql.SQL("SELECT {}").format(sql.SQL(", ").join(map(sql.SQL, columns))), params)


class TransactionStore(BoundStore):
    """The operations of a job's transaction, bound to one schema."""

    def __init__(self, schema: str, calls: Mapping[str, str]) -> None:
        super().__init__(schema, {**calls, **_CALLS})

    async def read_back(self, conn: AsyncConnection[Any], job: Claimed) -> str:
        """After a commit without an answer: 'succeeded', 'ours' (it did not commit) or 'lost'."""
        return str(await self._value(conn, "read_back", *job.fence))

    async def get_settings(self, conn: AsyncConnection[Any], names: Sequence[str]) -> AsyncCursor[TupleRow]:
        """Read settings as the session has them now, in one row; NULL: it has no value."""
        return await _select(conn, ["pg_catalog.current_setting(%s, true)" for _ in names], names)

    async def set_local(self, conn: AsyncConnection[Any], values: Mapping[str, str]) -> AsyncCursor[TupleRow]:
        """Set settings for the current transaction only; the first column of its row is the role as it is."""
        return await _select(
            conn,
            ["pg_catalog.current_setting('role')", *("pg_catalog.set_config(%s, %s, true)" for _ in values)],
            [part for pair in values.items() for part in pair],
        )

    async def switch_local(
        self, conn: AsyncConnection[Any], names: Sequence[str], values: Mapping[str, str]
    ) -> Sequence[str | None]:
        """Read settings, then set others for the current transaction; one statement, since others may be in a queue for it."""
        cursor = AsyncCursor(conn, row_factory=tuple_row)
        statement = sql.SQL("SELECT s.*, {} FROM (SELECT {} OFFSET 0) s").format(
            sql.SQL(", ").join([sql.SQL("pg_catalog.set_config(%s, %s, true)")] * len(values)),
            sql.SQL(", ").join([sql.SQL("pg_catalog.current_setting(%s, true)")] * len(names)),
        )
        await cursor.execute(statement, [part for pair in values.items() for part in pair] + list(names))
        return (await cursor.fetchone() or ())[: len(names)]

    async def set_role(self, conn: AsyncConnection[Any], role: str) -> None:
        """Take a role for the rest of the transaction (SET LOCAL ROLE); 'none' is the session's user."""
        await _select(conn, ["pg_catalog.set_config('role', %s, true)"], [role])

    async def leave_role(self, conn: AsyncConnection[Any], role: str, *, seen: str) -> None:
        """Take another role for the rest of the transaction, and keep in setting `seen` the one that it was."""
        await _select(conn, ["pg_catalog.set_config(%s, pg_catalog.current_setting('role'), true)"], [seen])
        await self.set_role(conn, role)
