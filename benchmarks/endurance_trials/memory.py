"""A million jobs through one worker: what the process has, asked of itself all the while by jobs, stays flat."""

from __future__ import annotations

import asyncio
import json
import statistics
import time

from psycopg import AsyncConnection

from aioqueue.settings import WorkerSettings

from .bench import Bench, Place, Verdict

CONCURRENCY = WorkerSettings().concurrency
BATCH = 2_000
AHEAD = 10_000
"""Jobs that wait, at most."""
SAMPLES = 80
"""Samples of one run, about."""
GROWTH_KB = 6 * 1024
"""What the process may grow by from the second quarter of the run to the last."""
BEATS = 3
"""Tasks and files that a beat or a tick under way may have, beyond those at rest."""


async def run(bench: Bench, *, jobs: int) -> Verdict:
    """Enqueue so many jobs, of which one in a hundred writes in its own transaction and one in a hundred fails twice."""
    verdict = Verdict()
    place = await bench.place("memory")
    with bench.worker(place, "memory", "-q", "samples:1,default:20") as worker:
        await worker.wait_ready()
        empty = "NOT EXISTS (SELECT FROM aioqueue.live) AND NOT EXISTS (SELECT FROM aioqueue.scheduled)"
        await place.enqueue("sample", [{}], queue="samples")
        await place.until(empty, seconds=60)
        began = time.monotonic()
        await _enqueue(place, jobs)
        verdict.check(await place.until(empty, seconds=600), "not all jobs have ended")
        took = time.monotonic() - began
        # Once more at rest: what is left then is left for good.
        await place.enqueue("sample", [{}], queue="samples")
        await place.until(empty, seconds=60)
        verdict.check(await worker.stop() == 0, "the worker did not stop in order")
    states: dict[str, int] = dict(await place.rows("SELECT state, count(*) FROM aioqueue.jobs WHERE task <> 'sample' GROUP BY 1"))
    verdict.row("jobs through one worker", ", ".join(f"{number:,} {state}" for state, number in sorted(states.items())))
    verdict.row("took", f"{took:.0f} s, {jobs / took:,.0f} jobs/s beside the samples")
    verdict.check(states == {"succeeded": jobs - jobs // 100, "dead": jobs // 100}, f"states of the jobs: {states}")
    rows = await place.rows(
        "SELECT o.result FROM aioqueue.outcome o JOIN aioqueue.job j ON j.id = o.job_id WHERE j.task = 'sample'"
        " ORDER BY o.finished_at"
    )
    _judge(verdict, [row[0] for row in rows])
    return verdict


def _judge(verdict: Verdict, samples: list[dict[str, int]]) -> None:
    busy = samples[1:-1]
    quarter = len(busy) // 4
    parts = {
        "before, at rest": samples[:1],
        "second quarter": busy[quarter : 2 * quarter],
        "last quarter": busy[-quarter:],
        "after, at rest": samples[-1:],
    }
    verdict.row("samples", len(samples))
    medians = {
        name: {what: statistics.median(sample[what] for sample in part) for what in samples[0]} for name, part in parts.items()
    }
    for name, found in medians.items():
        facts = f"{found['rss'] / 1024:.1f} MB, {found['tasks']:.0f} tasks, {found['threads']:.0f} threads,"
        verdict.row(name, f"{facts} {found['files']:.0f} files, {found['objects']:,.0f} objects")
    most = max(sample["tasks"] for sample in samples)
    verdict.row("most tasks at once, jobs among them", most)
    before, after = medians["second quarter"], medians["last quarter"]
    verdict.check(after["rss"] <= before["rss"] + GROWTH_KB, f"it grew from {before['rss']:,.0f} to {after['rss']:,.0f} kB")
    before, after = medians["before, at rest"], medians["after, at rest"]
    verdict.check(after["tasks"] <= before["tasks"] + BEATS, f"tasks at rest went from {before['tasks']} to {after['tasks']}")
    verdict.check(most <= before["tasks"] + CONCURRENCY + BEATS, f"there were {most} tasks at once")


async def _enqueue(place: Place, jobs: int) -> None:
    every = max(1, jobs // SAMPLES // BATCH)
    async with place.watcher() as watcher, await AsyncConnection.connect(place.dsn("client"), autocommit=True) as conn:
        for number, start in enumerate(range(0, jobs, BATCH)):
            while True:
                row = await (await watcher.execute("SELECT count(*) FROM aioqueue.live")).fetchone()
                if row and row[0] < AHEAD:
                    break
                await asyncio.sleep(0.2)
            batch = [_job(n) for n in range(start, min(start + BATCH, jobs))]
            await conn.execute("SELECT aioqueue.enqueue_many(%s::jsonb)", [json.dumps(batch)])
            if number % every == 0:
                await place.enqueue("sample", [{}], queue="samples")


def _job(n: int) -> dict[str, object]:
    match n % 100:
        case 0:
            return {"task": "noted", "payload": {}}
        case 1:
            return {"task": "failing", "payload": {"n": n}, "max_attempts": 2}
        case _:
            return {"task": "small", "payload": {"n": n}}
