"""One examination: the connection, what the checks ask about, and what they leave for the report.

The checks of this package have one shape: a module with its kinds of findings and `look(examination)`, which runs the SQL
file of its name (sql/checks/) and turns the rows into findings. They only read; the number of their statements is fixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import dict_row

from aioqueue.pooler import execute
from aioqueue.session_factory import EngineSession
from aioqueue.sql import as_sql, checks, tables
from aioqueue.store import Store

READ = {"transaction_read_only": "on", "statement_timeout": "30s", "jit": "off"}
"""Compiling for the planner's guesses about recursive queries takes longer than they do."""


@dataclass(kw_only=True)
class Examination:
    """What is examined, as whom, and what has been seen so far."""

    conn: AsyncConnection[Any]
    store: Store
    setting: str
    """Name of the setting that carries the tenant."""
    strict: bool = False
    """Whether the application relies on row-level security (TenantSettings.strict_rls)."""
    taken: str | None = None
    """Role that jobs' transactions take on; None: the worker's own."""
    engine: EngineSession | None = None
    """Whose the sessions of tasks with a JobSession are, where there are any: of another engine, with a role of its own."""
    roles: list[str] = field(default_factory=list)
    """Roles whose rights are looked at: those that run jobs. Found by `find_roles`."""
    tables: list[int] = field(default_factory=list)
    """Tables with a policy that reads the tenant setting; found by `find_tenant_tables`."""
    policies: list[int] = field(default_factory=list)
    """Those policies."""
    related: list[int] = field(default_factory=list)
    """Those tables, and all that hold rows of the same tables: partitions, what they are partitions of, inheritance."""
    listen: Callable[[], Awaitable[AsyncConnection[Any]]] | None = None
    """Opens a second connection as listeners do; None: nobody can listen."""
    pooler: bool = False
    """Whether a pooler in transaction mode stands between."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures that the report shows whether or not something is wrong."""
    unseen: list[str] = field(default_factory=list)
    """What could not be seen, and what it takes to see it."""

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read in one transaction, with time enough for a large catalogue or a held xmin horizon."""
        async with self.conn.transaction():
            await self.store.set_local(self.conn, READ)
            yield

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        """Run one of the checks' statements (sql/checks/); what all of them may ask for is given to each."""
        common: dict[str, object] = {
            "schema": self.store.schema,
            "own": sorted(tables()),
            "setting": self.setting,
            "roles": self.roles,
            "tables": oids(self.tables),
            "policies": oids(self.policies),
            "related": oids(self.related),
        }
        cursor = self.conn.cursor(row_factory=dict_row)
        await execute(cursor, as_sql(checks()[name], self.store.schema), {**common, **params})
        return await cursor.fetchall()

    async def find_roles(self, *, mine: bool = False) -> None:
        """Find whose rights count: those of the session's role (`mine`), else of all workers' roles; the engine's."""
        self.roles = [row["role"] for row in await self.rows("worker_roles", mine=mine, taken=self.taken)]
        if self.engine is not None and self.taken is None and self.engine.role not in self.roles:
            self.roles.append(self.engine.role)

    async def find_tenant_tables(self) -> None:
        """Find the tables whose policies read the tenant setting."""
        found = await self.rows("tenant_policies")
        self.policies = [row["policy"] for row in found]
        self.tables = sorted({row["table"] for row in found})
        self.related = [row["oid"] for row in await self.rows("related_tables")] if self.tables else []


def oids(numbers: Sequence[int]) -> str:
    """Return numbers as an array's text."""
    return "{" + ",".join(map(str, numbers)) + "}"


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return sql.Identifier(name).as_string(None)


def spell(seconds: float) -> str:
    """Return a duration in words, in its largest unit."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} seconds"
