"""The pooled connection is closed underneath while the worker works; then the outcome is written."""

from __future__ import annotations

import asyncio
import logging

import psycopg
from psycopg_pool import AsyncConnectionPool

from aioqueue import AioQueue, JobContext, WorkerSettings

from . import naive
from .stage import Place, Stage, Verdict, value

TITLE = "connections closed underneath during a long job"
PUBLISHED = "the write fails, the job is recorded as failed and the whole work runs again"
KILL = (
    "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
    " WHERE usename = 'aioqueue_worker' AND datname = current_database()"
)
JOBS = 500


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    runs, errors = await _naive(place)
    verdict.naive = f"the work ran {runs} times; {errors} write failed"
    verdict.published((runs, errors) == (2, 1), f"{runs} runs, {errors} errors")
    await _ours(place, verdict)
    return verdict


async def _naive(place: Place) -> tuple[int, int]:
    """Runs of the work, and writes that failed."""
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)
    runs = errors = 0
    async with place.connection() as boss, AsyncConnectionPool(place.dsn("worker"), min_size=1, max_size=1, open=False) as pool:
        await boss.execute("INSERT INTO naive.job DEFAULT VALUES")
        while True:
            async with pool.connection() as conn:
                row = await (await conn.execute(naive.CLAIM, {"worker": "naive", "lease": 3600})).fetchone()
            if row is None:
                return runs, errors
            runs += 1  # 40 minutes of work; a firewall forgets the connection
            if runs == 1:
                await boss.execute(KILL.encode())
            try:
                async with pool.connection() as conn:
                    await conn.execute("UPDATE naive.job SET state = 'done' WHERE id = %s", [row[0]])
            except psycopg.OperationalError:
                errors += 1
                async with pool.connection() as conn:
                    await conn.execute("UPDATE naive.job SET state = 'queued', error = 'failed' WHERE id = %s", [row[0]])


async def _ours(place: Place, verdict: Verdict) -> None:
    app = AioQueue(place.dsn("worker"), worker=WorkerSettings(poll=0.2))
    runs = []

    @app.task(name="long")
    async def long(ctx: JobContext) -> str:
        runs.append(ctx.attempt)
        async with place.connection() as boss:
            killed = await value(boss, KILL)
        return f"{killed} connections"

    @app.task(name="none")
    async def none() -> None:
        pass

    async with app, place.connection() as boss, app.worker():
        job = await long.enqueue()
        killed = await job.result(timeout=60)
        status = await job.status()
        # Idle sessions have told the server's statistics within a second or two what they did.
        count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        await asyncio.sleep(2.5)
        before = await value(boss, count)
        await asyncio.gather(*(job.result(timeout=60) for job in await none.enqueue_many([{}] * JOBS)))
        await asyncio.sleep(2.5)
        each = (await value(boss, count) - before) / JOBS
    verdict.promise(runs == [1] and status.attempt == 1, f"one attempt: {runs}")
    verdict.promise(each < 0.5, f"no round trip per job to look at connections: {each:.2f} transactions for each of {JOBS} jobs")
    verdict.ours = (
        f"recorded on a fresh connection after {killed} were closed, {len(runs)} attempt; "
        f"{each:.2f} transactions for each of {JOBS} jobs"
    )
