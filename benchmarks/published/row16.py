"""A steady stream of jobs beside long analytic transactions: the mixed workload of a database vendor's write-up.

The usual design and aioqueue one after the other, each with three analysts of its own (benchmarks/mixed_workload.py). At the
published size the usual design runs for three minutes: by then it is behind beyond doubt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import kit
from benchmarks.mixed_workload import FACTS, LIMIT, analysts, at_rate, intervals, look_often, measure

from .processes import processes
from .stage import Stage, Verdict, until, value

TITLE = "800 jobs/s beside three overlapping 120 s analytic queries"
PUBLISHED = "a queue of the usual design: 155,000 jobs behind, 300 ms lock times, 383,000 dead rows"
RATE = 800
SECONDS = (60, 900)
NAIVE = (60, 180)
QUERY = (30, 120)
"""Length of the runs and of an analytic transaction, reduced and as published."""
QUICK = 50.0
"""Milliseconds: a p99 below it is flat, whatever it was before; on a busy machine a few of them are chance."""
STREAM = """
CREATE TABLE naive.stream (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, state text NOT NULL DEFAULT 'queued',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(), started_at timestamptz
);
CREATE INDEX stream_queued ON naive.stream (id) WHERE state = 'queued';
GRANT SELECT, INSERT, UPDATE ON naive.stream TO aioqueue_worker;
"""
LOOK = """
SELECT (SELECT count(*) FROM naive.stream WHERE state = 'queued'),
       coalesce(1000 * percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - created_at)), 0)::float8,
       coalesce(1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - created_at)), 0)::float8,
       (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'naive.stream'::regclass)
  FROM naive.stream
 WHERE started_at > clock_timestamp() - make_interval(secs => %(seconds)s)
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What a run showed, its first part and its last: minutes, of a short run sixths."""

    waiting: int
    first: float
    last: float
    dead: int

    @classmethod
    def of(cls, parts: Sequence[tuple[Any, ...]]) -> Found:
        """Of (jobs that wait, p50, p99, dead rows) of each part."""
        return cls(waiting=parts[-1][0], first=parts[0][2], last=parts[-1][2], dead=parts[-1][3])

    def said(self) -> str:
        """In words."""
        return (
            f"{self.waiting:,} jobs wait at the end, {self.dead:,} dead rows, "
            f"pick-up p99 {self.first:,.0f} ms in the first part, {self.last:,.0f} ms in the last"
        )


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    seconds, query = float(stage.size(*SECONDS)), float(stage.size(*QUERY))
    briefly = float(stage.size(*NAIVE))
    naive = await _naive(stage, briefly, query)
    ours = await _ours(stage, seconds, query)
    verdict.naive = f"{RATE}/s beside {query:g} s queries, for {briefly:g} s: {naive.said()}"
    verdict.ours = f"for {seconds:g} s: {ours.said()}"
    verdict.published(naive.last > LIMIT * naive.first, "it slows down")
    verdict.promise(ours.waiting <= RATE, f"no backlog: {ours.waiting:,} jobs wait, of {RATE} a second")
    flat = ours.last <= max(LIMIT * ours.first, QUICK)
    verdict.promise(flat, f"pick-ups as quick at the end: p99 {ours.first:.1f} → {ours.last:.1f} ms")
    return verdict


async def _naive(stage: Stage, seconds: float, query: float) -> Found:
    place = await stage.place()
    async with place.connection() as boss, place.connection("worker") as conn:
        await boss.execute(STREAM.encode())
        await boss.execute(FACTS.encode())

        async def enqueue(jobs: int) -> object:
            return await conn.execute("INSERT INTO naive.stream (state) SELECT 'queued' FROM generate_series(1, %s::int)", [jobs])

        with processes() as started:
            started.start(place.dsn("worker"), "benchmarks.published.naive", "stream")
            await enqueue(1)
            taken = "SELECT EXISTS (SELECT FROM naive.stream WHERE state = 'done')"
            assert await until(lambda: value(boss, taken)), "the naive worker takes jobs"
            with analysts(place.dsn("superuser"), query):
                stream = asyncio.create_task(at_rate(enqueue, RATE, seconds))
                found = await look_often(boss, LOOK, seconds, intervals(seconds))
                await stream
    return Found.of(found)


async def _ours(stage: Stage, seconds: float, query: float) -> Found:
    server = kit.Server(stage.server.dsn("superuser", "postgres"))
    dsn = server.database()
    try:
        return Found.of(await measure(dsn, RATE, seconds, query))
    finally:
        server.drop(dsn)
