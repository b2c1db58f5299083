"""The web process of row 9: the same handler as a background task of the framework, and as a task of aioqueue."""

from __future__ import annotations

import asyncio
import os

import psycopg
from fastapi import BackgroundTasks, FastAPI

from aioqueue import AioQueue, JobTransaction, LeaseSettings, WorkerSettings
from aioqueue.contrib.fastapi import lifespan

SECONDS = 1.5
DSN = os.environ["AIOQUEUE_DSN"]
app = AioQueue(DSN, lease=LeaseSettings(lease=2.0), worker=WorkerSettings(poll=0.1))
web = FastAPI(lifespan=lifespan(app))


async def convert(document: str) -> None:
    """The handler: slow work, its result, and the document's state."""
    await asyncio.sleep(SECONDS)
    async with await psycopg.AsyncConnection.connect(DSN) as conn:
        await conn.execute("INSERT INTO naive.effect (job, worker) VALUES (%s, 'result')", [document])
        await conn.execute("UPDATE naive.job SET state = 'converted' WHERE work = %s", [document])


@app.task(name="convert")
async def convert_task(tx: JobTransaction, document: str) -> None:
    """The same as a task."""
    await asyncio.sleep(SECONDS)
    await tx.execute("INSERT INTO naive.effect (job, worker) VALUES (%s, 'result')", [document])
    await tx.execute("UPDATE naive.job SET state = 'converted' WHERE work = %s", [document])


@web.post("/background")
async def background(tasks: BackgroundTasks) -> None:
    """Ask for a conversion, the naive way."""
    async with await psycopg.AsyncConnection.connect(DSN) as conn:
        await conn.execute("INSERT INTO naive.job (work, state) VALUES ('background', 'converting')")
    tasks.add_task(convert, "background")


@web.post("/task")
async def task() -> None:
    """Ask for a conversion, with the job in the row's own transaction."""
    async with await psycopg.AsyncConnection.connect(DSN) as conn:
        await conn.execute("INSERT INTO naive.job (work, state) VALUES ('task', 'converting')")
        await convert_task.options(on=conn).enqueue(document="task")
