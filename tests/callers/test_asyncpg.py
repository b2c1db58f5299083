"""asyncpg beyond what all libraries share: connections that a pool lends, connections that end."""

import gc

import asyncpg
import pytest

from aioqueue import AioQueue, JobNotFound
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_a_connection_that_went_back_to_its_pool_has_no_open_transaction(
    app: AioQueue, client_dsn: str, boss: Session
) -> None:
    async with asyncpg.create_pool(client_dsn, min_size=1, max_size=1) as pool:
        async with pool.acquire() as conn:
            await conn.execute("BEGIN")
            job = await app.get("add").options(on=conn).enqueue(1)
        with pytest.raises(JobNotFound):  # the pool rolled it back
            await job.status()
        async with pool.acquire() as conn, conn.transaction():
            job = await app.get("add").options(on=conn).enqueue(2)
        assert (await job.status()).state == "ready"
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 1


async def test_a_connection_that_ended_has_no_open_transaction(app: AioQueue, client_dsn: str) -> None:
    conn = await asyncpg.connect(client_dsn)
    await conn.execute("BEGIN")
    job = await app.get("add").options(on=conn).enqueue(1)
    await conn.close()
    with pytest.raises(JobNotFound):
        await job.status()


async def test_a_connection_that_is_garbage_is_not_kept_alive(app: AioQueue, client_dsn: str) -> None:
    conn = await asyncpg.connect(client_dsn)
    await conn.execute("BEGIN")
    job = await app.get("add").options(on=conn).enqueue(1)
    with pytest.warns(ResourceWarning):
        del conn
        gc.collect()
    with pytest.raises(JobNotFound):
        await job.result(30)
