"""The checks of a storm: all the while, and once it is over and everything must have ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from uuid import UUID

import psycopg

from .diary import Execution
from .fleet import Fleet, Life
from .model import Storm
from .tasks import LEASE, POOL, TRANSACTIONAL, UNNOTED

SETTLED = 30.0
"""Seconds after that in which nobody but the living is left."""
UNOWNED = LEASE + 6.0
"""Seconds that a job may be running under a lease that is over."""
UNRUN = 20.0
"""Seconds that a job may be running in the database under a lease that holds, and not in the process that has it."""
SLOW = LEASE / 4
"""Seconds after which a commit is slow: some beats of others may have come too late."""
REST = 10.0
"""The pause after a look, in its durations, at least: to audit is not the load."""
SPARED = ("interrupted", "unknown task", "no connection", "snoozed")
INVARIANTS = {
    "effects of jobs that have not succeeded": """
        SELECT e.job_id FROM storm.effect e LEFT JOIN aioqueue.outcome o USING (job_id)
         WHERE o.state IS DISTINCT FROM 'succeeded'""",
    "effects of another attempt than the one that succeeded": """
        SELECT e.job_id FROM storm.effect e JOIN aioqueue.outcome o USING (job_id) WHERE o.attempt <> e.attempt""",
    "jobs that succeeded without their effect": """
        SELECT j.id FROM aioqueue.job j JOIN aioqueue.outcome o ON o.job_id = j.id AND o.state = 'succeeded'
          LEFT JOIN storm.effect e ON e.job_id = j.id WHERE j.task = ANY (%(transactional)s) AND e.job_id IS NULL""",
    "rows of the ledger that do not belong to an effect": """
        SELECT l.job_id FROM storm.ledger l LEFT JOIN storm.effect e USING (job_id) WHERE e.job_id IS NULL
         UNION ALL SELECT job_id FROM storm.ledger GROUP BY job_id HAVING count(*) > 1""",
    "rows of another tenant": "SELECT job_id FROM storm.violation",
    "ended jobs that are still unfinished": """
        SELECT job_id FROM aioqueue.outcome
          JOIN (SELECT job_id FROM aioqueue.live UNION ALL SELECT job_id FROM aioqueue.scheduled) u USING (job_id)""",
    "jobs in two places": """
        SELECT job_id FROM (SELECT job_id FROM aioqueue.live UNION ALL SELECT job_id FROM aioqueue.scheduled) u
         GROUP BY job_id HAVING count(*) > 1""",
    "jobs that are nowhere": """
        SELECT j.id FROM aioqueue.job j WHERE NOT EXISTS (SELECT FROM aioqueue.outcome o WHERE o.job_id = j.id)
           AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.job_id = j.id)
           AND NOT EXISTS (SELECT FROM aioqueue.scheduled s WHERE s.job_id = j.id)""",
    "jobs tried too often": """
        SELECT j.id FROM aioqueue.job j JOIN (
               SELECT job_id, attempt, spared FROM aioqueue.outcome
               UNION ALL SELECT job_id, attempt, spared FROM aioqueue.live
               UNION ALL SELECT job_id, attempt, spared FROM aioqueue.scheduled) u
            ON u.job_id = j.id WHERE u.attempt - u.spared > j.max_attempts""",
    "jobs without the business of their transaction, or the other way round": """
        SELECT coalesce(j.id, a.job_id) FROM (SELECT id FROM aioqueue.job WHERE queue <> 'pooled') j
          FULL JOIN storm.asked a ON a.job_id = j.id WHERE j.id IS NULL OR a.job_id IS NULL""",
    "attempts whose row is missing": """
        SELECT o.job_id FROM aioqueue.outcome o
         WHERE (SELECT count(*) FROM aioqueue.attempt a WHERE a.job_id = o.job_id) <> o.attempt - (o.state = 'succeeded')::int
           AND (o.state <> 'cancelled' OR o.attempt > 0)""",
    "attempts spared without a reason to": """
        SELECT o.job_id FROM aioqueue.outcome o
         WHERE o.spared <> (SELECT count(*) FROM aioqueue.attempt a
                             WHERE a.job_id = o.job_id AND a.reason = ANY (%(spared)s)
                               AND NOT (o.state = 'cancelled' AND a.attempt = o.attempt
                                        AND a.started_at IS NOT DISTINCT FROM o.started_at))""",
    "dead jobs with attempts left": """
        SELECT j.id FROM aioqueue.job j JOIN aioqueue.outcome o ON o.job_id = j.id AND o.state = 'dead'
         WHERE o.attempt - o.spared <> j.max_attempts""",
    "dead jobs without an error": """
        SELECT o.job_id FROM aioqueue.outcome o JOIN aioqueue.attempt a ON a.job_id = o.job_id AND a.attempt = o.attempt
         WHERE o.state = 'dead' AND (a.reason = ANY (%(spared)s) OR a.error_message IS NULL)""",
}
"""Queries that must find nothing at any time; each sees one snapshot."""
STRANDED = """
SELECT l.job_id, l.attempt FROM aioqueue.live l LEFT JOIN aioqueue.worker w ON w.id = l.worker
 WHERE l.worker IS NOT NULL AND (w.id IS NULL OR w.dead OR w.lease_until < clock_timestamp())"""
OWNED = """
SELECT l.job_id, l.attempt, w.pid FROM aioqueue.live l JOIN aioqueue.worker w ON w.id = l.worker
  JOIN aioqueue.job j ON j.id = l.job_id WHERE j.task <> ALL (%s) AND NOT w.dead AND w.lease_until > clock_timestamp()"""
SESSIONS = """
SELECT application_name, count(*) FROM pg_stat_activity WHERE application_name LIKE 'storm-worker-%' GROUP BY 1"""


class Auditor:
    """Looks at the database every now and then; each thing that is wrong is a fault once."""

    def __init__(self, storm: Storm, fleet: Fleet) -> None:
        self._storm = storm
        self._fleet = fleet
        self._said: set[tuple[str, str]] = set()
        self._stranded: dict[tuple[UUID, int], float] = {}
        self._unrun: dict[tuple[UUID, int], float] = {}
        self._open: defaultdict[Life, _Open] = defaultdict(_Open)

    async def run(self) -> None:
        """For ever."""
        while True:
            since = time.monotonic()
            with contextlib.suppress(psycopg.OperationalError, TimeoutError):
                await self.look()
                self._storm.counts["audits"] += 1
            await asyncio.sleep(max(2.0, REST * (time.monotonic() - since)))

    async def probe(self) -> None:
        """Commit something every half second, for ever, and note when that is slow."""
        while True:
            with contextlib.suppress(psycopg.OperationalError, TimeoutError):
                async with self._storm.watcher() as conn:
                    while True:
                        since = time.monotonic()
                        await conn.execute("INSERT INTO storm.probe VALUES (clock_timestamp())")
                        if (now := time.monotonic()) > since + SLOW:
                            self._storm.slow.append((since, now))
                        await asyncio.sleep(0.5)
            await asyncio.sleep(0.5)

    async def look(self) -> None:
        """Check everything that holds at any time."""
        names = {"transactional": list(TRANSACTIONAL), "spared": list(SPARED)}
        async with self._storm.watcher() as conn:
            for what, query in INVARIANTS.items():
                cursor = await conn.execute(query.encode(), names if "%(" in query else None)
                self._report(what, [str(row[0]) for row in await cursor.fetchall()])
            stranded = await (await conn.execute(STRANDED)).fetchall()
            owned = await (await conn.execute(OWNED, [list(UNNOTED)])).fetchall()
        self._stranded = self._persist(self._stranded, stranded, UNOWNED, f"jobs running for {UNOWNED:g} s without an owner")
        lives = {life.process.pid: life for slot in self._fleet.workers for life in slot.lives[-1:]}
        running = {pid: self._open[life].read(life) for pid, life in lives.items()}
        unrun = [(job, attempt) for job, attempt, pid in owned if (job, attempt) not in running.get(pid, ())]
        self._unrun = self._persist(self._unrun, unrun, UNRUN, f"jobs that their worker has not run for {UNRUN:g} s")

    def _persist(
        self, before: dict[tuple[UUID, int], float], rows: Iterable[tuple[UUID, int]], limit: float, what: str
    ) -> dict[tuple[UUID, int], float]:
        now = time.monotonic()
        since = {(job, attempt): before.get((job, attempt), now) for job, attempt in rows}
        # While nobody can reach the server, nobody takes over, and nobody records.
        healthy = now - max((end for _, end in self._troubles()), default=0.0)
        self._report(what, [str(job) for (job, _), at in since.items() if min(now - at, healthy) > limit])
        return since

    def _troubles(self) -> Iterable[tuple[float, float]]:
        for slot in self._fleet.workers:
            yield from slot.blackouts
            for life in slot.lives:
                yield from life.stopped
                yield (0.0, life.started + 5.0)
        yield from self._storm.outages
        yield from self._storm.slow

    def _report(self, what: str, found: list[str]) -> None:
        new = [job for job in found if (what, job) not in self._said]
        if new:
            self._said |= {(what, job) for job in new}
            self._storm.fault(f"{len(new)} {what}: {', '.join(new[:3])}")


class _Open:
    """What one process runs by its diary, read as it grows."""

    def __init__(self) -> None:
        self._at = 0
        self._runs: set[tuple[UUID, int]] = set()

    def read(self, life: Life) -> set[tuple[UUID, int]]:
        with life.diary.open("rb") as file:
            file.seek(self._at)
            text, newline, _ = file.read().rpartition(b"\n")
            self._at += len(text + newline)
        for line in text.decode().splitlines():
            word, job, attempt, *_ = line.split()
            if word == "start":
                self._runs.add((UUID(job), int(attempt)))
            elif word == "end":
                self._runs.discard((UUID(job), int(attempt)))
        return self._runs


async def wait_ended(storm: Storm) -> None:
    """Wait until every job has ended."""
    give_up = time.monotonic() + storm.bound
    while True:
        ((left,),) = await storm.ask("SELECT (SELECT count(*) FROM aioqueue.job) - (SELECT count(*) FROM aioqueue.outcome)")
        if not left or storm.caught:
            return
        storm.drained = time.monotonic() - storm.ended
        if time.monotonic() > give_up:
            rows = await storm.ask(
                "SELECT id, task, state, attempt, spared, worker FROM aioqueue.jobs WHERE finished_at IS NULL LIMIT 5"
            )
            storm.fault(f"{left} jobs had not ended {storm.bound:g} s after the storm: {rows}")
            return
        await asyncio.sleep(0.1)


async def wait_settled(storm: Storm, fleet: Fleet) -> None:
    """Wait until the workers' rows and connections are those of the living."""
    give_up = time.monotonic() + SETTLED
    pids = {slot.life.process.pid for slot in fleet.workers}
    while True:
        workers = {row[0] for row in await storm.ask("SELECT pid FROM aioqueue.worker")}
        sessions: dict[str, int] = dict(await storm.ask(SESSIONS))
        most = max(sessions.values(), default=0)
        if workers == pids and most <= POOL + 2 and len(sessions) == len(pids):
            return
        if time.monotonic() > give_up:
            storm.fault(
                f"workers {sorted(workers)} have rows, {sorted(pids)} live; connections {sessions}, at most {POOL + 2} each"
            )
            return
        await asyncio.sleep(0.2)


async def judge(storm: Storm, executions: list[Execution]) -> None:
    """Check the books after the workers' end."""
    rows = await storm.ask(
        "SELECT j.id, j.queue, j.task, o.state, o.attempt FROM aioqueue.job j LEFT JOIN aioqueue.outcome o ON o.job_id = j.id"
    )
    jobs: dict[UUID, tuple[str, str, str | None, int | None]] = {row[0]: row[1:] for row in rows}
    there = set(jobs)
    _none(storm, "committed jobs do not exist", {*storm.committed, *storm.pooled} - there)
    _none(storm, "jobs of transactions that rolled back exist", storm.rolled_back & there)
    pooled = {job for job, (queue, *_) in jobs.items() if queue == "pooled"}
    if not len(storm.pooled) <= len(pooled) <= len(storm.pooled) + storm.pooled_unknown:
        storm.fault(f"{len(pooled)} pooled jobs of {len(storm.pooled)} answered and {storm.pooled_unknown} that raised")
    _none(storm, "jobs without an outcome", {job for job, row in jobs.items() if row[2] is None})
    by_request = {job for job, row in jobs.items() if row[2] == "cancelled" and row[1] != "quit"}
    _none(storm, "jobs that nobody cancelled are cancelled", by_request - set(storm.cancelled))
    said = {job for job, answer in storm.cancelled.items() if answer == "cancelled"}
    _none(storm, "jobs said to be cancelled are not", {job for job in said & there if jobs[job][2] != "cancelled"})
    ran = {(run.job, run.attempt) for run in executions}
    _none(storm, "jobs that do not exist ran", {job for job, _ in ran} - there)
    succeeded = {(job, row[4 - 1]) for job, row in jobs.items() if row[2] == "succeeded" and row[1] != "plain"}
    _none(storm, "jobs succeeded in an attempt that never ran", {job for job, attempt in succeeded if (job, attempt) not in ran})
    left: list[tuple[Any, ...]] = await storm.ask(
        "SELECT 'live', count(*) FROM aioqueue.live UNION ALL SELECT 'scheduled', count(*) FROM aioqueue.scheduled"
        " UNION ALL SELECT 'cancel', count(*) FROM aioqueue.cancel UNION ALL SELECT 'worker', count(*) FROM aioqueue.worker"
        " UNION ALL SELECT 'connections', count(*) FROM pg_stat_activity WHERE application_name LIKE 'storm-worker-%'"
    )
    for table, number in left:
        if number:
            storm.fault(f"{number} left at the end: {table}")
    for reason, number in await storm.ask("SELECT reason, count(*) FROM aioqueue.attempt GROUP BY 1"):
        storm.counts[f"attempts ended by: {reason}"] += number
    for task, state, number in await storm.ask("SELECT task, state, count(*) FROM aioqueue.jobs GROUP BY 1, 2"):
        storm.counts[f"{state}: {task}"] += number


def _none(storm: Storm, what: str, jobs: set[UUID]) -> None:
    if jobs:
        storm.fault(f"{len(jobs)} {what}: {', '.join(map(str, sorted(jobs)[:3]))}")
