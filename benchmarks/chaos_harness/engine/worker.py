"""A worker of the chaos run: the library's store, floors and ticker driven by hand, without its runtime.

It claims, works and records for as long as the run lasts; mortal.py has those to whom things happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.maintenance.tick import Ticker
from aioqueue.outcome import Cancelled, ErrorText, Failed, Outcome, Reason, Released, Snoozed, Succeeded
from aioqueue.pending import encode, parts
from aioqueue.settings import PoolSettings
from aioqueue.store import LOCKED, LOWEST_ID, WORKER_DEAD, LaneScan
from aioqueue.transaction_store import NOT_OWNED, pairs

from .audit import FloorAudit
from .model import LEASE, Chaos

BEAT = 0.3
TICK = 0.05
RESCUED_AT_ONCE = 7
"""Few, so that a dead worker needs several passes."""
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

    def __init__(self, chaos: Chaos, number: int, crowd: list[ChaosWorker]) -> None:
        self._chaos = chaos
        self._store = chaos.store
        self._number = number
        self._random = random.Random(f"{chaos.seed} worker {number}")
        self.id = 0
        self._floors = Floors([number for number, _ in chaos.lanes], LOWEST_ID)
        self._floors._floors = {number: chaos.floor(LOWEST_ID) for number, _ in chaos.lanes}
        self._ticker = Ticker(
            OneConnection(chaos.dsn, self), chaos.store, self._floors, worker=lambda: self.id, restarted=self._restarted
        )
        # No net below the exact rule: it would hide what the rule loses.
        self._ticker._next_full_look = math.inf
        self._next_beat = self._next_tick = self._next_rescue = 0.0
        self._lease_end = 0.0
        self.audit = FloorAudit(chaos, self._floors, f"worker {number}")
        self._crowd = crowd

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
        if self.conn.closed:
            self.conn = await self._chaos.connect()
        await self._keep()
        if jobs := await self._claim(100):
            await self._work(jobs)
        else:
            await asyncio.sleep(0.005)

    # -- the plain duties ---------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        self.id = secrets.randbits(63)
        now = time.monotonic()
        self._next_beat, self._lease_end = now + BEAT, now + LEASE
        await self._store.register_worker(
            self.conn,
            worker=self.id,
            host="chaos",
            pid=self._number,
            version="0",
            queues=[],
            concurrency=100,
            lease=LEASE,
            tasks=[],
        )

    async def _beat(self) -> bool:
        """Beat; a refused one means a new identity."""
        now = time.monotonic()
        self._next_beat = now + BEAT
        if await self._store.beat(self.conn, worker=self.id, lease=LEASE, running=0):
            self._lease_end = now + LEASE
            return True
        self._chaos.counts["refused beats"] += 1
        # Counted from before a beat was sent, and judged after the answer: no slow machine is an excuse.
        if time.monotonic() < self._lease_end:
            self._chaos.fault(f"worker {self._number} was taken for dead before its lease had ended")
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
            self.audit.begin_tick()
            tick = await self._ticker.tick()
            await self.audit.end_tick(self.conn, self._ticker.due_from())
            if tick.next_due is not None and tick.next_due <= tick.clock:
                number = await self._store.promote(self.conn, due_from=self._ticker.due_from(), limit=100)
                self._chaos.counts["promoted"] += max(0, number)

    async def _claim(self, limit: int) -> list[Claimed]:
        before = [(worker.audit, worker.audit.starts()) for worker in self._crowd]
        try:
            jobs = await self._ask(limit)
        except psycopg.Error as error:
            if error.sqlstate != WORKER_DEAD:
                raise
            self._chaos.counts["refused claims"] += 1
            await self._beat()
            return []
        self._claimed(jobs)
        for audit, starts in before:
            audit.owe(jobs, starts)
        return jobs

    async def _ask(self, limit: int) -> list[Claimed]:
        lanes = [LaneScan(number, self._floors[number].start, max(1, limit // 3), group) for number, group in self._chaos.lanes]
        return (await self._store.claim(self.conn, worker=self.id, lanes=lanes, limit=limit)).jobs

    def _claimed(self, jobs: Sequence[Claimed]) -> None:
        self._chaos.claimed(jobs)
        for job in jobs:
            self._floors.claimed(job.lane, job.vt)

    async def _work(self, jobs: Sequence[Claimed]) -> None:
        """Run the jobs, so to say, and write how they ended."""
        await asyncio.sleep(self._random.uniform(0, 0.002))
        alone = {job.job_id for job in jobs if self._random.random() < 0.05}
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

    async def _write(self, outcomes: Mapping[UUID, tuple[Claimed, Outcome]]) -> dict[UUID, str]:
        """Record outcomes of one worker's jobs, as its recorder does; the states of those that were accepted.

        One whose row somebody holds (a cancel in a transaction left open, a rescue) is sent again until it is let go.
        """
        states: dict[UUID, str] = {}
        rest = dict(outcomes)
        while rest:
            others, succeeded, results = parts([encode(job, outcome) for job, outcome in rest.values()])
            worker = next(job.worker for job, _ in rest.values())
            found = await self._store.record(self.conn, worker=worker, outcomes=others, succeeded=succeeded, results=results)
            found = dict.fromkeys(rest, "succeeded") if found is None else found
            states |= {job_id: state for job_id, state in found.items() if state != LOCKED}
            rest = {job_id: rest[job_id] for job_id, state in found.items() if state == LOCKED}
            if rest:
                self._chaos.counts["records that met a held row"] += len(rest)
                await asyncio.sleep(0.01)
        return states

    async def _record(self, jobs: Sequence[Claimed]) -> None:
        """Record outcomes of any kind; every job of a worker that lives must be accepted."""
        if not jobs:
            return
        outcomes = {job.job_id: (job, self._outcome(job)) for job in jobs}
        worker = jobs[0].worker
        if self._random.random() < 0.02:
            async with self.conn.transaction(force_rollback=True):
                await self._write(outcomes)
            self._chaos.counts["records rolled back and repeated"] += 1
        states = await self._write(outcomes)
        now = time.time()
        for job_id, state in states.items():
            if state in ("succeeded", "dead", "cancelled"):
                self._chaos.ended(job_id)
            elif job_id not in self._chaos.ready_at:
                _, outcome = outcomes[job_id]
                self._chaos.ready_at[job_id] = now + (getattr(outcome, "delay", 0.0) or 0.0)
        if self._random.random() < 0.02 and await self._write(outcomes):
            self._chaos.fault("a record that was repeated was accepted twice")
        if len(states) < len(jobs):
            await self._refused(worker, len(jobs) - len(states))

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
        except psycopg.errors.LockNotAvailable:
            self._chaos.counts["finishes that waited too long"] += 1
            await self._record([job])
        except psycopg.Error as error:
            if error.sqlstate != NOT_OWNED:
                raise
            await self._refused(job.worker, 1)
        else:
            self._chaos.ended(job.job_id)

    async def _finish_here(self, job: Claimed) -> None:
        values = {"aioqueue_job.marker": "chaos", "app.tenant": job.tenant or "", "row_security": "on"}
        await self._store.set_local(self.conn, values)
        await self._store.execute(self.conn, "finish", (*job.fence, pairs(values), "null"))
