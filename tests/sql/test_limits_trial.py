"""Limits under everything at once: many claimers, workers that die, hand-backs, cancels, changes of limits and weights.

A watcher looks in snapshots of its own: never is more running than a limit that does not change. At the end every job has its
one outcome, and nothing is held or parked, although most unparks are left to chance and the sweep.
"""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from aioqueue.floor import KeyFloors
from aioqueue.job import SUSPECT, lane
from tests.sql.conftest import Connect
from tests.sql.engine import Session, changed, entry

pytestmark = pytest.mark.anyio
LANES = [lane(queue, level) for queue in ("default", "other") for level in (1, 0, SUSPECT)]
FIXED = {"T0": 1, "T1": 3}
PER_KEY = 2
RUNNING = "SELECT j.tenant, j.task, j.key FROM aioqueue.live l JOIN aioqueue.job j ON j.id = l.job_id WHERE l.worker IS NOT NULL"


class Trial:
    """One run, by its seed."""

    def __init__(self, connect: Connect, seed: int, jobs: int) -> None:
        self.connect = connect
        self.chance = random.Random(seed)
        self.jobs = jobs
        self.most: Counter[tuple[str, ...]] = Counter()
        self.done = False

    async def prepare(self, one: Session) -> None:
        for tenant, most in FIXED.items():
            await one.limit(tenant, most)
        await one.limit_task("t", 8, per_key=PER_KEY)
        for _ in range(self.jobs):
            await one.enqueue_one(
                task=self.chance.choice("tu"),
                tenant=self.chance.choice([None, "T0", "T1", "T2", "T3"]),
                key=self.chance.choice([None, "a", "b"]),
                queue=self.chance.choice(["default", "default", "other"]),
                priority=self.chance.choice([0, 0, 1]),
                max_attempts=1_000,
            )

    async def left(self, session: Session) -> int:
        ended = await session.value("SELECT count(*) FROM aioqueue.outcome")
        return self.jobs - int(ended)

    async def work(self) -> None:
        """Claim, end jobs in all ways, unpark at times; die at times, and go on under a new identity."""
        session = await self.connect("worker")
        worker = await session.register()
        held, parked = KeyFloors(capacity=4), KeyFloors(capacity=4)
        while await self.left(session):
            claims = await session.claims(worker, self.chance.randrange(1, 12), lanes=LANES, key_floors=held.text(0))
            held.learn(claims.key_floors, 0)
            if self.chance.random() < 0.1:
                await session.rows("SELECT aioqueue.resign(%s)", worker)
                worker = await session.register()
                continue
            ends = [entry(job, **self.end()) for job in claims.jobs]
            await session.record_all(worker, *ends)
            keys = Counter(key for job in claims.jobs for key in job.keys or ())
            keys.update(claims.passed)
            if keys and self.chance.random() < 0.7:
                _, firsts = await session.store.unpark(session.conn, keys, held=held.text(0), parked=parked.text(0))
                parked.learn(firsts, 0)
            elif not claims.jobs:
                await session.sweep()

    def end(self) -> dict[str, Any]:
        return self.chance.choice(
            [
                {},
                {},
                {},
                {"reason": "error", "d": 0},
                {"reason": "interrupted", "d": 0, "s": True},
                {"reason": "error", "d": None},
            ]
        )

    async def disturb(self) -> None:
        """Rescue, cancel, change what may change."""
        session = await self.connect("owner")
        while await self.left(session):
            match self.chance.randrange(5):
                case 0 | 1:
                    await session.rescue()
                    # Of those lost twice, which would wait a while.
                    await session.rows("UPDATE aioqueue.scheduled SET run_at = clock_timestamp()")
                    await session.store.promote(session.conn, limit=100)
                case 2:
                    found = await session.rows("SELECT job_id FROM aioqueue.parked LIMIT 1")
                    for (job_id,) in found if self.chance.random() < 0.2 else []:
                        await session.cancel(job_id)
                case 3:
                    tenant = self.chance.choice(["T2", "T3"])
                    limit = self.chance.choice([None, 1, 2, 50])
                    await session.limit(tenant, limit, paused=self.chance.random() < 0.2, weight=self.chance.choice([None, 3]))
                    await session.store.settle_limits(session.conn)
                    await session.store.park_tenant(session.conn, tenant, limit=20)
                case 4:
                    paused = self.chance.random() < 0.5
                    await session.store.set_queue(session.conn, "other", paused=paused)
            for tenant in ("T2", "T3"):
                if self.chance.random() < 0.3:
                    await session.limit(tenant, None)
            await session.store.set_queue(session.conn, "other", paused=False)

    async def watch(self) -> None:
        session = await self.connect("owner")
        while not self.done:
            found: Counter[tuple[str, ...]] = Counter()
            for tenant, task, key in await session.rows(RUNNING):
                found["tenant", tenant] += 1
                if task == "t":
                    found["task", task] += 1
                    found["key", str(key)] += key is not None
            for name, number in found.items():
                self.most[name] = max(self.most[name], number)

    async def run(self, claimers: int = 5) -> None:
        watcher = asyncio.create_task(self.watch())
        try:
            async with asyncio.timeout(120):
                await asyncio.gather(self.disturb(), *(self.work() for _ in range(claimers)))
        finally:
            self.done = True
            await watcher

    @property
    def broken(self) -> dict[tuple[str, ...], int]:
        """Limits that were passed, with the most that was seen."""
        limits = {("tenant", tenant): most for tenant, most in FIXED.items()}
        limits |= {("task", "t"): 8, ("key", "a"): PER_KEY, ("key", "b"): PER_KEY}
        return {name: self.most[name] for name, limit in limits.items() if self.most[name] > limit}


@pytest.mark.parametrize("seed", [1, 2])
async def test_exact_at_every_moment_and_nothing_stays_parked(connect: Connect, boss: Session, one: Session, seed: int) -> None:
    trial = Trial(connect, seed, 150)
    await trial.prepare(one)
    await trial.run()
    assert trial.broken == {}
    assert trial.most["tenant", "T1"] == FIXED["T1"], "the limit was reached"
    for table in ("live", "scheduled", "held", "parked"):
        assert await boss.value(f"SELECT count(*) FROM aioqueue.{table}") == 0, table
    assert await boss.value("SELECT count(*) FROM aioqueue.outcome") == trial.jobs


async def test_sabotaged_without_locks_the_watcher_sees_it(connect: Connect, boss: Session, one: Session) -> None:
    trial = Trial(connect, 1, 150)
    await trial.prepare(one)
    async with changed(
        boss, "claim_limited", ("busy := aioqueue.lock_keys(f_keys, pass = 1);", "busy := '{}'; PERFORM pg_sleep(0.005);")
    ):
        await trial.run()
    assert trial.broken != {}
