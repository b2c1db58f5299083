"""The application that test_uvicorn.py serves: a copy of this file, which it changes for --reload."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from fastapi import FastAPI

from aioqueue import AioQueue, JobContext, LeaseSettings
from aioqueue.contrib.fastapi import EVERY_TENANT, jobs_router, lifespan

VERSION = int(os.environ.get("WEB_VERSION", "1"))

LEASE = float(os.environ.get("WEB_LEASE", "30"))

app = AioQueue(
    os.environ["AIOQUEUE_DSN"], schema=os.environ["AIOQUEUE_SCHEMA"], lease=LeaseSettings(lease=LEASE, rescue_interval=0.2)
)
started = asyncio.Event()


@app.task(name="process")
async def process() -> int:
    """Say where it ran."""
    return os.getpid()


@app.task(name="hold")
async def hold(ctx: JobContext) -> int:
    """Never end in the first version."""
    started.set()
    await ctx.progress(0.5, "half")
    if VERSION == 1:
        await asyncio.Event().wait()
    return VERSION


@asynccontextmanager
async def failing(_web: FastAPI) -> AsyncIterator[None]:
    async with app, app.worker(grace=0.2):
        await started.wait()
        raise RuntimeError("the lifespan fails")
        yield


web = FastAPI(lifespan=failing if "WEB_FAILS" in os.environ else lifespan(app, grace=0.2))
web.include_router(jobs_router(app, auth=lambda: EVERY_TENANT))


@web.get("/waiting")
async def waiting() -> list[int]:
    """Tell who waits for a job in this process: of results and streams."""
    return [len(app.services("a test").reader._waiting)]


@web.post("/{task}", status_code=202)
async def enqueue(task: str) -> UUID:
    return (await app.get(task).enqueue()).id
