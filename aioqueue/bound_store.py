"""The statements of aioqueue, bound to one schema, and how each of them is run; the base of what `Store` is made of.

Which ones there are its heirs say. Runs what it is given, on whatever connection: behind a pooler in a transaction of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from psycopg import AsyncConnection, AsyncCursor
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.rows import TupleRow, tuple_row

from .pool_connection import PoolConnection
from .pooler import SharedConnection, execute
from .settings import check_schema_name
from .sql import as_sql, place, statements
from .trip import Trip, wired


def array(values: Iterable[object]) -> str:
    # An array literal of numbers or uuids; psycopg's own array dumper costs more than the statement.
    return "{" + ",".join("NULL" if value is None else str(value) for value in values) + "}"


class BoundStore:
    """The statements, bound to one schema; `calls` are those of functions."""

    def __init__(self, schema: str, calls: Mapping[str, str]) -> None:
        self.schema = check_schema_name(schema)
        texts = {**calls, **statements()}
        # The texts are this package's own; the only thing put in is the quoted schema name.
        self.sql = {name: as_sql(text, schema) for name, text in texts.items()}
        self.wired = {name: wired(place(text, schema)) for name, text in calls.items()}
        """The calls as a Trip sends them."""

    async def execute(self, conn: AsyncConnection[Any], name: str, params: Sequence[object] = ()) -> AsyncCursor[TupleRow]:
        """Run one of the statements; rows are tuples and parameters %s, whatever the caller's own cursors make of them."""
        cursor = AsyncCursor(conn, row_factory=tuple_row)
        await execute(cursor, self.sql[name], params)
        return cursor

    async def _rows(
        self,
        conn: AsyncConnection[Any],
        name: str,
        params: Sequence[object],
        *,
        types: Sequence[int] | None = None,
        hint: Trip | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run a statement of the worker's, and return its rows: on a connection of the pool without a cursor, in binary.

        `types`: the oids of the types as which its columns are read there; default: their own. `hint`: sent when it is committed.
        """
        if not isinstance(conn, PoolConnection) or isinstance(conn, SharedConnection):
            return await (await self.execute(conn, name, params)).fetchall()
        trip = Trip(conn, answers=Format.BINARY, then=hint)
        trip.add(self.wired[name], params, prepare=True)
        (answer,) = await trip.run(None)
        reader = Transformer(conn)
        reader.set_pgresult(answer, set_loaders=types is None)
        if types is not None:
            reader.set_loader_types(types, Format.BINARY)
        return reader.load_rows(0, answer.ntuples, tuple)

    async def _value(self, conn: AsyncConnection[Any], name: str, *params: object) -> Any:
        row = await (await self.execute(conn, name, params)).fetchone()
        return None if row is None else row[0]
