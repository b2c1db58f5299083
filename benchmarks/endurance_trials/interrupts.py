"""Time limit, cancel and stop, with a transaction in a query and in a sleep: connections serve on, handlers clean up."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID

from aioqueue import AioQueue, JobTransaction, LimitSettings, PoolSettings

from .bench import Bench, Place, Verdict

POOL = 6
AT_ONCE = POOL - 2
"""Jobs with a transaction at once: two connections are kept back."""
LIMIT = 0.25
PATIENCE = 60.0
CAUSES = ("time limit", "cancelled", "interrupted")
REPLACED = 0.02
"""The share of interruptions that may cost a connection: a cancellation that overtakes its query is lost on the way."""


class Trial:
    """The app and what its handlers saw."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.begun: Counter[str] = Counter()
        self.cleaned: Counter[str] = Counter()
        self.pids: Counter[int] = Counter()
        self.inside: asyncio.Queue[tuple[UUID, int, str]] = asyncio.Queue()
        self.app = AioQueue(place.dsn("worker"), pool=PoolSettings(size=POOL), limits=LimitSettings(transaction_wait=PATIENCE))

        async def work(tx: JobTransaction, cause: str, where: str) -> None:
            pid = tx.connection.info.backend_pid
            kind = f"{cause}, in a {where}"
            self.pids[pid] += 1
            self.begun[kind] += 1
            await tx.execute("INSERT INTO trial.note (job_id) VALUES (%s)", (tx.job_id,))
            self.inside.put_nowait((tx.job_id, pid, where))
            try:
                if where == "query":
                    await tx.execute("SELECT pg_sleep(1000)")
                else:
                    await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)
                self.cleaned[kind] += 1

        self.short: Any = self.app.task(name="short", timeout=LIMIT)(work)
        self.long: Any = self.app.task(name="long", timeout=PATIENCE)(work)

    async def round(self, cause: str, where: str) -> None:
        """Interrupt AT_ONCE jobs that are inside."""
        if cause == "interrupted":
            jobs = await self._enqueue(self.long, cause, where)
            async with self.app.worker(grace=0):
                await self._inside(jobs)
            for job in jobs:
                await self.app.job(job).cancel()
            return
        jobs = await self._enqueue(self.short if cause == "time limit" else self.long, cause, where)
        if cause == "cancelled":
            for job in await self._inside(jobs):
                await self.app.job(job).cancel()
        await self.place.until(f"count(*) = {len(jobs)} FROM aioqueue.outcome WHERE job_id = ANY (%s)", jobs, seconds=PATIENCE)

    async def _enqueue(self, task: Any, cause: str, where: str) -> list[UUID]:
        while not self.inside.empty():
            self.inside.get_nowait()
        made = await task.options(max_attempts=1, tenant="t").enqueue_many([(cause, where)] * AT_ONCE)
        return [job.id for job in made]

    async def _inside(self, jobs: list[UUID]) -> list[UUID]:
        """Wait until each of the jobs is where it is to be interrupted."""
        found: list[tuple[UUID, int, str]] = []
        async with asyncio.timeout(PATIENCE):
            while len(found) < len(jobs):
                found.append(await self.inside.get())
        pids = [pid for _, pid, where in found if where == "query"]
        sleeping = "count(*) = %s FROM pg_stat_activity WHERE pid = ANY (%s) AND wait_event = 'PgSleep'"
        await self.place.until(sleeping, len(pids), pids, seconds=PATIENCE)
        return [job for job, _, _ in found]


async def run(bench: Bench, *, interruptions: int) -> Verdict:
    """Interrupt so many jobs, each cause and place in turn."""
    verdict = Verdict()
    place = await bench.place("interrupts")
    trial = Trial(place)
    kinds = [(cause, where) for cause in CAUSES for where in ("query", "sleep")]
    rounds = -(-interruptions // AT_ONCE)
    async with trial.app:
        lasting = [kinds[n % len(kinds)] for n in range(rounds)]
        async with trial.app.worker(grace=0):
            for cause, where in lasting:
                if cause != "interrupted":
                    await trial.round(cause, where)
        for cause, where in lasting:
            if cause == "interrupted":
                await trial.round(cause, where)
    reasons: dict[str, int] = dict(await place.rows("SELECT reason, count(*) FROM aioqueue.attempt GROUP BY 1"))
    for kind, number in sorted(trial.begun.items()):
        verdict.row(kind, f"{number} begun, {trial.cleaned[kind]} ended their finally: await")
    total = sum(trial.begun.values())
    verdict.row("backends that served all of them", f"{len(trial.pids)}, of a pool of {POOL}")
    verdict.row("attempts by their reason", ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items())))
    ((notes,),) = await place.rows("SELECT count(*) FROM trial.note")
    verdict.row("rows left of what was rolled back", notes)
    verdict.check(total >= interruptions, f"only {total} interruptions")
    verdict.check(trial.cleaned == trial.begun, "a handler did not end its finally: await")
    verdict.check(sum(reasons.get(cause, 0) for cause in CAUSES) >= total, f"{total} interruptions, but {reasons}")
    verdict.check(len(trial.pids) <= POOL + REPLACED * total, f"{len(trial.pids)} backends: connections were closed")
    verdict.check(not notes, f"{notes} rows of interrupted transactions were committed")
    return verdict
