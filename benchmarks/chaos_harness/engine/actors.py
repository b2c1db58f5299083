"""The actors of a chaos run beside its workers: those that enqueue, late and out of order, and those that cancel."""

from __future__ import annotations

import asyncio
import random
import time
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, IsolationLevel
from psycopg.rows import TupleRow

from aioqueue.job import JobState, new_job_id
from benchmarks.mixed_jobs import NewJob, enqueue_many

from .model import Chaos

BURSTS = (1, 1, 2, 2, 25)
TENANTS = 40


async def kill(chaos: Chaos, conn: AsyncConnection[TupleRow]) -> None:
    """End the connection's session on the server, as a crash of its client would, and wait until it is gone."""
    async with await chaos.connect() as other:
        await other.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
    await conn.close()


class Enqueuer:
    """Enqueues in transactions that commit at once, late (up to 5 s), or never."""

    def __init__(self, chaos: Chaos, number: int, rate: float) -> None:
        self._chaos = chaos
        self._random = random.Random(f"{chaos.seed} enqueuer {number}")
        self._rate = rate / 4 if chaos.narrow else rate

    async def run(self) -> None:
        """Enqueue until the run's time is over."""
        end = time.monotonic() + self._chaos.seconds
        conn = await self._chaos.connect()
        try:
            while time.monotonic() < end and not self._chaos.caught:
                if conn.closed:
                    conn = await self._chaos.connect()
                await self._transaction(conn)
                await asyncio.sleep(self._random.expovariate(self._rate))
        finally:
            await conn.close()

    def _late(self) -> float:
        dice = self._random.random()
        if self._chaos.narrow and dice < 0.5:
            return self._random.uniform(0.3, 2)
        if dice < 0.80:
            return 0.0
        if dice < 0.95:
            return self._random.uniform(0, 0.1)
        return self._random.uniform(0.3, 2) if dice < 0.99 else self._random.uniform(3, 5)

    def _job(self) -> NewJob:
        dice = self._random
        tenant = None if dice.random() < 0.1 else "1" if dice.random() < 0.5 else str(dice.randint(2, TENANTS))
        return NewJob(
            id=new_job_id(),
            task="chaos",
            payload="{}",
            queue=dice.choice(self._chaos.queues),
            priority=dice.choice(self._chaos.priorities),
            tenant=tenant,
            max_attempts=dice.choice((3, 5, 10)),
            delay=dice.random() if dice.random() < 0.1 else None,
        )

    async def _transaction(self, conn: AsyncConnection[TupleRow]) -> None:
        chaos, dice = self._chaos, self._random
        late = self._late()
        end = dice.choices(("commit", "rollback", "kill"), (94, 5, 1))[0]
        level = dice.choices((None, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE), (80, 10, 10))[0]
        known: dict[UUID, float] = {}
        try:
            if end == "commit" and not late and level is None:
                await self._enqueue(conn, known)
            else:
                await conn.set_isolation_level(level)
                async with conn.transaction():
                    for _ in range(dice.choice((1, 1, 2))):
                        await self._enqueue(conn, known)
                        await asyncio.sleep(late / 2)
                    if end == "rollback":
                        chaos.counts["rolled back enqueues"] += 1
                        raise psycopg.Rollback
                    if end == "kill":
                        chaos.counts["killed enqueues"] += 1
                        await kill(chaos, conn)
                        return
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            chaos.counts["serialization failures"] += 1
            return
        except psycopg.OperationalError:
            if end == "kill":
                return
            raise
        finally:
            if not conn.closed:
                await conn.set_isolation_level(None)
        if end == "rollback":
            return
        now = time.time()
        for job, due in known.items():
            chaos.committed.add(job)
            if job not in chaos.claims and not chaos.ends[job]:
                chaos.ready_at[job] = max(now, due)
        chaos.counts["enqueued"] += len(known)
        if late > 0.2:
            chaos.counts["committed late"] += len(known)

    async def _enqueue(self, conn: AsyncConnection[TupleRow], known: dict[UUID, float]) -> None:
        jobs = [self._job() for _ in range(self._random.choice(BURSTS[:2] if self._chaos.narrow else BURSTS))]
        await enqueue_many(self._chaos.store, conn, jobs)
        now = time.time()
        known.update((job.id, now + (job.delay or 0.0)) for job in jobs)


class Canceller:
    """Cancels committed jobs now and then, some in transactions that stay open or roll back."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        self._random = random.Random(f"{chaos.seed} canceller")

    async def run(self) -> None:
        """Cancel until no more jobs come."""
        chaos, dice = self._chaos, self._random
        async with await chaos.connect() as conn:
            while not chaos.enqueued.is_set():
                await asyncio.sleep(dice.uniform(0, 0.1))
                open_jobs = list(chaos.ready_at) or list(chaos.committed)[-50:]
                if open_jobs:
                    await self._cancel(conn, dice.choice(open_jobs))

    async def _cancel(self, conn: AsyncConnection[TupleRow], job: UUID) -> None:
        chaos, dice = self._chaos, self._random
        kept = dice.random() < 0.8
        hold = dice.random() * 0.4 if dice.random() < 0.2 else 0.0
        ended = chaos.ends[job]
        try:
            async with conn.transaction():
                state = await chaos.store.cancel_job(conn, job)
                await asyncio.sleep(hold)
                if not kept:
                    raise psycopg.Rollback
        except psycopg.errors.SerializationFailure:
            chaos.counts["cancels that met a moving job"] += 1
            return
        except psycopg.errors.LockNotAvailable:
            chaos.counts["cancels that waited too long"] += 1
            return
        if not kept:
            return
        chaos.counts["cancel requests"] += 1
        if state is None:
            chaos.fault(f"cancel does not know the committed job {job}")
        elif state is JobState.CANCELLED and not ended and not chaos.ends[job]:
            # Ended by this call, or by its worker a moment ago; the outcome's primary key keeps the two apart.
            chaos.ended(job)
            chaos.ready_at.pop(job, None)
