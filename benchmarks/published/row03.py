"""A job that always fails ahead of an ordinary one; ten dequeues."""

from __future__ import annotations

from itertools import pairwise

import psycopg

from aioqueue import AioQueue, JobFailed, JobTransaction, Retry, WorkerSettings

from . import naive
from .stage import Place, Stage, Verdict, value

TITLE = "a job that always fails ahead of another"
PUBLISHED = "picked up 10 of 10 times, never counted, the job behind it never ran, no trace of a run"


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    await _naive(place, verdict)
    await _ours(place, verdict)
    return verdict


async def _naive(place: Place, verdict: Verdict) -> None:
    async with place.connection() as boss, place.connection("worker") as conn:
        await boss.execute("INSERT INTO naive.job (work) VALUES ('SELECT 1 / 0'), ('SELECT 1')")
        errors = 0
        for _ in range(10):
            try:
                await naive.in_one_transaction(conn, "naive", place.dsn("worker"))
            except psycopg.errors.DivisionByZero:
                errors += 1
        counted = await value(boss, "SELECT attempts FROM naive.job WHERE id = 1")
        behind = await value(boss, "SELECT count(*) FROM naive.trace WHERE job = '2'")
    verdict.naive = f"picked up {errors} of 10 times, counted {counted} times, the job behind it ran {behind} times"
    verdict.published((errors, counted, behind) == (10, 0, 0), "10 of 10, never counted, nothing behind it")


async def _ours(place: Place, verdict: Verdict) -> None:
    app = AioQueue(place.dsn("worker"), worker=WorkerSettings(poll=0.05))

    @app.task(name="divide", retry=Retry(max_attempts=5, base=0.1, jitter=False))
    async def divide(tx: JobTransaction) -> None:
        await tx.execute("SELECT 1 / 0")

    @app.task(name="ordinary")
    async def ordinary(tx: JobTransaction) -> int:
        return int(await tx.fetch_value("SELECT 1"))

    async with app, place.connection() as boss:
        fails = await divide.enqueue()
        behind = await ordinary.enqueue()
        async with app.worker(concurrency=1):
            verdict.promise(await behind.result(timeout=30) == 1, "the job behind it runs")
            try:
                await fails.result(timeout=60)
            except JobFailed:
                pass
            status = await fails.status()
        rows = await (
            await boss.execute(
                "SELECT attempt, error_message, started_at, finished_at FROM aioqueue.attempt WHERE job_id = %s ORDER BY attempt",
                [fails.id],
            )
        ).fetchall()
    pauses = [(after[2] - before[3]).total_seconds() for before, after in pairwise(rows)]
    verdict.promise(
        str(status.state) == "dead" and status.attempt == 5, f"dead after 5 attempts: {status.state}, {status.attempt}"
    )
    verdict.promise(len(rows) == 5 and all("division by zero" in row[1] for row in rows), "each attempt's error is kept")
    verdict.promise(all(pause >= 0.1 * 2**n for n, pause in enumerate(pauses)), f"back-off between attempts: {pauses}")
    spelled = ", ".join(f"{pause:.2f}" for pause in pauses)
    verdict.ours = f"{status.state} after {len(rows)} attempts, each with its error; pauses {spelled} s; the job behind it ran"
