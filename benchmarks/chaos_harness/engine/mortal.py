"""Workers of the chaos run to whom things happen.

They die and come back as zombies; they record about the end of their lease; they hold claims open until it is over; they
claim in transactions that roll back or are killed, and record what they never had. After each, what the promises say of
that case is checked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import psycopg

from aioqueue.claimed import Claimed
from aioqueue.outcome import Succeeded
from aioqueue.store import WORKER_DEAD
from aioqueue.transaction_store import NOT_OWNED

from .actors import kill
from .model import LEASE
from .worker import RESCUED_AT_ONCE, ChaosWorker

TAKEN_OVER = 30.0
"""Seconds in which the others must have taken over what a dead worker ran."""


class MortalWorker(ChaosWorker):
    """A worker that dies again and again."""

    _dies = 0.0

    async def _register(self) -> None:
        await super()._register()
        self._dies = time.monotonic() + self._random.uniform(0.5, 2)

    async def _turn(self) -> None:
        dice = self._random
        if self.conn.closed:
            self.conn = await self._chaos.connect()
        await self._keep()
        if dice.random() < 0.03:
            await self._claim_in_vain()
        elif time.monotonic() > self._dies and not self._chaos.enqueued.is_set():
            await dice.choice((self._die, self._late, self._hold_claim))()
            self._dies = time.monotonic() + dice.uniform(0.5, 2)
        elif jobs := await self._claim(dice.choice((1, 5, 20))):
            await self._work(jobs)
        else:
            await asyncio.sleep(0.005)

    async def _work(self, jobs: Sequence[Claimed]) -> None:
        dice = self._random
        await asyncio.sleep(dice.uniform(0, 0.02))
        if dice.random() < 0.03:
            until = time.monotonic() + dice.uniform(0.1, 2 * LEASE)
            while time.monotonic() < until:
                await self._keep()
                await asyncio.sleep(0.01)
        await super()._work(jobs)

    async def _claim_in_vain(self) -> None:
        """Claim in a transaction that rolls back or is killed, then record what was never had: nothing may be accepted."""
        dice = self._random
        killed = dice.random() < 0.3
        jobs: list[Claimed] = []
        try:
            async with self.conn.transaction():
                jobs = await self._ask(20)
                await asyncio.sleep(dice.choice((0, 0.01, 0.2)))
                if killed:
                    await kill(self._chaos, self.conn)
                else:
                    raise psycopg.Rollback
        except psycopg.Error as error:
            if error.sqlstate == WORKER_DEAD:
                await self._beat()
                return
            if not killed:
                raise
        if self.conn.closed:
            self.conn = await self._chaos.connect()
        self._chaos.counts["claims killed" if killed else "claims rolled back"] += 1
        now = time.time()
        for job in jobs:
            if job.job_id in self._chaos.ready_at:
                self._chaos.ready_at[job.job_id] = now
        # Again and again: it is wrong while another worker runs them, which is short.
        for _ in range(10):
            await asyncio.sleep(dice.uniform(0, 0.004))
            await self._expect_fenced(jobs, "of a claim that never committed")

    async def _expect_fenced(self, jobs: Sequence[Claimed], what: str) -> None:
        if not jobs:
            return
        states = await self._write({job.job_id: (job, Succeeded("null")) for job in jobs})
        self._chaos.counts["zombie records fenced"] += len(jobs) - len(states)
        for job_id in states:
            self._chaos.ended(job_id)
        if states:
            self._chaos.fault(f"{len(states)} records {what} were accepted")
        job = self._random.choice(jobs)
        try:
            async with self.conn.transaction():
                await self._finish_here(job)
        except psycopg.Error as error:
            if error.sqlstate != NOT_OWNED:
                raise
            self._chaos.counts["zombie finishes fenced"] += 1
        else:
            self._chaos.ended(job.job_id)
            self._chaos.fault(f"the finish {what} was accepted")

    async def _claim_some(self) -> list[Claimed]:
        """Claim until there are more jobs than one pass of rescue takes, or for half a second."""
        jobs: list[Claimed] = []
        until = time.monotonic() + 0.5
        while len(jobs) < 2 * RESCUED_AT_ONCE and time.monotonic() < until:
            await self._keep()
            jobs += await self._claim(20)
            # A new identity has nothing to do with what the old one held.
            jobs = [job for job in jobs if job.worker == self.id]
            await asyncio.sleep(0.002)
        return jobs

    async def _die(self) -> None:
        """Stop beating while jobs run, wait until they were taken over, and come back as a zombie."""
        jobs = await self._claim_some()
        self._chaos.counts["deaths"] += 1
        self._chaos.counts["jobs held at death"] += len(jobs)
        limit = time.monotonic() + TAKEN_OVER
        while True:
            await asyncio.sleep(0.1)
            if self._chaos.caught:
                return
            ((running,),) = await self._chaos.rows(self.conn, "SELECT count(*) FROM aioqueue.live WHERE worker = %s", self.id)
            if not running and time.monotonic() > self._lease_end + 0.3:
                break
            if time.monotonic() > limit:
                self._chaos.fault(f"{running} jobs of a dead worker were not taken over within {TAKEN_OVER:g} s")
                break
        await self._expect_fenced(jobs, "of a dead worker")
        try:
            claimed = await self._ask(20)
        except psycopg.Error as error:
            if error.sqlstate != WORKER_DEAD:
                raise
            self._chaos.counts["zombie claims refused"] += 1
        else:
            self._claimed(claimed)
            self._chaos.fault(f"a dead worker claimed {len(claimed)} jobs")
        await self._beat()

    async def _late(self) -> None:
        """Be silent until about the end of the lease, then record: accepted or fenced, but one of the two."""
        jobs = await self._claim_some()
        await asyncio.sleep(max(0.0, self._lease_end - time.monotonic() + self._random.uniform(-0.05, 0.4)))
        self._chaos.counts["late records"] += len(jobs)
        await self._record(jobs)

    async def _hold_claim(self) -> None:
        """Hold a claim's transaction open until the lease is over: rescue must neither overlap with it nor miss its jobs."""
        try:
            async with self.conn.transaction():
                jobs = await self._ask(20)
                while not jobs and time.monotonic() < self._lease_end - 0.2:
                    await asyncio.sleep(0.002)
                    jobs = await self._ask(20)
                await asyncio.sleep(max(0.0, self._lease_end - time.monotonic() + self._random.uniform(0.1, 0.8)))
        except psycopg.Error as error:
            if error.sqlstate != WORKER_DEAD:
                raise
            await self._beat()
            return
        for job in jobs:
            self._chaos.ready_at.pop(job.job_id, None)
        self._claimed(jobs)
        self._chaos.counts["claims held past the lease"] += 1
        if self._random.random() < 0.5:
            await self._die()
        else:
            await self._record(jobs)
            await self._beat()
