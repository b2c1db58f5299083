"""Queued jobs taken while another session holds the xmin horizon: time of a claim of one and buffers from block to block.

Of each block of 10,000 (of a million: the first and the last, and eight between) some claims of one are timed; the other jobs are
taken by larger claims, which leave the same dead entries.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from psycopg import AsyncConnection

from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.job import lane
from aioqueue.maintenance.tick import Ticker
from aioqueue.settings import PoolSettings
from aioqueue.store import LOWEST_ID, LaneScan, Store
from benchmarks.held_horizon import ENQUEUE
from benchmarks.kit import held_horizon, percentile, rotated

from .stage import Place, Stage, Verdict

TITLE = "claims under a held xmin horizon"
PUBLISHED = "0.7 → 8.3 ms in a straight line over 100,000; 654 buffers against 42 after 50,000; the same for DELETE"
BLOCKS = 10
MOST = 1.2
TICK = 0.05
SLICE = 25
"""Claims in a row before it is another's turn: a busy machine is the same for all then."""
TIMED = 500
"""Claims of one in each block; all of a smaller one."""
MANY = 250
"""Jobs of a larger claim."""
NEXT = "IN (SELECT id FROM naive.job WHERE state = 'queued' ORDER BY id LIMIT {} FOR UPDATE SKIP LOCKED)"
FORMS = {
    "status": f"UPDATE naive.job SET state = 'running' WHERE id {NEXT}",
    "delete": f"DELETE FROM naive.job WHERE id {NEXT}",
}
HELD = ("xid", "reader")


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    jobs = stage.size(4_000, 100_000)
    said = []
    for form in FORMS:
        blocks, buffers = await _naive(await stage.place(), form, jobs)
        said.append(f"{form}: {blocks[0]:.2f} → {blocks[-1]:.2f} ms, {buffers[0]} → {buffers[1]} buffers over {jobs:,}")
        verdict.published(blocks[-1] > 1.5 * blocks[0], f"{form}: it slows down")
    verdict.naive = "; ".join(said)
    ours = [await _ours(stage, number, verdict) for number in (jobs, *([1_000_000] if stage.full else []))]
    verdict.ours = "; ".join(ours)
    return verdict


async def _ours(stage: Stage, jobs: int, verdict: Verdict) -> str:
    """Take turns under each horizon and in a free database; the free one's last block beside its first is the machine's."""
    times: dict[str, list[list[float]]] = {how: [[] for _ in range(BLOCKS)] for how in ("free", *HELD)}
    buffers: dict[str, list[int]] = {}
    async with AsyncExitStack() as stack:
        places = {how: await stage.place() for how in times}
        await asyncio.gather(*(_fill(place, jobs + SLICE) for place in places.values()))
        takers = {how: await stack.enter_async_context(_taker(place, how)) for how, place in places.items()}
        for how, taker in takers.items():
            buffers[how] = [await taker.buffers()]
        timed, rest = split(jobs)
        for block in range(BLOCKS):
            for turn in range(timed // SLICE):
                for how in rotated(list(takers), turn):
                    times[how][block] += [await takers[how].take() for _ in range(SLICE)]
            if block < BLOCKS - 1:
                await asyncio.gather(*(taker.take_many(rest) for taker in takers.values()))
        for how, taker in takers.items():
            buffers[how].append(await taker.buffers())
    cost = {how: [1000 * percentile(block, 0.25) for block in blocks] for how, blocks in times.items()}
    said = []
    for how in HELD:
        ratio = (cost[how][-1] / cost[how][0]) / (cost["free"][-1] / cost["free"][0])
        first, last = buffers[how]
        verdict.promise(ratio <= MOST, f"last block within {MOST} of the first, {how}, {jobs:,} jobs: {ratio:.2f}")
        verdict.promise(last <= MOST * first + 10, f"same buffers, {how}, {jobs:,} jobs: {first} → {last}")
        said.append(f"{how}: {cost[how][0]:.2f} → {cost[how][-1]:.2f} ms ({ratio:.2f}), {first} → {last} buffers over {jobs:,}")
    return "; ".join(said)


def split(jobs: int) -> tuple[int, int]:
    """Claims of one in each of the blocks, and jobs that are taken between two of them."""
    timed = min(TIMED, jobs // BLOCKS) // SLICE * SLICE
    return timed, (jobs - BLOCKS * timed) // (BLOCKS - 1)


class Taker:
    """Claims one job at a time, with a worker's floors."""

    def __init__(self, conn: AsyncConnection[Any], ticker: Ticker, floors: Floors) -> None:
        self._conn = conn
        self._ticker = ticker
        self._floors = floors
        self._store = Store("aioqueue")
        self._lane = lane("default", 0)

    async def take(self) -> float:
        """Claim one; the seconds that it took."""
        scan = LaneScan(self._lane, self._floors[self._lane].start, 1)
        began = time.perf_counter()
        (job,) = (await self._store.claim(self._conn, worker=1, lanes=[scan], limit=1)).jobs
        took = time.perf_counter() - began
        self._floors.claimed(self._lane, job.vt)
        return took

    async def take_many(self, jobs: int) -> None:
        """Claim so many, a good number at a time."""
        while jobs > 0:
            scan = LaneScan(self._lane, self._floors[self._lane].start, min(MANY, jobs))
            found = (await self._store.claim(self._conn, worker=1, lanes=[scan], limit=min(MANY, jobs))).jobs
            for job in found:
                self._floors.claimed(self._lane, job.vt)
            jobs -= len(found)

    async def buffers(self) -> int:
        """Buffers of a claim after some ticks."""
        for _ in range(10):
            await self._ticker.tick()
            await asyncio.sleep(0.02)
        vt, tie = self._floors[self._lane].start
        call = "SELECT * FROM aioqueue.claim(1, %s::bigint[], %s::bigint[], %s::uuid[], '{0}', '{1}', 1, '{}')"
        await _buffers(self._conn, call, ([self._lane], [vt], [tie]))  # plans and catalogue
        return await _buffers(self._conn, call, ([self._lane], [vt], [tie]))

    async def keep_ticking(self) -> None:
        """Tick as a busy worker does."""
        while True:
            await self._ticker.tick()
            await asyncio.sleep(TICK)


async def _fill(place: Place, jobs: int) -> None:
    """Enqueue so many jobs, where nothing waits for the disk."""
    async with place.connection() as boss:
        await boss.execute(f"ALTER DATABASE {place.name} SET synchronous_commit = off".encode())
        await boss.execute("ALTER TABLE aioqueue.live SET (autovacuum_enabled = false)")
        await boss.execute("SET synchronous_commit = off")
        for first in range(0, jobs, 10_000):
            await boss.execute(ENQUEUE.encode(), [min(10_000, jobs - first)])


@asynccontextmanager
async def _taker(place: Place, how: str) -> AsyncIterator[Taker]:
    store = Store("aioqueue")
    floors = Floors([lane("default", 0)], LOWEST_ID)
    database = Database(place.dsn("worker"), PoolSettings(size=3))
    await database.open()
    ticker = Ticker(database, store, floors, worker=lambda: 1, restarted=lambda: None)
    ticker._next_full_look = float("inf")  # the net below the exact rule would hide what it costs without
    async with place.connection("worker") as conn:
        conn.prepare_threshold = 1
        await store.register_worker(
            conn, worker=1, host="published", pid=1, version="1", queues=["default"], concurrency=1, lease=86_400.0, tasks=[]
        )
        taker = Taker(conn, ticker, floors)
        with held_horizon(place.dsn("superuser"), how):
            ticking = asyncio.create_task(taker.keep_ticking())
            try:
                yield taker
            finally:
                ticking.cancel()
                await asyncio.wait([ticking])
    await database.close()


async def _buffers(conn: AsyncConnection[Any], statement: str, params: tuple[object, ...] = ()) -> int:
    """Buffers that a statement reads; it is rolled back."""
    async with conn.transaction(force_rollback=True):
        rows = await (await conn.execute(f"EXPLAIN (ANALYZE, BUFFERS) {statement}".encode(), params)).fetchall()
    found = re.search(r"Buffers: shared hit=(\d+)(?: read=(\d+))?", "\n".join(row[0] for row in rows))
    return 0 if found is None else int(found[1]) + int(found[2] or 0)


async def _naive(place: Place, form: str, jobs: int) -> tuple[list[float], tuple[int, int]]:
    """Milliseconds of a claim in each block, under a held XID, and buffers before and after."""
    statement = FORMS[form].format(1)
    timed, rest = split(jobs)
    async with place.connection() as boss, place.connection("worker") as conn:
        for session in (boss, conn):
            await session.execute("SET synchronous_commit = off")
        await boss.execute("INSERT INTO naive.job (work) SELECT '' FROM generate_series(1, %s::int)", [jobs + 1])
        await boss.execute("VACUUM (ANALYZE) naive.job")

        async def take() -> float:
            began = time.perf_counter()
            await conn.execute(statement.encode())
            return time.perf_counter() - began

        with held_horizon(place.dsn("superuser"), "xid"):
            before = await _buffers(conn, statement)
            blocks = []
            for block in range(BLOCKS):
                blocks.append(1000 * percentile([await take() for _ in range(timed)], 0.25))
                for start in range(0, rest if block < BLOCKS - 1 else 0, MANY):
                    await conn.execute(FORMS[form].format(min(MANY, rest - start)).encode())
            return blocks, (before, await _buffers(conn, statement))
