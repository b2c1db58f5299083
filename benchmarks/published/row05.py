"""Lease 2 s, job 3 s, a second worker that polls each 100 ms; with and without fence and heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from aioqueue import AioQueue, JobContext, JobFailed, Retry, WorkerSettings
from benchmarks.proxy import Proxy

from . import naive
from .processes import Processes, processes
from .stage import Place, Stage, Verdict, until, value

TITLE = "a job longer than its lease, two workers"
PUBLISHED = (
    "without heartbeat both run it; the fence keeps late writes out; with a beat each 0.5 s one run; "
    "a hung worker that beats is never taken over"
)
LEASE = 2.0
JOB = 3.0


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    async with asyncio.TaskGroup() as group:
        bare = group.create_task(_naive(stage, beats=False, fence=False))
        fenced = group.create_task(_naive(stage, beats=False, fence=True))
        beating = group.create_task(_naive(stage, beats=True, fence=True))
        hung = group.create_task(_naive(stage, beats=True, fence=True, job=4 * LEASE))
    shown = {"no beat": bare, "fence": fenced, "beat 0.5 s": beating, "hung, beating": hung}
    verdict.naive = "; ".join(f"{name}: {task.result()[0]} runs, {task.result()[1]} writes" for name, task in shown.items())
    verdict.published([t.result() for t in shown.values()] == [(2, 2), (2, 1), (1, 1), (1, 1)], "runs and writes")
    with processes() as started:
        for part in (_one_run, _late, _hung, _cut_off):
            verdict.ours += ("; " if verdict.ours else "") + await part(place, started, verdict)
    return verdict


async def _naive(stage: Stage, *, beats: bool, fence: bool, job: float = JOB) -> tuple[int, int]:
    """Runs of one job by two workers, and writes of its result that came through."""
    place = await stage.place()
    async with place.connection() as boss:
        await boss.execute("INSERT INTO naive.job DEFAULT VALUES")

        async def worker(name: str) -> None:
            async with place.connection("worker") as conn:
                row = None
                give_up = time.monotonic() + job + 2 * LEASE
                while row is None and time.monotonic() < give_up:
                    row = await (await conn.execute(naive.CLAIM, {"worker": name, "lease": LEASE})).fetchone()
                    await asyncio.sleep(0.1)
                if row is None:
                    return
                await naive.trace(row[0], name, dsn=place.dsn("worker"))
                async with _beating(conn, row[0], name) if beats else contextlib.nullcontext():
                    await asyncio.sleep(job)
                owner = " AND worker = %s" if fence else " AND %s <> ''"
                done = await conn.execute(f"UPDATE naive.job SET state = 'done' WHERE id = %s{owner}".encode(), [row[0], name])
                if done.rowcount:
                    await naive.trace(row[0], name, "write", dsn=place.dsn("worker"))

        await asyncio.gather(worker("a"), worker("b"))
        runs = await value(boss, "SELECT count(*) FROM naive.trace WHERE what = 'start'")
        writes = await value(boss, "SELECT count(*) FROM naive.trace WHERE what = 'write'")
    return runs, writes


@contextlib.asynccontextmanager
async def _beating(conn: AsyncConnection[Any], job: int, worker: str) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(0.5)
            await conn.execute(
                "UPDATE naive.job SET lease_until = now() + %s * interval '1 s' WHERE id = %s AND worker = %s",
                [LEASE, job, worker],
            )

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _enqueue(place: Place, task: str, **payload: object) -> Any:
    async with AioQueue(place.dsn("client")) as client:
        return (await client.enqueue_by_name(task, payload)).id


async def _ended(boss: AsyncConnection[Any], job: object) -> bool:
    return await until(lambda: value(boss, "SELECT EXISTS (SELECT FROM aioqueue.outcome WHERE job_id = %s)", job))


async def _one_run(place: Place, started: Processes, verdict: Verdict) -> str:
    both = [started.worker(place.dsn("worker"), lease=LEASE) for _ in range(2)]
    async with place.connection() as boss:
        await until(lambda: value(boss, "SELECT count(*) = 2 FROM aioqueue.worker"))
        job = await _enqueue(place, "long", seconds=2 * LEASE)
        ended = await _ended(boss, job)
        runs = await value(boss, "SELECT count(*) FROM naive.trace WHERE job = %s AND what = 'start'", str(job))
    for process in both:
        process.kill()
    verdict.promise(ended and runs == 1, f"one run of a job of two leases: {runs}")
    return f"{runs} run of a job of two leases"


async def _late(place: Place, started: Processes, verdict: Verdict) -> str:
    async with place.connection() as boss:
        first = started.worker(place.dsn("worker"), lease=LEASE)
        job = await _enqueue(place, "writes", seconds=1.0)
        starts = "SELECT count(*) >= %s FROM naive.trace WHERE job = %s"
        await until(lambda: value(boss, starts, 1, str(job)))
        first.send_signal(signal.SIGSTOP)
        second = started.worker(place.dsn("worker"), lease=LEASE)
        ended = await _ended(boss, job)
        first.send_signal(signal.SIGCONT)
        back = "SELECT count(*) = 2 FROM aioqueue.worker WHERE NOT dead AND lease_until > clock_timestamp()"
        verdict.promise(await until(lambda: value(boss, back)), "the late worker goes on, under another identity")
        effects = await value(boss, "SELECT count(*) FROM naive.effect WHERE job = %s", str(job))
        attempt = await value(boss, "SELECT attempt FROM aioqueue.outcome WHERE job_id = %s", job)
    for process in (first, second):
        process.kill()
    verdict.promise(ended and (effects, attempt) == (1, 2), f"the late run's transaction is rolled back: {effects} effects")
    return f"late run rolled back: {effects} effect, by attempt {attempt}"


async def _hung(place: Place, _started: Processes, verdict: Verdict) -> str:
    app = AioQueue(place.dsn("worker"), worker=WorkerSettings(poll=0.05))

    @app.task(name="hangs", timeout=1.0, retry=Retry(max_attempts=1))
    async def hangs(ctx: JobContext) -> None:
        await asyncio.Event().wait()

    async with app, app.worker():
        job = await hangs.enqueue()
        error = ""
        try:
            await job.result(timeout=60)
        except JobFailed as failed:
            error = str(failed)
        status = await job.status()
    assert status.started_at is not None and status.finished_at is not None
    took = (status.finished_at - status.started_at).total_seconds()
    verdict.promise("TimeLimitExceeded" in error, f"a hung job is ended at its time limit: {error}")
    return f"hung job ended after {took:.1f} s (limit 1 s)"


async def _cut_off(place: Place, started: Processes, verdict: Verdict) -> str:
    with tempfile.TemporaryDirectory() as home, Proxy(place.port) as proxy:
        diary = Path(home) / "diary"
        async with place.connection() as boss:
            environ = {"PUBLISHED_DIARY": str(diary)}
            first = started.worker(place.tcp("worker", proxy.port), lease=LEASE, **environ)
            job = await _enqueue(place, "lingers")
            await until(lambda: _lines(diary, 1))
            proxy.mode = "swallow"
            second = started.worker(place.tcp("worker"), lease=LEASE, **environ)
            ended = await _ended(boss, job)
        for process in (first, second):
            process.kill()
        if not diary.exists():
            verdict.promise(False, "a worker behind a proxy takes a job")
            return "cut off: not seen"
        found = {(what, attempt): float(at) for what, attempt, at in (line.split() for line in diary.read_text().splitlines())}
    gap = found.get(("start", "2"), 0.0) - found.get(("cancelled", "1"), float("inf"))
    verdict.promise(ended and gap > 0, f"a worker that is cut off cancels its job before the second starts it: {gap:.2f} s")
    return f"cut off: cancelled {gap:.2f} s before the second start"


async def _lines(path: Path, number: int) -> bool:
    return await asyncio.to_thread(_has_lines, path, number)


def _has_lines(path: Path, number: int) -> bool:
    return path.exists() and len(path.read_text().splitlines()) >= number
