"""A job that ends its process in the middle of its work; a fresh worker after each crash."""

from __future__ import annotations

import asyncio

from aioqueue import AioQueue

from .processes import Processes, processes
from .stage import Place, Stage, Verdict, until, value

TITLE = "a job that kills its worker"
PUBLISHED = "one transaction: never counted, kills every worker; committed claim: three tries, then `running` for ever"
NEIGHBOURS = 5


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    with processes() as started:
        one, committed = await stage.place(), await stage.place()
        first = await _naive(one, started, "one", 4)
        second = await _naive(committed, started, "committed", 5)
        verdict.naive = f"one transaction: {first[0]} workers killed, counted {first[1]} times, neighbours run {first[3]}; " + (
            f"committed claim: {second[0]} killed, counted {second[1]}, then {second[2]}, neighbours run {second[3]}"
        )
        verdict.published(first == (4, 0, "queued", 0), f"one transaction: {first}")
        verdict.published(second[:3] == (3, 3, "running"), f"committed claim: {second}")
        await _ours(await stage.place(), started, verdict)
    return verdict


async def _naive(place: Place, started: Processes, form: str, workers: int) -> tuple[int, int, str, int]:
    """Workers killed, attempts counted, the job's state, neighbours run."""
    killed = 0
    async with place.connection() as boss:
        await boss.execute("INSERT INTO naive.job (work) VALUES ('crash'), ('SELECT 1'), ('SELECT 1')")
        for _ in range(workers):
            process = started.start(place.dsn("worker"), "benchmarks.published.naive", form)
            killed += await asyncio.to_thread(process.wait, 60) == 86
            await until(
                lambda: value(boss, "SELECT NOT EXISTS (SELECT FROM naive.job WHERE lease_until > now() AND state = 'running')")
            )
        attempts = await value(boss, "SELECT attempts FROM naive.job WHERE id = 1")
        state = await value(boss, "SELECT state FROM naive.job WHERE id = 1")
        neighbours = await value(boss, "SELECT count(DISTINCT job) FROM naive.trace WHERE job <> '1'")
    return killed, attempts, state, neighbours


async def _ours(place: Place, started: Processes, verdict: Verdict) -> None:
    client = AioQueue(place.dsn("client"))
    lease, killed = 2.0, 0
    async with place.connection() as boss:
        worker = started.worker(place.dsn("worker"), lease=lease)
        await until(lambda: value(boss, "SELECT EXISTS (SELECT FROM aioqueue.worker)"))
        async with client:
            job = await client.enqueue_by_name("crash", max_attempts=3)
            others = [await client.enqueue_by_name("ordinary") for _ in range(NEIGHBOURS)]
        while killed < 10 and not await value(boss, "SELECT EXISTS (SELECT FROM aioqueue.outcome WHERE job_id = %s)", job.id):
            if worker.poll() is not None:
                killed += 1
                worker = started.worker(place.dsn("worker"), lease=lease)
            await asyncio.sleep(0.05)
        row = await (await boss.execute("SELECT state, attempt FROM aioqueue.outcome WHERE job_id = %s", [job.id])).fetchone()
        reasons = "SELECT array_agg(reason ORDER BY attempt) FROM aioqueue.attempt WHERE job_id = %s"
        found = await value(boss, reasons, job.id)
        last = "SELECT extract(epoch FROM o.finished_at - max(t.at))::float FROM aioqueue.outcome o, naive.trace t"
        late = await value(boss, last + " WHERE o.job_id = %s AND t.job = o.job_id::text GROUP BY o.finished_at", job.id)
        ids = [other.id for other in others]
        ended = "SELECT count(*) = %s FROM aioqueue.outcome WHERE job_id = ANY (%s) AND state = 'succeeded'"
        lived = await until(lambda: value(boss, ended, len(ids), ids))
    verdict.promise(killed == 3, f"three crashes: {killed}")
    verdict.promise(row == ("dead", 3), f"dead after three attempts: {row}")
    verdict.promise(found == ["worker lost"] * 3, f"the reason is kept: {found}")
    verdict.promise(lived, "the others go on")
    # Seen dead when the lease has ended, found by the next look, which a loaded machine may delay.
    verdict.promise(late is not None and late < 3 * lease + 3, f"marked within a lease and a look: {late}")
    state, reason = row[0] if row else "still running", found[-1] if found else "no reason"
    spelled = "never" if late is None else f"{late:.1f} s"
    verdict.ours = f"{killed} crashes, then {state} ({reason}) {spelled} after the last (lease {lease:g} s); others ran"
