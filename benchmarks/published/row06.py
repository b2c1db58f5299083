"""One long job in five ways while another worker takes short ones; then VACUUM VERBOSE."""

from __future__ import annotations

import asyncio

from aioqueue import AioQueue, JobContext, WorkerSettings

from . import naive
from .stage import Place, Stage, Verdict, least_vacuum, value

TITLE = "a long job beside many short ones, then VACUUM"
PUBLISHED = "a long transaction that wrote (SELECT FOR UPDATE counts) held VACUUM back; a READ COMMITTED reader did not"
WAYS = {
    "in the claim's transaction": (
        "SELECT id FROM naive.job WHERE id = 1 FOR UPDATE",
        "UPDATE naive.job SET attempts = 1 WHERE id = 1",
    ),
    "own transaction that wrote": ("INSERT INTO naive.effect VALUES ('1', 'long')",),
    "own transaction, FOR UPDATE": ("SELECT * FROM naive.job WHERE id = 1 FOR UPDATE",),
    "own transaction that read": ("SELECT count(*) FROM naive.job",),
    "none": (),
}
HARMFUL = {"in the claim's transaction", "own transaction that wrote", "own transaction, FOR UPDATE"}


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    jobs = stage.size(400, 5000)
    held = {way: await _naive(await stage.place(), statements, jobs) for way, statements in WAYS.items()}
    verdict.naive = "; ".join(f"{way}: {left:,} dead rows stay" for way, left in held.items())
    verdict.published(
        {way for way, left in held.items() if left} == HARMFUL, f"held back by {[way for way in held if held[way]]}"
    )
    await _ours(await stage.place(), jobs, verdict)
    return verdict


async def _naive(place: Place, statements: tuple[str, ...], jobs: int) -> int:
    async with place.connection() as boss, place.connection("worker") as long, place.connection("worker") as short:
        await boss.execute("INSERT INTO naive.job (work) SELECT '' FROM generate_series(0, %s::int)", [jobs])
        if statements:
            await long.execute("BEGIN")
            for statement in statements:
                await long.execute(statement.encode())
        for _ in range(jobs):
            async with short.transaction():
                row = await (await short.execute(naive.TAKE)).fetchone()
                assert row is not None
                await short.execute("UPDATE naive.job SET state = 'done' WHERE id = %s", [row[0]])
        left = await least_vacuum(boss, "naive.job", tries=2)
        if statements:
            await long.execute("ROLLBACK")
    return left


async def _ours(place: Place, jobs: int, verdict: Verdict) -> None:
    app = AioQueue(place.dsn("worker"), worker=WorkerSettings(poll=0.05))
    began, ends = asyncio.Event(), asyncio.Event()

    @app.task(name="long")
    async def long(ctx: JobContext) -> None:
        began.set()
        await ends.wait()

    @app.task(name="short")
    async def short() -> None:
        pass

    async with app, place.connection() as boss, app.worker():
        await boss.execute("ALTER TABLE aioqueue.live SET (autovacuum_enabled = false)")
        job = await long.enqueue()
        await began.wait()
        for first in range(0, jobs, 1000):
            await short.enqueue_many([{}] * min(1000, jobs - first))
        async with asyncio.timeout(300):
            while await value(boss, "SELECT count(*) FROM aioqueue.live") > 1:  # noqa: ASYNC110 - of the server
                await asyncio.sleep(0.05)
        left = await least_vacuum(boss, "aioqueue.live")
        running = await value(boss, "SELECT count(*) FROM aioqueue.live WHERE worker IS NOT NULL")
        ends.set()
        await job.result(timeout=30)
    verdict.promise(running == 1, "the long job still runs")
    verdict.promise(left == 0, f"dead rows removed to zero while it runs: {left} stay")
    verdict.ours = f"{left} dead rows stay of {jobs:,} jobs done while the long one runs"
