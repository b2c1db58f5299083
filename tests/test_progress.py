"""progress and track: what a task says about how far it is, from the call to who asks for the job."""

import asyncio

import pytest

from aioqueue import AioQueue, JobContext

pytestmark = pytest.mark.anyio


async def test_whoever_asks_sees_how_far_the_job_is(app: AioQueue) -> None:
    inside, goes_on = asyncio.Event(), asyncio.Event()

    @app.task(name="slow")
    async def slow(ctx: JobContext) -> int:
        await ctx.progress(0.25, "page 1 of 4")
        inside.set()
        await goes_on.wait()
        return 7

    job = await app.get("slow").enqueue()
    assert await job.progress() is None
    told = []
    async with app.worker():
        async for event in job.watch():
            told.append(event)
            print(event)
            if len(told) == 3 or getattr(event, "progress", None):
                goes_on.set()
    print(told)
