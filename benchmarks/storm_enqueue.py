"""Who enqueues in a storm: transactions that commit, late too, roll back, or are cut off; and waiters.

Each transaction writes its jobs' ids into storm.asked beside the jobs themselves: the two must always agree, whatever was
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import AioQueue
from aioqueue.errors import AioQueueError, JobCancelled, JobFailed
from aioqueue.job import Job

from .storm_run import Storm
from .storm_tasks import LEASE

TENANTS = [f"tenant {number}" for number in range(10)]
FATES = {"commit": 70, "late": 13, "rollback": 8, "cut": 5, "cut at COMMIT": 4}
RESULTS = {"plain": "number", "sleep": "seconds", "fail": "times", "snooze": "times", "write": "fails"}
"""Tasks that return one of their arguments, and which."""
WAIT = 150.0
"""Seconds in which a waiter must have heard of its job's end."""


class Enqueuer:
    """One coroutine that enqueues until the storm is over."""

    def __init__(self, storm: Storm, number: int, app: AioQueue, rate: float) -> None:
        self._storm = storm
        self._app = app
        self._rate = rate
        self._dice = storm.dice(f"enqueuer {number}")
        self._dsn = storm.server.tcp("client", f"storm-client-{number}")
        self._conn: AsyncConnection[TupleRow] | None = None
        self._waiters: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the storm is over and every waiter has its answer."""
        while await self._storm.pause(self._dice.expovariate(self._rate)):
            if self._dice.random() < 0.15:
                await self._pooled()
            else:
                await self._transaction()
        if self._conn is not None:
            await self._conn.close()
        if self._waiters:
            await asyncio.wait(self._waiters)

    async def _pooled(self) -> None:
        try:
            job = await self._app.tasks["nothing"].options(queue="pooled").enqueue()
        except (psycopg.OperationalError, AioQueueError):
            self._storm.pooled_unknown += 1
        else:
            self._storm.pooled.add(job.id)

    async def _transaction(self) -> None:
        storm, dice = self._storm, self._dice
        fate = dice.choices(list(FATES), list(FATES.values()))[0]
        late = dice.uniform(0.2, 3.0)
        wishes = [_wish(dice) for _ in range(dice.choice((1, 1, 2, 4)))]
        tenants = [dice.choice([*TENANTS, None]) for _ in wishes]
        jobs: list[Job[Any]] = []
        sent = False
        try:
            conn = await self._connected()
            for (task, arguments, options), tenant in zip(wishes, tenants, strict=True):
                checked = {"tenant": tenant or ""} if task in ("write", "parent", "short") else {}
                job = await self._app.tasks[task].options(tenant=tenant, on=conn, **options).enqueue(**checked, **arguments)
                jobs.append(job)
                storm.tenants[job.id] = tenant
                await conn.execute("INSERT INTO storm.asked (job_id) VALUES (%s)", [job.id])
            if fate == "late":
                await asyncio.sleep(late)
            if fate == "rollback":
                await conn.rollback()
            elif fate == "cut":
                await conn.close()
            elif fate == "cut at COMMIT":
                sent = True
                conn.pgconn.send_query(b"COMMIT")
                conn.pgconn.flush()
                await conn.close()
            else:
                sent = True
                await conn.commit()
        except psycopg.OperationalError:
            fate = "lost"
        ids = {job.id for job in jobs}
        storm.counts[f"transactions: {fate}"] += 1
        if not sent:
            storm.rolled_back |= ids
        elif fate in ("commit", "late"):
            now = time.monotonic()
            storm.committed.update(dict.fromkeys(ids, now))
            for job, (task, arguments, _) in zip(jobs, wishes, strict=True):
                if dice.random() < 0.1:
                    self._wait(job, arguments.get(RESULTS.get(task, "")))
        else:
            storm.unknown |= ids

    async def _connected(self) -> AsyncConnection[TupleRow]:
        if self._conn is None or self._conn.closed:
            while True:
                with contextlib.suppress(psycopg.OperationalError):
                    self._conn = await AsyncConnection.connect(self._dsn, connect_timeout=5)
                    return self._conn
                await asyncio.sleep(0.1)
        return self._conn

    def _wait(self, job: Job[Any], result: object) -> None:
        waiter = asyncio.create_task(self._result(job, result))
        self._waiters.add(waiter)
        waiter.add_done_callback(self._waiters.discard)

    async def _result(self, job: Job[Any], expected: object) -> None:
        try:
            result = await job.result(timeout=WAIT)
        except (JobFailed, JobCancelled) as error:
            self._storm.counts[f"waiters told {type(error).__name__}"] += 1
        except Exception as error:
            self._storm.fault(f"a waiter for job {job.id} got {error!r}")
        else:
            self._storm.counts["waiters given a result"] += 1
            if result != expected:
                self._storm.fault(f"the result of job {job.id} is {result!r}, expected {expected!r}")


def _wish(dice: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Choose a task, its arguments apart from the tenant, and options."""
    seconds = dice.choice((0.0, 0.0, 0.02, 0.2, 1.0))
    choices: list[tuple[int, str, dict[str, Any]]] = [
        (20, "nothing", {}),
        (8, "plain", {"number": 7}),
        (14, "sleep", {"seconds": dice.choice((0.05, 0.5, 1.5, 2.5 * LEASE))}),
        (7, "fail", {"times": dice.choice((1, 2, 3))}),
        (5, "snooze", {"times": dice.choice((1, 2))}),
        (2, "quit", {}),
        (1, "slow", {}),
        (8, "threaded", {"seconds": dice.choice((0.05, 0.5, 1.5 * LEASE))}),
        (1, "block", {"seconds": dice.choice((0.2, 0.5 * LEASE, 1.5 * LEASE))}),
        (10, "short", {"seconds": seconds, "fails": dice.random() < 0.2}),
        (26, "write", {"seconds": seconds, "fails": dice.choice((0, 0, 0, 1))}),
        (8, "parent", {"seconds": seconds}),
        (2, "intruder", {}),
    ]
    if dice.random() < 0.003:
        return "bomb", {}, {}
    weights = [weight for weight, _, _ in choices]
    _, task, arguments = dice.choices(choices, weights)[0]
    options: dict[str, Any] = {"priority": dice.choice((0, 0, 0, 1, -1))}
    if dice.random() < 0.1:
        options["delay"] = dice.uniform(0.1, 3)
    return task, arguments, options


def expected(storm: Storm) -> set[UUID]:
    """Jobs that certainly exist."""
    return {*storm.committed, *storm.pooled}
