"""An application that embeds a worker answers through an outage longer than the lease, and its worker goes on by itself."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from aioqueue.contrib.fastapi import lifespan
from aioqueue.events import DatabaseLost, JobClaimed, LeaseLost, WorkerStarted, WorkerStopped
from tests.outage.scene import PATIENCE, make_scene
from tests.outage.server import OutageServer

pytestmark = pytest.mark.anyio


async def test_an_outage_takes_down_neither_the_application_nor_its_worker(outage: OutageServer) -> None:
    scene = make_scene(outage, lease=2.0)
    web = FastAPI(lifespan=lifespan(scene.app))

    @web.get("/alive")
    async def alive() -> str:
        return "yes"

    @web.post("/quick")
    async def quick() -> str:
        return str((await scene.quick.enqueue(7)).id)

    transport = httpx.ASGITransport(web, raise_app_exceptions=False)
    async with web.router.lifespan_context(web), httpx.AsyncClient(transport=transport, base_url="http://web") as client:
        held = await scene.hold.enqueue()
        await scene.seen.wait(JobClaimed, 1)
        await asyncio.to_thread(outage.stop)
        await scene.until(lambda: bool(scene.seen.all(LeaseLost)))
        assert (await client.get("/alive")).json() == "yes"
        assert (await client.post("/quick")).status_code == 500, "the request's own error"
        assert scene.seen.all(DatabaseLost) and not scene.seen.all(WorkerStopped)
        await asyncio.to_thread(outage.start)
        scene.gate.set()
        answer = await client.post("/quick", timeout=PATIENCE)
        assert await scene.app.job(answer.json()).result(PATIENCE) == 7
        await held.result(PATIENCE)
        assert len(scene.seen.all(WorkerStarted)) == 1
    assert len(scene.seen.all(WorkerStopped)) == 1 and not scene.app.is_open
