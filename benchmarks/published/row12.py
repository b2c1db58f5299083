"""Nine states of a session, dead rows in an unrelated table, VACUUM VERBOSE; what the doctor says, and a busy worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from psycopg import AsyncConnection

from aioqueue import AioQueue
from aioqueue.doctor import horizon
from aioqueue.doctor.examination import Examination
from aioqueue.store import Store

from .stage import Place, Stage, Verdict, least_vacuum, until, vacuum, value

TITLE = "who holds VACUUM back"
PUBLISHED = (
    "held by: a written READ COMMITTED transaction, a statement in flight, an open cursor, REPEATABLE READ or SERIALIZABLE "
    "readers; "
    "not by BEGIN alone, a READ COMMITTED reader gone idle, another database"
)
READ = "SELECT count(*) FROM naive.job"
STATES: dict[str, tuple[str, ...]] = {
    "written": ("BEGIN", "INSERT INTO naive.effect VALUES ('x', 'x')"),
    "row locked": ("BEGIN", "SELECT * FROM naive.job FOR UPDATE"),
    "statement in flight": ("SELECT pg_sleep(600)",),
    "open cursor": ("BEGIN", "DECLARE c CURSOR FOR SELECT * FROM naive.job", "FETCH 1 FROM c"),
    "REPEATABLE READ": ("BEGIN ISOLATION LEVEL REPEATABLE READ", READ),
    "SERIALIZABLE": ("BEGIN ISOLATION LEVEL SERIALIZABLE", READ),
    "BEGIN alone": ("BEGIN",),
    "reader gone idle": ("BEGIN", READ),
    "another database": ("BEGIN", "INSERT INTO naive.effect VALUES ('x', 'x')"),
}
HARMLESS = {"BEGIN alone", "reader gone idle", "another database"}
RUNNING = 100


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place, other = await stage.place(), await stage.place()
    rows = stage.size(5_000, 200_000)
    async with place.connection() as boss:
        await boss.execute("CREATE TABLE naive.unrelated (i integer) WITH (autovacuum_enabled = false)")
        await boss.execute("INSERT INTO naive.job DEFAULT VALUES")
        held, listed = set(), set()
        for state, statements in STATES.items():
            async with _session(other if state == "another database" else place, statements) as pid:
                if state == "statement in flight":
                    await until(
                        lambda p=pid: value(boss, "SELECT backend_xmin IS NOT NULL FROM pg_stat_activity WHERE pid = %s", p)
                    )
                await boss.execute("INSERT INTO naive.unrelated SELECT generate_series(1, %s::int)", [rows])
                await boss.execute("DELETE FROM naive.unrelated")
                if await vacuum(boss, "naive.unrelated"):
                    held.add(state)
                found = await _listed(boss)
                if any(f"session {pid} " in what for what in found):
                    listed.add(state)
            await vacuum(boss, "naive.unrelated")
        verdict.naive = f"{rows:,} dead rows held by: {', '.join(sorted(held))}"
        verdict.published(held == set(STATES) - HARMLESS, f"held by {sorted(held)}")
        verdict.promise(listed == held, f"the doctor lists exactly the harmful ones: {sorted(listed ^ held)} otherwise")
        await _busy(place, boss, rows, verdict)
    verdict.ours = f"the doctor lists these {len(listed)} and no other; {verdict.ours}"
    return verdict


@contextlib.asynccontextmanager
async def _session(place: Place, statements: tuple[str, ...]) -> AsyncIterator[int]:
    async with place.connection() as conn:
        tasks = []
        for statement in statements:
            call = conn.execute(statement.encode())
            if "pg_sleep" in statement:
                tasks.append(asyncio.create_task(call))
            else:
                await call
        try:
            yield conn.info.backend_pid
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _listed(boss: AsyncConnection[Any]) -> list[str]:
    """What the doctor says of who holds the horizon."""
    examination = Examination(conn=boss, store=Store("aioqueue"), setting="app.tenant")
    for _ in range(50):  # a statement is named once it has run for a moment
        found = [finding.what for finding in await horizon.look(examination)]
        if found:
            return found
        await asyncio.sleep(0.02)
    return []


async def _busy(place: Place, boss: AsyncConnection[Any], rows: int, verdict: Verdict) -> None:
    """A worker with 100 running jobs that hold nothing."""
    app = AioQueue(place.dsn("worker"))
    running, ends = [0], asyncio.Event()

    @app.task(name="waits")
    async def waits() -> None:
        running[0] += 1
        await ends.wait()

    async with app, app.worker():
        jobs = await waits.enqueue_many([{}] * RUNNING)
        async with asyncio.timeout(60):
            while running[0] < RUNNING:  # noqa: ASYNC110 - a hundred jobs count themselves
                await asyncio.sleep(0.05)
        idle = 0
        sessions = (
            "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker' AND state LIKE 'idle in transaction%%'"
        )
        for _ in range(50):
            idle += await value(boss, sessions)
            await asyncio.sleep(0.02)
        await boss.execute("INSERT INTO naive.unrelated SELECT generate_series(1, %s::int)", [rows])
        await boss.execute("DELETE FROM naive.unrelated")
        left = await least_vacuum(boss, "naive.unrelated")
        ends.set()
        await asyncio.gather(*(job.result(timeout=60) for job in jobs))
    verdict.promise(
        idle == 0 and left == 0, f"{RUNNING} running jobs hold nothing: {idle} idle in a transaction, {left} dead rows stay"
    )
    verdict.ours = f"{RUNNING} running jobs: {idle} sessions idle in a transaction, {left} dead rows stay"
