"""Row-level security, and an order with its job in one transaction: `python examples/invoices.py`.

Three tenants with 20,000, 10,000 and 6,666 invoices. An ordinary role that owns nothing runs the jobs; the policy lets each
see its own tenant's rows only. Ends with 1 where a figure is wrong. Always on the embedded PostgreSQL, in its schema `example`.
"""

import asyncio
import os
import sys
from typing import LiteralString

import psycopg

from aioqueue import AioQueue, Job, JobFailed, JobNotFound, JobTransaction, embedded, migrate

EXPECTED = {"1": 20_000, "2": 10_000, "3": 6_666}

TABLES: LiteralString = """
DROP SCHEMA IF EXISTS example CASCADE;
CREATE SCHEMA example;
CREATE TABLE example.invoices (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant_id int NOT NULL);
CREATE TABLE example.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant_id int NOT NULL, invoices bigint);
INSERT INTO example.invoices (tenant_id) SELECT t FROM generate_series(1, 3) t, generate_series(1, 20000 / t);
CREATE INDEX ON example.invoices (tenant_id);
ALTER TABLE example.invoices ENABLE ROW LEVEL SECURITY;
ALTER TABLE example.invoices FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON example.invoices USING (tenant_id = nullif(current_setting('app.tenant', true), '')::int);
ALTER TABLE example.orders ENABLE ROW LEVEL SECURITY;
ALTER TABLE example.orders FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON example.orders USING (tenant_id = nullif(current_setting('app.tenant', true), '')::int);
GRANT USAGE ON SCHEMA example TO aioqueue_worker;
GRANT SELECT ON example.invoices TO aioqueue_worker;
GRANT SELECT, INSERT, UPDATE ON example.orders TO aioqueue_worker;
"""

server = embedded.start()
os.environ["AIOQUEUE_DSN"] = server.dsn("worker")
app = AioQueue()


@app.task
async def make_statement(tx: JobTransaction, order: int) -> int:
    """Count the invoices that the job's tenant may see, and write the number into its order."""
    count: int = await tx.fetch_value("SELECT count(*) FROM example.invoices")  # no WHERE: the policy does it
    await tx.execute("UPDATE example.orders SET invoices = %s WHERE id = %s", (count, order))
    return count


@app.task
async def change_tenant(tx: JobTransaction) -> None:
    """What no task may do: set another tenant. It fails, what it wrote is rolled back, and its connection is closed."""
    await tx.execute("SELECT set_config('app.tenant', '1', true)")


async def place_order(conn: psycopg.AsyncConnection, tenant: str, *, roll_back: bool = False) -> Job[int]:
    """Insert an order and enqueue its job; both are committed, or neither."""
    async with conn.transaction(force_rollback=roll_back):
        await conn.execute("SELECT set_config('app.tenant', %s, true)", (tenant,))
        cursor = await conn.execute("INSERT INTO example.orders (tenant_id) VALUES (%s) RETURNING id", (tenant,))
        (order,) = await cursor.fetchone() or (0,)
        return await make_statement.options(tenant=tenant, on=conn).enqueue(order)


async def main() -> int:
    owner = server.dsn("owner")
    await migrate.migrate(owner)
    await migrate.grant(owner, role="aioqueue_worker", kind="worker")
    async with await psycopg.AsyncConnection.connect(owner) as conn:
        await conn.execute(TABLES)

    wrong = 0
    async with app, app.worker(), await psycopg.AsyncConnection.connect(server.dsn("worker"), autocommit=True) as conn:
        jobs = {tenant: await place_order(conn, tenant) for tenant in EXPECTED}
        for tenant, job in jobs.items():
            count = await job.result(timeout=30)
            print(f"tenant {tenant}: {count:,} invoices, expected {EXPECTED[tenant]:,}")
            wrong += count != EXPECTED[tenant]

        job = await place_order(conn, "1", roll_back=True)
        try:
            await job.result(timeout=30)
            wrong += 1
        except JobNotFound:
            print("the order that was rolled back has no job")

        broken = await change_tenant.options(tenant="2", max_attempts=1).enqueue()
        try:
            await broken.result(timeout=30)
            wrong += 1
        except JobFailed as failed:
            print(f"a task that sets another tenant: {failed.error_type}")

        jobs = {tenant: await place_order(conn, tenant) for tenant in EXPECTED}
        again = {tenant: await job.result(timeout=30) for tenant, job in jobs.items()}
        print(f"after it: {again}")
        wrong += again != EXPECTED
    return 1 if wrong else 0


if __name__ == "__main__":
    with server:
        sys.exit(asyncio.run(main()))
