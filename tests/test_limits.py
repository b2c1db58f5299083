"""Limits, weights and pauses as a user has them: over the API, with workers that run, none of them above the limit at any moment."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from psycopg import AsyncConnection

from aioqueue import AioQueue, InvalidOption, JobContext, JobTransaction, TaskDefinitionError, TenantStatus
from aioqueue.sql import as_sql
from tests.kit import MakeApp
from tests.postgres import Database

pytestmark = pytest.mark.anyio
PATIENCE = 60

RUNNING = """
SELECT j.tenant, j.task, j.key FROM aioqueue.live l JOIN aioqueue.job j ON j.id = l.job_id WHERE l.worker IS NOT NULL
"""


class Watcher:
    """Looks at what runs, again and again, each time in one snapshot of its own."""

    def __init__(self, conn: AsyncConnection[tuple[object, ...]], schema: str) -> None:
        self.conn = conn
        self.schema = schema
        self.looks = 0
        self.most: Counter[tuple[object, ...]] = Counter()

    async def rows(self, statement: str) -> list[tuple[object, ...]]:
        return await (await self.conn.execute(as_sql(statement, self.schema))).fetchall()

    async def look(self) -> None:
        rows = await self.rows(RUNNING)
        self.looks += 1
        found = Counter(("tenant", tenant) for tenant, _, _ in rows) + Counter(("task", task) for _, task, _ in rows)
        found += Counter(("key", task, key) for _, task, key in rows if key is not None)
        for name, number in found.items():
            self.most[name] = max(self.most[name], number)

    async def run(self) -> None:
        while True:
            await self.look()


@pytest.fixture
async def watcher(database: Database, schema: str) -> AsyncIterator[Watcher]:
    async with await AsyncConnection.connect(database.dsn("owner"), autocommit=True) as conn:
        yield Watcher(conn, schema)


@asynccontextmanager
async def watched(watcher: Watcher) -> AsyncIterator[None]:
    task = asyncio.create_task(watcher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def all_done(watcher: Watcher, number: int, state: str = "succeeded") -> None:
    """Wait until so many jobs have ended, and nothing is left anywhere."""
    async with asyncio.timeout(PATIENCE):
        while await watcher.rows(f"SELECT count(*) FROM aioqueue.outcome WHERE state = '{state}'") != [(number,)]:
            await asyncio.sleep(0)


async def test_limits_hold_over_workers_and_nothing_stays_parked(make_app: MakeApp, watcher: Watcher) -> None:
    """Two workers; a tenant, a task and keys limited, most jobs by two or three at once; tasks with and without a transaction."""
    app = make_app()

    @app.task(name="own", max_running=5, max_running_per_key=2)
    async def own(tx: JobTransaction, n: int) -> int:
        return n

    @app.task(name="free", max_running_per_key=1)
    async def free(ctx: JobContext, n: int) -> int:
        await asyncio.sleep(0.002)
        return n

    async with app:
        await app.set_tenant("A", max_running=3)
        for n in range(120):
            task = own if n % 2 else free
            await task.options(tenant="AB"[n // 2 % 2], key=f"k{n % 6}").enqueue(n)
        async with watched(watcher), app.worker(concurrency=20), app.worker(concurrency=20):
            await all_done(watcher, 120)
        tenants = await app.list_tenants()
    assert watcher.most["tenant", "A"] <= 3
    assert watcher.most["task", "own"] <= 5
    assert all(number <= (2 if name[1] == "own" else 1) for name, number in watcher.most.items() if name[0] == "key")
    assert watcher.looks > 10 and watcher.most["tenant", "B"] > 0
    for table in ("live", "parked", "held", "scheduled"):
        assert await watcher.rows(f"SELECT count(*) FROM aioqueue.{table}") == [(0,)], table
    assert tenants == [TenantStatus(tenant="A", weight=1, max_running=3, paused=False, running=0, parked=0)]
