"""A worker of the chaos run: the library's store, floors and ticker driven by hand, without its runtime.

It claims, works, records; it dies and comes back as a zombie; it holds claims open until its lease is over; it claims in
transactions that roll back and records what it never had. After each it checks what the promises say of that case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.job import Claimed
from aioqueue.maintenance.tick import Ticker
from aioqueue.outcome import Cancelled, ErrorText, Failed, Outcome, Reason, Released, Snoozed, Succeeded
from aioqueue.record import encode
from aioqueue.settings import PoolSettings
from aioqueue.store import LOWEST_ID, NOT_OWNED, WORKER_DEAD, LaneScan

from .chaos_actors import kill
from .chaos_run import LEASE, Chaos

BEAT = 0.3
TICK = 0.05
RESCUED_AT_ONCE = 7
"""Few, so that a dead worker needs several passes."""
AUDIT_EVERY = 6
TAKEN_OVER = 15.0
"""Seconds in which the others must have taken over what a dead worker ran."""
ERROR = ErrorText("Chaos", "failed on purpose")


class OneConnection(Database):
    """The worker's own connection, for the ticker."""

    def __init__(self, dsn: str, worker: ChaosWorker) -> None:
        super().__init__(dsn, PoolSettings())
        self._worker = worker

    @contextlib.asynccontextmanager
    async def runtime(self, seconds: float | None = None) -> AsyncIterator[AsyncConnection[TupleRow]]:
        """Lend the one connection."""
        yield self._worker.conn


class ChaosWorker:
    """One process, so to say: one connection, one set of floors, one identity after the other."""

    conn: AsyncConnection[TupleRow]

    def __init__(self, chaos: Chaos, number: int, others: list[ChaosWorker], *, mortal: bool) -> None:
        self._chaos = chaos
        self._store = chaos.store
        self._number = number
        self._mortal = mortal
        self._random = random.Random(f"{chaos.seed} worker {number}")
        self.id = 0
        self._floors = Floors([number for number, _ in chaos.lanes], LOWEST_ID)
        self._floors._floors = {number: chaos.floor(LOWEST_ID) for number, _ in chaos.lanes}
        self._ticker = Ticker(
            OneConnection(chaos.dsn, self), chaos.store, self._floors, worker=lambda: self.id, restarted=self._restarted
        )
        # No net below the exact rule: it would hide what the rule loses.
        self._ticker._next_full_look = math.inf
        self._next_beat = self._next_tick = self._next_rescue = self._dies = 0.0
        self._lease_end = 0.0
        self._ticks = 0
        self._below: set[tuple[object, ...]] | None = None
        self._owed: list[tuple[int, int, tuple[int, UUID]]] = []
        self._all = others

    def _restarted(self) -> None:
        self._chaos.counts["server restarts seen"] += 1

    async def run(self) -> None:
        """Work until the run is finished; then resign."""
        self.conn = await self._chaos.connect()
        try:
            await self._register()
            while not self._chaos.finished.is_set():
                await self._turn()
            await self._store.resign(self.conn, worker=self.id)
        finally:
            await self.conn.close()

    async def _turn(self) -> None:
        dice = self._random
        if self.conn.closed:
            self.conn = await self._chaos.connect()
        await self._keep()
        dying = self._mortal and not self._chaos.enqueued.is_set()
        if self._mortal and dice.random() < 0.03:
            await self._claim_in_vain()
        elif dying and time.monotonic() > self._dies:
            await dice.choice((self._die, self._late, self._hold_claim))()
            self._dies = time.monotonic() + dice.uniform(0.5, 2)
        else:
            # One that neither dies nor dawdles, so that delays measure the engine and not a lack of workers.
            jobs = await self._claim(dice.choice((1, 5, 20)) if self._mortal else 100)
            if not jobs:
                await asyncio.sleep(0.005)
                return
            await self._work(jobs)

    # -- the plain duties ---------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        self.id = secrets.randbits(63)
        now = time.monotonic()
        self._next_beat, self._lease_end = now + BEAT, now + LEASE
        self._dies = now + self._random.uniform(0.5, 2)
        await self._store.register_worker(
            self.conn, worker=self.id, host="chaos", pid=self._number, version="0", queues=[], concurrency=100, lease=LEASE, tasks=[]
        )

    async def _beat(self) -> bool:
        """Beat; a refused one means a new identity."""
        now = time.monotonic()
        self._next_beat = now + BEAT
        if await self._store.beat(self.conn, worker=self.id, lease=LEASE, running=0):
            self._lease_end = now + LEASE
            return True
        self._chaos.counts["refused beats"] += 1
        await self._register()
        return False

    async def _keep(self) -> None:
        now = time.monotonic()
        if now > self._next_beat:
            await self._beat()
        if now > self._next_rescue:
            self._next_rescue = now + 0.2
            found = await self._store.rescue(self.conn, worker=self.id, limit=RESCUED_AT_ONCE)
            if found is not None:
                self._chaos.counts["rescued"] += found[1]
        if now > self._next_tick:
            self._next_tick = now + TICK
            self._ticks += 1
            tick = await self._ticker.tick()
            self._settle_owed()
            if tick.next_due is not None and tick.next_due <= tick.clock:
                number = await self._store.promote(self.conn, due_from=self._ticker.due_from(), limit=100)
                self._chaos.counts["promoted"] += max(0, number)
            if self._ticks % AUDIT_EVERY < 2:
                await self._audit()

    def owe(self, jobs: Sequence[Claimed], before: dict[int, tuple[int, UUID]]) -> None:
        """Jobs that another worker found ready where this one's floor had passed (before that claim, and still).

        Right only if they were committed after this worker's last tick looked; then its next tick takes the floor back.
        """
        for job in jobs:
            position = job.vt, job.job_id
            if position < before[job.lane] and position < self._floors[job.lane].start:
                self._owed.append((self._ticks, job.lane, position))

    def starts(self) -> dict[int, tuple[int, UUID]]:
        """Where this worker's scans begin now."""
        return {number: self._floors[number].start for number in self._floors.lanes}

    def _settle_owed(self) -> None:
        below = [owed for owed in self._owed if owed[2] < self._floors[owed[1]].start]
        for _, number, position in (owed for owed in below if owed[0] < self._ticks):
            self._chaos.fault(f"worker {self._number}: its floor in lane {number} passed the ready position {position}")
        self._owed = [owed for owed in below if owed[0] == self._ticks]

    async def _audit(self) -> None:
        """What is ready below a floor before a tick and still after it was committed when the tick looked: it is lost."""
        starts = [(number, *self._floors[number].start) for number, _ in self._chaos.lanes]
        rows = await self._chaos.rows(
            self.conn,
            "SELECT l.lane, l.vt, l.job_id FROM unnest(%s::bigint[], %s::bigint[], %s::uuid[]) AS u (lane, vt, id)"
            " JOIN aioqueue.live l ON l.lane = u.lane AND (l.vt, l.job_id) < (u.vt, u.id) AND l.worker IS NULL"
            " UNION ALL SELECT 0, (extract(epoch FROM s.run_at) * 1000000)::bigint, s.job_id FROM aioqueue.scheduled s"
            " WHERE s.run_at < %s",
            *map(list, zip(*starts, strict=True)),
            self._ticker.due_from(),
        )
        below = set(rows)
        if self._ticks % AUDIT_EVERY == 0:
            self._below = below
        elif self._below is not None:
            self._chaos.counts["floor audits"] += 1
            for position in self._below & below:
                self._chaos.fault(f"worker {self._number}: ready below its floor and not seen by a tick: {position}")
            self._below = None

    async def _claim(self, limit: int) -> list[Claimed]:
        before = [(worker, worker.starts()) for worker in self._all]
        try:
            jobs = await self._ask(limit)
        except psycopg.Error as error:
            if error.sqlstate != WORKER_DEAD:
                raise
            self._chaos.counts["refused claims"] += 1
            await self._beat()
            return []
        self._claimed(jobs)
        for worker, starts in before:
            worker.owe(jobs, starts)
        return jobs

    async def _ask(self, limit: int) -> list[Claimed]:
        lanes = [LaneScan(number, self._floors[number].start, max(1, limit // 3), group) for number, group in self._chaos.lanes]
        return await self._store.claim(self.conn, worker=self.id, lanes=lanes, limit=limit)

    def _claimed(self, jobs: Sequence[Claimed]) -> None:
        self._chaos.claimed(jobs)
        for job in jobs:
            self._floors.claimed(job.lane, job.vt)

    async def _work(self, jobs: Sequence[Claimed]) -> None:
        dice = self._random
        await asyncio.sleep(dice.uniform(0, 0.02 if self._mortal else 0.002))
        if self._mortal and dice.random() < 0.03:
            until = time.monotonic() + dice.uniform(0.1, 2 * LEASE)
            while time.monotonic() < until:
                await self._keep()
                await asyncio.sleep(0.01)
        alone = {job.job_id for job in jobs if dice.random() < 0.05}
        for job in jobs:
            if job.job_id in alone:
                await self._finish(job)
        await self._record([job for job in jobs if job.job_id not in alone])

    # -- records ------------------------------------------------------------------------------------------------------

    def _outcome(self, job: Claimed) -> Outcome:
        dice = self._random.random()
        if dice < 0.86:
            return Succeeded("null")
        if dice < 0.94:
            delay = self._random.choice((0.0, self._random.random()))
            return Failed(Reason.ERROR, ERROR, delay if job.failures < job.max_attempts else None)
        if dice < 0.95:
            return Failed(Reason.ERROR, ERROR, None)
        if dice < 0.97:
            return Snoozed(self._random.random())
        if dice < 0.99:
            return Released(Reason.INTERRUPTED, "handed back on purpose")
        return Cancelled("cancelled on purpose")

    async def _record(self, jobs: Sequence[Claimed]) -> dict[object, str]:
        """Record outcomes of any kind; every job of a worker that lives must be accepted."""
        if not jobs:
            return {}
        outcomes = {job.job_id: self._outcome(job) for job in jobs}
        text = f"[{','.join(encode(job, outcomes[job.job_id]).text for job in jobs)}]"
        worker = jobs[0].worker
        if self._random.random() < 0.02:
            async with self.conn.transaction(force_rollback=True):
                await self._store.record(self.conn, worker=worker, outcomes=text)
            self._chaos.counts["records rolled back and repeated"] += 1
        states = await self._store.record(self.conn, worker=worker, outcomes=text)
        now = time.time()
        for job_id, state in states.items():
            if state in ("succeeded", "dead", "cancelled"):
                self._chaos.ended(job_id)
            elif job_id not in self._chaos.ready_at:
                outcome = outcomes[job_id]
                self._chaos.ready_at[job_id] = now + (getattr(outcome, "delay", 0.0) or 0.0)
        if self._random.random() < 0.02 and await self._store.record(self.conn, worker=worker, outcomes=text):
            self._chaos.fault("a record that was repeated was accepted twice")
        if len(states) < len(jobs):
            await self._refused(worker, len(jobs) - len(states))
        return dict(states)

    async def _refused(self, worker: int, number: int) -> None:
        self._chaos.counts["late records fenced"] += number
        if worker == self.id and await self._beat():
            self._chaos.fault(f"{number} outcomes of a worker that lives were refused")

    async def _finish(self, job: Claimed) -> None:
        """End the job in a transaction of its own; some are rolled back at first."""
        try:
            if self._random.random() < 0.2:
                async with self.conn.transaction(force_rollback=True):
                    await self._finish_here(job)
            async with self.conn.transaction():
                await self._finish_here(job)
        except psycopg.Error as error:
            if error.sqlstate != NOT_OWNED:
                raise
            await self._refused(job.worker, 1)
        else:
            self._chaos.ended(job.job_id)

    async def _finish_here(self, job: Claimed) -> None:
        values = {"aioqueue_job.marker": "chaos", "app.tenant": job.tenant or "", "row_security": "on"}
        await self._store.set_local(self.conn, values)
        await self._store.finish(self.conn, job, marker="chaos", setting="app.tenant", result="null")

    # -- what goes wrong ----------------------------------------------------------------------------------------------

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
        for _ in range(4):
            await asyncio.sleep(dice.uniform(0, 0.02))
            await self._expect_fenced(jobs, "of a claim that never committed")

    async def _expect_fenced(self, jobs: Sequence[Claimed], what: str) -> None:
        if not jobs:
            return
        text = f"[{','.join(encode(job, Succeeded('null')).text for job in jobs)}]"
        states = await self._store.record(self.conn, worker=jobs[0].worker, outcomes=text)
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
