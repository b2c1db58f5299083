"""A database in which nothing is wrong: the queue, a shop's tables under row-level security, and an idle time-out."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from psycopg import AsyncConnection

from aioqueue.doctor.examination import Examination
from aioqueue.doctor.examine import Report, examine, examine_start
from aioqueue.finding import Finding
from aioqueue.store import Store
from tests.postgres import Database

Examine = Callable[..., Awaitable[Report]]
Start = Callable[..., Awaitable[list[Finding]]]
Execute = Callable[..., Awaitable[None]]

SHOP = """
CREATE SCHEMA shop;
GRANT USAGE ON SCHEMA shop TO aioqueue_worker;
CREATE TABLE shop.invoices (id int, tenant_id int) PARTITION BY RANGE (id);
CREATE TABLE shop.invoices_1 PARTITION OF shop.invoices FOR VALUES FROM (0) TO (100);
CREATE TABLE shop.orders (id int, tenant_id int);
CREATE TABLE shop.colours (name text);
CREATE VIEW shop.totals WITH (security_invoker = true) AS SELECT count(*) FROM shop.invoices;
ALTER TABLE shop.invoices ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON shop.invoices USING (tenant_id = nullif(current_setting('app.tenant', true), '')::int);
CREATE POLICY own ON shop.orders USING (tenant_id = nullif(current_setting('app.tenant', true), '')::int);
GRANT SELECT, INSERT, UPDATE, DELETE ON shop.invoices, shop.orders, shop.colours, shop.totals TO aioqueue_worker;
"""


@asynccontextmanager
async def connection(dsn: str) -> AsyncIterator[AsyncConnection[Any]]:
    conn = await AsyncConnection.connect(dsn, autocommit=True)
    try:
        yield conn
    finally:
        await conn.close()


@pytest.fixture
async def boss(database: Database) -> AsyncIterator[Execute]:
    """A function that runs commands as a superuser."""
    async with connection(database.dsn("superuser")) as conn:

        async def execute(*commands: str) -> None:
            for command in commands:
                await conn.execute(command.encode())

        yield execute


@pytest.fixture
async def shop(database: Database, boss: Execute) -> AsyncIterator[Execute]:
    """A function that runs commands as the owner, in a database with the shop in it, and nothing wrong."""
    await boss(f"ALTER DATABASE {database.name} SET idle_in_transaction_session_timeout = '1h'")
    async with connection(database.dsn("owner")) as conn:
        await conn.execute(SHOP.encode())

        async def execute(*commands: str) -> None:
            for command in commands:
                await conn.execute(command.encode())

        yield execute
    await boss("DROP SCHEMA shop CASCADE", f"ALTER DATABASE {database.name} RESET ALL")


@asynccontextmanager
async def examination(database: Database, schema: str, role: str, **facts: Any) -> AsyncIterator[Examination]:
    """An examination as `worker`, `owner` or `superuser`, with a second connection to listen on."""

    async def listen() -> AsyncConnection[Any]:
        return await AsyncConnection.connect(database.dsn(role), autocommit=True)

    options: dict[str, Any] = {"setting": "app.tenant", "listen": listen, **facts}
    async with connection(database.dsn(role)) as conn:
        yield Examination(conn=conn, store=Store(schema), **options)


@pytest.fixture
def look(database: Database, schema: str, shop: Execute) -> Examine:
    """A function that makes every check, as `worker` where nothing else is said."""

    async def run(role: str = "worker", **facts: Any) -> Report:
        async with examination(database, schema, role, **facts) as made:
            return await examine(made)

    return run


@pytest.fixture
def start(database: Database, schema: str, shop: Execute) -> Start:
    """A function that makes the checks of a worker's start."""

    async def run(role: str = "worker", **facts: Any) -> list[Finding]:
        async with examination(database, schema, role, **facts) as made:
            return await examine_start(made)

    return run


def codes(report: Report | list[Finding]) -> list[str]:
    """The codes that were found, each finding's own."""
    return [finding.code for finding in (report if isinstance(report, list) else report.findings)]
