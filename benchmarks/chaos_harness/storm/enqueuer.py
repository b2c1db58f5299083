"""A process that enqueues in a storm: transactions that commit, late too, roll back, are cut off; cancels; waiters.

    python -m benchmarks.chaos_harness.storm.enqueuer JOURNAL DSN SEED RATE CANCELS

Each transaction writes its jobs' ids into storm.asked beside the jobs themselves: the two must always agree, whatever was
answered. What was asked and what was answered goes into the journal (journal.py), so that this process may be killed at any
moment. Ends at SIGTERM, when every waiter has heard of its job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import AioQueue
from aioqueue.errors import AioQueueError, JobCancelled, JobFailed
from aioqueue.job import Job

from . import clock
from .journal import Journal
from .tasks import LEASE, made

COROUTINES = 8
TENANTS = [f"tenant {number}" for number in range(10)]
FATES = {"commit": 72, "late": 13, "rollback": 7, "cut": 4, "cut at COMMIT": 4}
RESULTS = {"plain": "number", "sleep": "seconds", "fail": "times", "snooze": "times", "write": "fails"}
"""Tasks that return one of their arguments, and which."""
CHECKED = ("write", "parent", "short")
"""Tasks that are told their tenant, and look whether it is theirs."""
BATCHES = 0.2
"""The share of transactions that enqueue many small jobs."""
JOBS = (1 - BATCHES) * 2 + BATCHES * 35
"""Jobs of a transaction, on average."""


class Enqueuer:
    """One coroutine that enqueues until it is told to stop."""

    def __init__(self, journal: Journal, dsn: str, app: AioQueue, dice: random.Random, rate: float, over: asyncio.Event) -> None:
        self._journal = journal
        self._dsn = dsn
        self._app = app
        self._dice = dice
        self._rate = rate
        self._over = over
        self._conn: AsyncConnection[TupleRow] | None = None
        self._waiters: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until told to stop, and every waiter has its answer."""
        while await pause(self._over, self._dice.expovariate(self._rate)):
            if self._dice.random() < 0.15:
                await self._pooled()
            else:
                await self._transaction()
        if self._conn is not None:
            await self._conn.close()
        if self._waiters:
            await asyncio.wait(self._waiters)

    async def _pooled(self) -> None:
        self._journal.note("try")
        with contextlib.suppress(psycopg.OperationalError, AioQueueError):
            job = await self._app.tasks["nothing"].options(queue="pooled").enqueue()
            self._journal.note("pooled", job.id)

    async def _transaction(self) -> None:
        dice = self._dice
        fate = dice.choices(list(FATES), list(FATES.values()))[0]
        late = dice.uniform(0.2, 3.0)
        jobs: list[tuple[Job[Any], object]] = []
        try:
            conn = await self._connected()
            if dice.random() < BATCHES:
                await self._enqueue_batch(conn, jobs)
            else:
                for _ in range(dice.choice((1, 1, 2, 4))):
                    await self._enqueue_one(conn, jobs)
            if fate == "late":
                await asyncio.sleep(late)
            if fate == "rollback":
                await conn.rollback()
            elif fate == "cut":
                await conn.close()
            elif fate == "cut at COMMIT":
                self._journal.note("sent", *(job.id for job, _ in jobs))
                conn.pgconn.send_query(b"COMMIT")
                conn.pgconn.flush()
                await conn.close()
            else:
                self._journal.note("sent", *(job.id for job, _ in jobs))
                await conn.commit()
        except psycopg.OperationalError:
            fate = "lost"
        self._journal.note("fate", fate.replace(" ", "_"))
        if fate in ("commit", "late"):
            self._journal.note("committed", *(job.id for job, _ in jobs))
            for job, result in jobs:
                if dice.random() < 0.05:
                    self._wait(job, result)

    async def _enqueue_one(self, conn: AsyncConnection[TupleRow], jobs: list[tuple[Job[Any], object]]) -> None:
        task, arguments, options = _wish(self._dice)
        tenant = self._dice.choice([*TENANTS, None])
        checked = {"tenant": tenant or ""} if task in CHECKED else {}
        job = await self._app.tasks[task].options(tenant=tenant, on=conn, **options).enqueue(**checked, **arguments)
        jobs.append((job, arguments.get(RESULTS.get(task, ""))))
        self._journal.note("asked", job.id, (tenant or "-").replace(" ", "_"))
        await conn.execute("INSERT INTO storm.asked (job_id) VALUES (%s)", [job.id])

    async def _enqueue_batch(self, conn: AsyncConnection[TupleRow], jobs: list[tuple[Job[Any], object]]) -> None:
        tenant = self._dice.choice(TENANTS)
        number = self._dice.randint(10, 60)
        for task, payload, count in (("nothing", (), number - 2), ("write", (tenant, 0.0, 0), 2)):
            many = await self._app.tasks[task].options(tenant=tenant, on=conn).enqueue_many([payload] * count)
            jobs += [(job, 0 if task == "write" else None) for job in many]
        for job, _ in jobs:
            self._journal.note("asked", job.id, tenant.replace(" ", "_"))
        ids = [job.id for job, _ in jobs]
        await conn.execute("INSERT INTO storm.asked (job_id) SELECT unnest(%s::uuid[])", [ids])

    async def _connected(self) -> AsyncConnection[TupleRow]:
        if self._conn is None or self._conn.closed:
            while True:
                with contextlib.suppress(psycopg.OperationalError):
                    self._conn = await AsyncConnection.connect(self._dsn)
                    return self._conn
                await asyncio.sleep(0.1)
        return self._conn

    def _wait(self, job: Job[Any], result: object) -> None:
        waiter = asyncio.create_task(self._result(job, result))
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)

    async def _result(self, job: Job[Any], expected: object) -> None:
        try:
            result = await job.result()
        except (JobFailed, JobCancelled) as error:
            self._journal.note("told", type(error).__name__)
        except Exception as error:
            self._journal.note("wrong", f"a waiter for job {job.id} got {error!r}")
        else:
            self._journal.note("told", "result")
            if result != expected:
                self._journal.note("wrong", f"the result of job {job.id} is {result!r}, expected {expected!r}")


async def cancel(journal: Journal, app: AioQueue, dice: random.Random, over: asyncio.Event) -> None:
    """Cancel jobs from outside while they wait, run, or have ended, until told to stop."""
    while await pause(over, dice.uniform(0.1, 1.2)):
        if not journal.newest:
            continue
        job_id = dice.choice(list(journal.newest))
        journal.note("cancel", job_id)
        tenant = journal.tenants[job_id]
        with contextlib.suppress(psycopg.OperationalError, AioQueueError):
            state = await app.job(job_id, tenant=None if tenant == "-" else tenant.replace("_", " ")).cancel()
            journal.note("cancelled", job_id, str(state))


async def pause(over: asyncio.Event, seconds: float) -> bool:
    """Wait; whether to go on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
    return not over.is_set()


def _wish(dice: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Choose a task, its arguments apart from the tenant, and options."""
    seconds = dice.choice((0.0, 0.0, 0.02, 0.2, 1.0))
    choices: list[tuple[float, str, dict[str, Any]]] = [
        (20, "nothing", {}),
        (8, "plain", {"number": 7}),
        (14, "sleep", {"seconds": dice.choice((0.05, 0.5, 1.5, 2.5 * LEASE))}),
        (7, "fail", {"times": dice.choice((1, 2, 3))}),
        (5, "snooze", {"times": dice.choice((1, 2))}),
        (2, "quit", {}),
        (1, "slow", {}),
        (6, "threaded", {"seconds": dice.choice((0.05, 0.5, 1.5 * LEASE))}),
        (0.5, "block", {"seconds": dice.choice((0.2, 0.5 * LEASE, 1.5 * LEASE))}),
        (10, "short", {"seconds": seconds, "fails": dice.random() < 0.2}),
        (26, "write", {"seconds": seconds, "fails": dice.choice((0, 0, 0, 1))}),
        (8, "parent", {"seconds": seconds}),
        (2, "intruder", {}),
        (0.1, "bomb", {}),
    ]
    _, task, arguments = dice.choices(choices, [weight for weight, _, _ in choices])[0]
    options: dict[str, Any] = {"priority": dice.choice((0, 0, 0, 1, -1))}
    if dice.random() < 0.1:
        options["delay"] = dice.uniform(0.1, 3)
    return task, arguments, options


async def enqueue(journal: Journal, dsn: str, seed: str, rate: float, cancels: bool) -> None:
    """Enqueue until SIGTERM."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with made(dsn, pool=6) as app, asyncio.TaskGroup() as group:
        journal.note("ready", os.getpid())
        for number in range(COROUTINES):
            dice = random.Random(f"{seed} {number}")
            group.create_task(Enqueuer(journal, dsn, app, dice, rate / COROUTINES / JOBS, over).run())
        if cancels:
            group.create_task(cancel(journal, app, random.Random(f"{seed} cancels"), over))


def main() -> None:
    """Run as the arguments say."""
    path, dsn, seed, rate, cancels = sys.argv[1:]
    clock.install()
    asyncio.run(enqueue(Journal(Path(path)), dsn, seed, float(rate), cancels == "cancels"))


if __name__ == "__main__":
    main()
