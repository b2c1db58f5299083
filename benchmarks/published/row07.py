"""Queued jobs taken one at a time while another session holds the xmin horizon: median time and buffers of each block."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from psycopg import AsyncConnection

from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.job import NewJob, lane, new_job_id
from aioqueue.maintenance.tick import Ticker
from aioqueue.settings import PoolSettings
from aioqueue.store import LOWEST_ID, LaneScan, Store
from benchmarks.kit import held_horizon, percentile

from .stage import Place, Stage, Verdict

TITLE = "claims under a held xmin horizon"
PUBLISHED = "0.7 → 8.3 ms in a straight line over 100,000; 654 buffers against 42 after 50,000; the same for DELETE"
BLOCKS = 10
MOST = 1.2
TICK = 0.05
FORMS = {
    "status": "UPDATE naive.job SET state = 'running' WHERE id = (SELECT id FROM naive.job WHERE state = 'queued' ORDER BY id LIMIT 1"
    " FOR UPDATE SKIP LOCKED)",
    "delete": "DELETE FROM naive.job WHERE id = (SELECT id FROM naive.job WHERE state = 'queued' ORDER BY id LIMIT 1"
    " FOR UPDATE SKIP LOCKED)",
}


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    naive_jobs = stage.size(8_000, 100_000)
    said, ours = [], []
    for form in FORMS:
        blocks, buffers = await _naive(await stage.place(), form, naive_jobs)
        said.append(f"{form}: {blocks[0]:.2f} → {blocks[-1]:.2f} ms, {buffers[0]} → {buffers[1]} buffers over {naive_jobs:,}")
        verdict.published(blocks[-1] > 1.5 * blocks[0], f"{form}: it slows down")
    for jobs in (naive_jobs, *([1_000_000] if stage.full else [])):
        free, _ = await _ours(await stage.place(), "free", jobs)
        for how in ("xid", "reader"):
            blocks, buffers = await _ours(await stage.place(), how, jobs)
            # Against a free database in its own last block, since a busy machine is not the same from one minute to the next.
            ratio = (blocks[-1] / blocks[0]) / max(1.0, free[-1] / free[0])
            verdict.promise(ratio <= MOST, f"last block within {MOST} of the first ({how}, {jobs:,}): {ratio:.2f}")
            verdict.promise(buffers[1] <= 1.5 * buffers[0] + 10, f"same buffers ({how}, {jobs:,}): {buffers}")
            ours.append(
                f"{how}: {blocks[0]:.2f} → {blocks[-1]:.2f} ms ({ratio:.2f}), {buffers[0]} → {buffers[1]} buffers over {jobs:,}"
            )
    verdict.naive, verdict.ours = "; ".join(said), "; ".join(ours)
    return verdict


async def _blocks(jobs: int, take: Callable[[], Awaitable[float]]) -> list[float]:
    """Milliseconds of a claim in each block: the lower quartile, since a busy machine only adds."""
    size = jobs // BLOCKS
    return [1000 * percentile([await take() for _ in range(size)], 0.25) for _ in range(BLOCKS)]


async def _buffers(conn: AsyncConnection[Any], statement: str, params: tuple[object, ...] = ()) -> int:
    """Buffers that a statement reads; it is rolled back."""
    async with conn.transaction(force_rollback=True):
        rows = await (await conn.execute(f"EXPLAIN (ANALYZE, BUFFERS) {statement}".encode(), params)).fetchall()
    found = re.search(r"Buffers: shared hit=(\d+)(?: read=(\d+))?", "\n".join(row[0] for row in rows))
    return 0 if found is None else int(found[1]) + int(found[2] or 0)


async def _naive(place: Place, form: str, jobs: int) -> tuple[list[float], tuple[int, int]]:
    statement = FORMS[form]
    async with place.connection() as boss, place.connection("worker") as conn:
        await boss.execute("SET synchronous_commit = off")
        await conn.execute("SET synchronous_commit = off")
        await boss.execute("INSERT INTO naive.job (work) SELECT '' FROM generate_series(1, %s::int)", [jobs + 1])
        await boss.execute("VACUUM (ANALYZE) naive.job")

        async def take() -> float:
            began = time.perf_counter()
            await conn.execute(statement.encode())
            return time.perf_counter() - began

        with held_horizon(place.dsn("superuser"), "xid"):
            before = await _buffers(conn, statement)
            blocks = await _blocks(jobs, take)
            after = await _buffers(conn, statement)
    return blocks, (before, after)


async def _ours(place: Place, how: str, jobs: int) -> tuple[list[float], tuple[int, int]]:
    store = Store("aioqueue")
    one = lane("default", 0)
    floors = Floors([one], LOWEST_ID)
    database = Database(place.dsn("worker"), PoolSettings(size=3))
    await database.open()
    ticker = Ticker(database, store, floors, worker=lambda: 1, restarted=lambda: None)
    ticker._next_full_look = float("inf")  # the net below the exact rule would hide what it costs without
    async with place.connection() as boss:
        await boss.execute(f"ALTER DATABASE {place.name} SET synchronous_commit = off".encode())
        await boss.execute("ALTER TABLE aioqueue.live SET (autovacuum_enabled = false)")
    async with place.connection("worker") as conn:
        conn.prepare_threshold = 1
        await store.register_worker(
            conn, worker=1, host="published", pid=1, version="1", queues=["default"], concurrency=1, lease=86_400.0, tasks=[]
        )
        for first in range(0, jobs, 5000):
            new = [
                NewJob(
                    id=new_job_id(), task="none", payload="{}", queue="default", priority=0, tenant=str(n % 100), max_attempts=1
                )
                for n in range(first, min(first + 5000, jobs))
            ]
            await store.enqueue_many(conn, new)

        async def take() -> float:
            began = time.perf_counter()
            (job,) = (await store.claim(conn, worker=1, lanes=[LaneScan(one, floors[one].start, 1)], limit=1)).jobs
            took = time.perf_counter() - began
            floors.claimed(one, job.vt)
            return took

        async def tick() -> None:
            while True:
                await ticker.tick()
                await asyncio.sleep(TICK)

        scan = "SELECT * FROM aioqueue.claim(1, %s::bigint[], %s::bigint[], %s::uuid[], '{0}', '{1}', 1, '{}')"

        async def buffers() -> int:
            for _ in range(10):
                await ticker.tick()
                await asyncio.sleep(0.02)
            vt, tie = floors[one].start
            await _buffers(conn, scan, ([one], [vt], [tie]))  # plans and catalogue
            return await _buffers(conn, scan, ([one], [vt], [tie]))

        with held_horizon(place.dsn("superuser"), how):
            before = await buffers()
            ticking = asyncio.create_task(tick())
            try:
                blocks = await _blocks(jobs - 2, take)
            finally:
                ticking.cancel()
                await asyncio.wait([ticking])
            after = await buffers()
    await database.close()
    return blocks, (before, after)
