"""A job whose row somebody holds keeps no other outcome waiting, and is written once it is free."""

import asyncio

import psycopg
import pytest

from aioqueue import AioQueue
from aioqueue.events import Event, JobRecorded

pytestmark = pytest.mark.anyio


async def test_a_cancel_left_open_in_a_transaction_holds_up_only_its_own_job(worker_dsn: str, schema: str) -> None:
    recorded: asyncio.Queue[JobRecorded] = asyncio.Queue()

    def note(event: Event) -> None:
        if isinstance(event, JobRecorded):
            recorded.put_nowait(event)

    app = AioQueue(worker_dsn, schema=schema, observers=[note])
    started = asyncio.Event()
    end = asyncio.Event()

    @app.task(name="held")
    async def held() -> int:
        started.set()
        await end.wait()
        return 1

    @app.task(name="other")
    async def other() -> int:
        return 2

    async with app, app.worker(), await psycopg.AsyncConnection.connect(worker_dsn) as conn:
        job = await held.enqueue()
        await started.wait()
        assert await app.store.cancel_job(conn, job.id) == "running"
        end.set()
        assert [await (await other.enqueue()).result(10) for _ in range(3)] == [2, 2, 2]
        assert {(await recorded.get()).task for _ in range(3)} == {"other"}
        await conn.rollback()
        assert await job.result(10) == 1
