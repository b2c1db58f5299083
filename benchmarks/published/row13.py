"""Connections: thirty workers that hold three each, two API processes, a stock server; a thousand jobs on one small pool."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import psycopg

from aioqueue import AioQueue
from aioqueue.doctor import connections
from aioqueue.doctor.examination import Examination
from aioqueue.store import Store

from .stage import Stage, Verdict, value

TITLE = "connections of a stock server"
PUBLISHED = 'refused with "remaining connection slots are reserved …", the API first: an ordinary role gets 97'
JOBS = 1000


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    async with place.connection() as boss:
        said, served = "nothing refused", 0
        async with AsyncExitStack() as stack:
            for _ in range(30 * 3):
                await stack.enter_async_context(place.connection("worker"))
            try:
                for _ in range(2 * 15):
                    await stack.enter_async_context(place.connection("client"))
                    served += 1
            except psycopg.OperationalError as error:
                said = str(error).strip().rpartition("FATAL:")[2].strip()
        verdict.naive = f"90 held by workers; the API has {served} of 30, then: {said}"
        verdict.published("remaining connection slots are reserved" in said, said)

        app = AioQueue(place.dsn("worker"))
        running, ends = [0], asyncio.Event()

        @app.task(name="waits")
        async def waits() -> None:
            running[0] += 1
            await ends.wait()

        most = 0
        async with app, app.worker(concurrency=JOBS):
            jobs = await waits.enqueue_many([{}] * JOBS)
            async with asyncio.timeout(120):
                while running[0] < JOBS:
                    most = max(most, await value(boss, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"))
                    await asyncio.sleep(0.02)
            most = max(most, await value(boss, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"))
            examination = Examination(conn=boss, store=Store("aioqueue"), setting="app.tenant")
            await connections.look(examination)
            budget = examination.facts["connections"]
            ends.set()
            await asyncio.gather(*(job.result(timeout=60) for job in jobs))
    documented = app.settings.pool.size + 2
    verdict.promise(most <= documented, f"{JOBS:,} jobs at once on {documented} connections: {most}")
    verdict.promise(budget["workers"] == 1 and budget["need"] == documented, f"the doctor's sum: {budget}")
    allowed = budget["limits"]["the server"]
    verdict.ours = (
        f"{JOBS:,} jobs at once on {most} connections; doctor: 1 worker needs up to {budget['need']}, the server allows {allowed}"
    )
    return verdict
