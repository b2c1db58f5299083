"""The app whose worker processes the tests of this folder start and kill: `-A tests.flow.tasks:app`.

Every task writes what it does into table flow.note, on a connection of its own that no outage of the queue's touches, and a
task that is to be caught in the middle waits for the row in flow.gate that lets it go on.
"""

import asyncio
import os
import time
from collections.abc import Callable

import psycopg

from aioqueue import AioQueue, JobContext, JobTransaction
from aioqueue.settings import LeaseSettings, WorkerSettings

LEASE = "FLOW_LEASE"
POLL = "FLOW_POLL"


def made(dsn: str | None = None, *, schema: str, environ: Callable[[str], str | None] = os.environ.get) -> AioQueue:
    """An app with these tasks; lease and poll from the environment, else the defaults."""
    lease, poll = environ(LEASE), environ(POLL)
    new = AioQueue(
        dsn,
        schema=schema,
        lease=LeaseSettings(lease=float(lease), rescue_interval=0.2) if lease else LeaseSettings(),
        worker=WorkerSettings(poll=float(poll)) if poll else WorkerSettings(),
    )
    for task in (quick, hold, bomb, block, counted):
        new.task(name=task.__name__)(task)
    return new


async def _evidence() -> psycopg.AsyncConnection[tuple[object, ...]]:
    while True:
        try:
            return await psycopg.AsyncConnection.connect(
                os.environ["AIOQUEUE_DSN"], autocommit=True, application_name="evidence", prepare_threshold=None
            )
        except psycopg.OperationalError:
            await asyncio.sleep(0.05)


async def _note(ctx: JobContext, what: str) -> None:
    while True:
        try:
            async with await _evidence() as conn:
                await conn.execute(
                    "INSERT INTO flow.note (job_id, attempt, pid, what) VALUES (%s, %s, %s, %s)",
                    (ctx.job_id, ctx.attempt, os.getpid(), what),
                )
                return
        except psycopg.OperationalError:
            await asyncio.sleep(0.05)


async def quick(ctx: JobContext, number: int = 0) -> int:
    """Note that it ran."""
    await _note(ctx, "start")
    return number


async def hold(ctx: JobContext) -> None:
    """Run until the gate is open."""
    await _note(ctx, "start")
    async with await _evidence() as conn:
        while not await (await conn.execute("SELECT 1 FROM flow.gate")).fetchone():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await _note(ctx, "end")


async def bomb(ctx: JobContext) -> None:
    """Take the whole process along."""
    await _note(ctx, "start")
    os._exit(1)


async def block(ctx: JobContext, seconds: float) -> None:
    """Block the event loop."""
    await _note(ctx, "start")
    time.sleep(seconds)  # noqa: ASYNC251 - that is the point
    await _note(ctx, "end")


async def counted(tx: JobTransaction) -> None:
    """Write one row in the job's own transaction."""
    await tx.execute("INSERT INTO flow.counted (job_id) VALUES (%s)", (tx.job_id,))
    await asyncio.sleep(0.01)


app = made(schema=os.environ.get("AIOQUEUE_SCHEMA", "aioqueue"))
