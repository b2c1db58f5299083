"""The tasks of the worker processes: `-A benchmarks.published.tasks:app`. Each run leaves its traces."""

from __future__ import annotations

import asyncio
import os
import time

import psycopg

from aioqueue import AioQueue, JobContext, JobTransaction, LeaseSettings, Retry, WorkerSettings

LEASE = float(os.environ.get("PUBLISHED_LEASE", "30"))
app = AioQueue(lease=LeaseSettings(lease=LEASE), worker=WorkerSettings(poll=0.1))
WHO = f"process {os.getpid()}"


async def trace(job: object, what: str) -> None:
    """Write that something happened, on a connection of its own: whatever becomes of the job, this stays."""
    direct = os.environ.get("PUBLISHED_DIRECT") or os.environ["AIOQUEUE_DSN"]
    async with await psycopg.AsyncConnection.connect(direct, autocommit=True) as conn:
        await conn.execute("INSERT INTO naive.trace (job, worker, what) VALUES (%s, %s, %s)", [str(job), WHO, what])


@app.task(name="crash", retry=Retry(max_attempts=3))
async def crash(ctx: JobContext) -> None:
    """End the process in the middle of the work."""
    await trace(ctx.job_id, "start")
    os._exit(86)


@app.task(name="ordinary")
async def ordinary(ctx: JobContext) -> None:
    """Note that it ran."""
    await trace(ctx.job_id, "start")


@app.task(name="long")
async def long(ctx: JobContext, seconds: float) -> None:
    """Take its time."""
    await trace(ctx.job_id, "start")
    await asyncio.sleep(seconds)
    await trace(ctx.job_id, "end")


@app.task(name="writes")
async def writes(tx: JobTransaction, seconds: float) -> None:
    """Write in the job's own transaction, then take its time, so that it can be stopped in between."""
    await tx.execute("INSERT INTO naive.effect (job, worker) VALUES (%s, %s)", [str(tx.job_id), WHO])
    await trace(tx.job_id, "start")
    await asyncio.sleep(seconds)


@app.task(name="lingers")
async def lingers(ctx: JobContext) -> None:
    """Note in a file, by the machine's one clock, when it starts and when it is cancelled; end when a second one does."""
    with open(os.environ["PUBLISHED_DIARY"], "a", buffering=1, encoding="utf-8") as diary:  # noqa: ASYNC230 - one line
        diary.write(f"start {ctx.attempt} {time.monotonic()}\n")
        try:
            await asyncio.sleep(0.2 if ctx.attempt > 1 else 3600)
        except asyncio.CancelledError:
            diary.write(f"cancelled {ctx.attempt} {time.monotonic()}\n")
            raise


@app.task(name="locks", timeout=600)
async def locks(tx: JobTransaction) -> None:
    """Lock a row of the naive table in the job's own transaction and keep it."""
    await tx.execute("UPDATE naive.job SET worker = %s", [WHO])
    await asyncio.sleep(3600)
