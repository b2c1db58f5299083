"""Two workers on one queue, SKIP LOCKED or plain FOR UPDATE, the first holding its claim; thirty of aioqueue's."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from aioqueue.job import lane, new_job_id
from aioqueue.store import LOWEST_ID, LaneScan, Store
from benchmarks.mixed_jobs import NewJob, enqueue_many

from .stage import Place, Stage, Verdict

TITLE = "workers that claim at the same time"
PUBLISHED = "SKIP LOCKED 1.12 ms, plain FOR UPDATE 3.035 s beside a claim held for 3 s"
WORKERS = 30
EACH = 20
TAKE = "SELECT id FROM naive.job WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE"


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    hold = float(stage.size(1, 3))
    skip, wait = await _naive(place, f"{TAKE} SKIP LOCKED", hold), await _naive(place, TAKE, hold)
    verdict.naive = f"SKIP LOCKED {1000 * skip:.2f} ms, plain FOR UPDATE {wait:.3f} s beside a claim held for {hold:g} s"
    verdict.published(skip < hold / 2 < wait, "only plain FOR UPDATE waits")
    await _ours(place, hold, verdict)
    return verdict


async def _naive(place: Place, take: str, hold: float) -> float:
    """Seconds of the second worker's claim."""
    async with place.connection("worker") as first, place.connection("worker") as second:
        await first.execute("INSERT INTO naive.job DEFAULT VALUES")
        await first.execute("INSERT INTO naive.job DEFAULT VALUES")
        await first.execute("BEGIN")
        await first.execute(take.encode())

        async def release() -> None:
            await asyncio.sleep(hold)
            await first.execute("ROLLBACK")

        task = asyncio.create_task(release())
        began = time.perf_counter()
        await second.execute(take.encode())
        took = time.perf_counter() - began
        await task
    return took


async def _ours(place: Place, hold: float, verdict: Verdict) -> None:
    """Thirty workers take all jobs, one at a time, while the first one's claim stays open."""
    store, one = Store("aioqueue"), lane("default", 0)
    scans = [LaneScan(one, (0, LOWEST_ID), 1)]
    taken: list[object] = []
    slowest = [0.0]
    async with AsyncExitStack() as stack:
        conns = [await stack.enter_async_context(place.connection("worker")) for _ in range(WORKERS)]
        for number, conn in enumerate(conns, 1):
            await store.register_worker(
                conn,
                worker=number,
                host="published",
                pid=number,
                version="1",
                queues=["default"],
                concurrency=1,
                lease=3600.0,
                tasks=[],
            )
        jobs = [
            NewJob(id=new_job_id(), task="none", payload="{}", queue="default", priority=0, tenant=str(n % 7), max_attempts=1)
            for n in range(WORKERS * EACH)
        ]
        await enqueue_many(store, conns[0], jobs)
        await conns[0].execute("BEGIN")
        held = (await store.claim(conns[0], worker=1, lanes=scans, limit=1)).jobs

        async def work(number: int) -> None:
            while True:
                began = time.perf_counter()
                found = (await store.claim(conns[number], worker=number + 1, lanes=scans, limit=1)).jobs
                slowest[0] = max(slowest[0], time.perf_counter() - began)
                if not found:
                    return
                taken.extend(job.job_id for job in found)

        await asyncio.gather(*(work(number) for number in range(1, WORKERS)), asyncio.sleep(hold))
        await conns[0].execute("COMMIT")
    taken += [job.job_id for job in held]
    verdict.promise(len(taken) == len(set(taken)) == len(jobs), f"each job once: {len(taken)} claims of {len(set(taken))} jobs")
    verdict.promise(slowest[0] < hold, f"no claim waits for another: {slowest[0]:.3f} s")
    verdict.ours = (
        f"{WORKERS} workers, {len(jobs)} jobs, each once; the slowest claim {1000 * slowest[0]:.0f} ms beside one held {hold:g} s"
    )
