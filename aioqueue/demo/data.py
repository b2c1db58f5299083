"""The demo's tables and figures: 100 tenants, 103,707 invoices, forced row-level security, and what each sum must be.

What is expected is computed here in Python, apart from the database. Roles: the owner makes the tables and owns them, the
worker's role reads invoices and marks orders, the client's role orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import LiteralString

import psycopg

TENANTS = 100
LARGEST = 20_000
"""Invoices of tenant 1; tenant t has floor(20000 / t), 103,707 in all."""

_DROP: LiteralString = "DROP SCHEMA IF EXISTS demo CASCADE"
_MAKE: LiteralString = """
CREATE SCHEMA demo;
CREATE TABLE demo.invoices (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id integer NOT NULL,
    number    integer NOT NULL,
    cents     integer NOT NULL
);
CREATE TABLE demo.orders (
    id        uuid PRIMARY KEY,
    tenant_id integer NOT NULL,
    status    text NOT NULL DEFAULT 'ordered',
    runs      integer NOT NULL DEFAULT 0,
    sent      integer NOT NULL DEFAULT 0,
    invoices  bigint,
    cents     bigint
);
"""
_FILL: LiteralString = """
INSERT INTO demo.invoices (tenant_id, number, cents)
SELECT t, n, 100 + mod(n * 7919 + t * 104729, 99900)
  FROM generate_series(1, %(tenants)s::integer) AS t, generate_series(1, %(largest)s::integer / t) AS n
"""
_PROTECT: LiteralString = """
CREATE INDEX invoices_tenant ON demo.invoices (tenant_id) INCLUDE (cents);
ALTER TABLE demo.invoices ENABLE ROW LEVEL SECURITY;
ALTER TABLE demo.invoices FORCE ROW LEVEL SECURITY;
ALTER TABLE demo.orders ENABLE ROW LEVEL SECURITY;
ALTER TABLE demo.orders FORCE ROW LEVEL SECURITY;
CREATE POLICY tenant ON demo.invoices USING (tenant_id = nullif(current_setting('app.tenant', true), '')::int);
CREATE POLICY tenant ON demo.orders USING (tenant_id = nullif(current_setting('app.tenant', true), '')::int);
GRANT USAGE ON SCHEMA demo TO aioqueue_worker, aioqueue_client;
GRANT SELECT ON demo.invoices TO aioqueue_worker;
GRANT SELECT, UPDATE ON demo.orders TO aioqueue_worker;
GRANT SELECT, INSERT ON demo.orders TO aioqueue_client;
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Number and sum of one tenant's invoices."""

    invoices: int
    cents: int


def expected(tenant: int, largest: int = LARGEST) -> Figures:
    """Compute what the statement of a tenant must say."""
    count = largest // tenant
    return Figures(count, sum(100 + (number * 7919 + tenant * 104729) % 99900 for number in range(1, count + 1)))


async def make_tables(owner_dsn: str, *, largest: int = LARGEST) -> int:
    """Make the schema `demo` anew, as its owner; return the number of invoices."""
    async with await psycopg.AsyncConnection.connect(owner_dsn) as conn:
        await conn.execute(_DROP)
        await conn.execute(_MAKE)
        filled = await conn.execute(_FILL, {"tenants": TENANTS, "largest": largest})
        await conn.execute(_PROTECT)
        await conn.execute("ANALYZE demo.invoices")
        return filled.rowcount


async def drop_tables(owner_dsn: str) -> None:
    """Drop the schema `demo`, as its owner."""
    async with await psycopg.AsyncConnection.connect(owner_dsn) as conn:
        await conn.execute(_DROP)


async def visible_without_tenant(dsn: str) -> int:
    """Count the invoices that a role sees with no tenant set."""
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        row = await (await conn.execute("SELECT count(*) FROM demo.invoices")).fetchone()
        return int(row[0]) if row else 0
