"""Limits behind a pooler in transaction mode: exact over three workers, of which one was lost; nothing stays parked."""

import asyncio
from collections import Counter

import pytest
from psycopg import AsyncConnection

from aioqueue import JobContext
from aioqueue.settings import WorkerSettings
from aioqueue.sql import as_sql
from aioqueue.store import Store
from tests.kit import PATIENCE, MakeApp
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio
QUICK = WorkerSettings(poll=0.05, tick=0.05)
RUNNING = "SELECT tenant, count(*) FROM aioqueue.live WHERE worker IS NOT NULL GROUP BY tenant"


async def test_never_above_the_limit_and_nothing_stays_parked(
    make_pooled: MakeApp, database: Database, schema: str, pooled_dsn: str
) -> None:
    apps = [make_pooled(worker=QUICK) for _ in range(2)]
    for app in apps:

        @app.task(name="short", max_running_per_key=2)
        async def short(ctx: JobContext, n: int) -> int:
            await asyncio.sleep(0.002)
            return n

    async with (
        apps[0],
        await AsyncConnection.connect(database.dsn("owner"), autocommit=True) as conn,
        await AsyncConnection.connect(pooled_dsn, autocommit=True, prepare_threshold=None) as other,
    ):
        await apps[0].set_tenant("T", max_running=3)
        task = apps[0].get("short")
        for n in range(100):
            await task.options(tenant="TU"[n % 2], key=f"k{n % 5}").enqueue(n)
        gone = Session(other, Store(schema))
        killed = await gone.register()
        assert len(await gone.claim(killed, 4)) == 4
        most: Counter[str] = Counter()
        async with apps[0].worker(concurrency=10), apps[1].worker(concurrency=10), asyncio.timeout(PATIENCE):
            ended, looks = 0, 0
            while ended < 100:
                for tenant, number in await (await conn.execute(as_sql(RUNNING, schema))).fetchall():
                    most[tenant] = max(most[tenant], number)
                (ended,) = await (await conn.execute(as_sql("SELECT count(*) FROM aioqueue.outcome", schema))).fetchone() or (0,)
                looks += 1
                if looks == 20:
                    await Session(conn, Store(schema)).end_lease(killed)
        assert most["T"] == 3 and most["U"]
        for table in ("live", "held", "parked"):
            assert await (await conn.execute(as_sql(f"SELECT FROM aioqueue.{table}", schema))).fetchall() == [], table
