"""Runs committed jobs in the test's process: the worker's own steps (claim, run, record, unpark, rescue), one after the other.

Where a worker has loops that look for work, the test says when. Nothing is claimed, promoted or rescued but by a call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any
from uuid import UUID

import anyio
import psycopg
from psycopg.errors import InsufficientPrivilege

from aioqueue.app import AioQueue
from aioqueue.attempt import Cause, Run
from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.definition import Holds
from aioqueue.events import Event, JobClaimed, JobLost, JobRecorded, JobsPromoted, JobsRescued, Observers
from aioqueue.job import PRIORITIES, SUSPECT, lane
from aioqueue.listen import Kind
from aioqueue.outcome import Reason, Released
from aioqueue.settings import WorkerSettings
from aioqueue.sql import as_sql
from aioqueue.store import LOWEST_ID, WORKER_DEAD, LaneScan
from aioqueue.worker import Worker

from .faults import Faults
from .ran import LOST, Ran, Runs, TestingError

LOOK = 0.05
"""Seconds between looks for cancels, and for more to run, while something runs."""
BATCH = 500

_QUEUES = "SELECT DISTINCT queue FROM aioqueue.jobs WHERE state = 'ready'"
POSITION = "SELECT l.lane, l.vt, l.worker IS NOT NULL FROM aioqueue.live l WHERE l.job_id = %s"
_NEXT_DUE = """
WITH next AS (SELECT run_at FROM aioqueue.scheduled WHERE job_id <> ALL (%s::uuid[]) ORDER BY run_at LIMIT 1)
UPDATE aioqueue.scheduled s SET run_at = least(s.run_at, pg_catalog.clock_timestamp()) FROM next
 WHERE s.run_at = next.run_at AND s.job_id <> ALL (%s::uuid[])
"""
_MAKE_DUE = """
UPDATE aioqueue.scheduled SET run_at = least(run_at, pg_catalog.clock_timestamp()) WHERE job_id = %s RETURNING job_id
"""


class Unheard:
    """Hints while nobody listens, as of an app that is closed."""

    def hint(self, kind: Kind) -> None:
        """Send none."""

    def take(self, kind: Kind) -> bool:
        """None is due."""
        return False


def compose(
    app: AioQueue[Any], database: Database, observers: Observers, faults: Faults, resources: object, concurrency: int
) -> Worker:
    """Compose a worker as the app does, with the faults around its tasks; nothing of it runs by itself."""
    return Worker(
        database,
        app.store,
        observers,
        app,
        app.tasks,
        app.settings,
        hints=app.notifier or Unheard(),
        worker=WorkerSettings(concurrency=concurrency),
        middleware=faults.around(app.middleware),
        resources=resources,
        grace=0.0,
        standalone=False,
        started=asyncio.Event(),
    )


class Engine:
    """One worker after the other, cranked by hand; `database` is what they work on, `owner` what time is put forward with."""

    def __init__(self, app: AioQueue[Any], database: Database, owner: Database | None, resources: object, faults: Faults) -> None:
        self.database = database
        self._app = app
        self._store = app.store
        self._owner = owner or database
        self._resources = resources
        self._worker: Worker
        self._runs = Runs()
        self._claimed: dict[tuple[UUID, int], Claimed] = {}
        self._died = False
        """Whether the worker dies as soon as what it has recorded is settled."""
        self._faults = faults

    @contextlib.asynccontextmanager
    async def at_work(self, concurrency: int = 1) -> AsyncIterator[Runs]:
        """Be a worker for a block; what it runs is added to the list."""
        self._runs, self._claimed, self._died = Runs(), {}, False
        observers = Observers([self._app.observers.emit, self._see])
        worker = self._worker = compose(self._app, self.database, observers, self._faults, self._resources, concurrency)
        await worker.heartbeat.register()
        loops = [
            *worker.start_writing(),
            asyncio.create_task(worker.heartbeat.run()),
            asyncio.create_task(self._cancel_asked()),
        ]
        try:
            yield self._runs
        finally:
            # A scope of anyio's around the call would cancel again at every await; each step is bounded.
            with anyio.CancelScope(shield=True):
                await self._stop()
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)
                worker.heartbeat.close()
                worker.slots.runner.close()
                await worker.heartbeat.resign(self._app.settings.pool.deadline)

    @property
    def _running(self) -> dict[int, Run]:
        return self._worker.slots.runner.runs

    async def queues(self) -> list[str]:
        """Return the queues that have ready jobs."""
        async with self.database.runtime() as conn:
            rows = await (await conn.execute(as_sql(_QUEUES, self._store.schema))).fetchall()
        return sorted(name for (name,) in rows)

    async def run_ready(self, queues: Sequence[str] | None, concurrency: int, limit: int) -> None:
        """Run until nothing is ready. Raises TestingError after `limit` attempts."""
        while True:
            room = concurrency - len(self._running)
            names = await self.queues() if queues is None else queues
            scans = [
                LaneScan(lane(name, level), (0, LOWEST_ID), room, -level) for level in reversed(PRIORITIES) for name in names
            ]
            scans += [LaneScan(lane(name, SUSPECT), (0, LOWEST_ID), 1) for name in names if not self._running]
            if len(self._claimed) >= limit:
                last = "\n".join(map(str, self._runs[-3:]))
                raise TestingError(
                    f"{limit} attempts were run and there are more; is there a job without an end? The last:\n{last}"
                )
            started = await self._claim(scans, min(room, limit)) if room and scans else 0
            if self._running:
                # While there is room, what runs may wait for what it has enqueued.
                await self._wait_one(LOOK if len(self._running) < concurrency else None)
            elif not started and not await self._settle():
                return

    async def run_one(self, job_id: UUID) -> None:
        """Run one job: a ready one, or a scheduled one whose time is put forward. Raises TestingError for another."""
        found = await self._position(job_id)
        if found is None and await self._make_due(job_id):
            await self._promote()
            found = await self._position(job_id)
        if found is None or found[2]:
            raise TestingError(f"job {job_id} is not ready: it is {await self._state(job_id)}")
        lane_number, vt, _ = found
        await self._claim([LaneScan(lane_number, (vt, job_id), 1)], 1, only=job_id)
        if not self._running:
            raise TestingError(f"job {job_id} could not be claimed: it waits for a limit, or its queue or tenant is paused")
        while self._running:
            await self._wait_one()

    async def make_next_due(self, leave: Iterable[UUID]) -> bool:
        """Put forward the time of what is scheduled next, those jobs apart; whether there was anything."""
        left = list(leave)
        async with self._forward() as conn:
            cursor = await conn.execute(as_sql(_NEXT_DUE, self._store.schema), [left, left])
        if not cursor.rowcount:
            return False
        await self._promote()
        return True

    async def _wait_one(self, seconds: float | None = None) -> None:
        """Wait until a run is over (so many seconds at most) and what it came to is recorded; let the worker die if it is to."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._worker.slots.wait_freed()
        await self._settle()

    async def _settle(self) -> bool:
        """Wait until everything is written that has ended; whether jobs may be ready that were not."""
        slots = self._worker.slots
        begun = slots.unparker.begun
        await slots.recorder.wait_idle()
        await slots.unparker.wait_idle()
        died, self._died = self._died, False
        if died:
            await self.die(self._worker.heartbeat.worker)
        return died or slots.unparker.begun != begun

    async def die(self, worker: int) -> None:
        """End the worker as a crash does: its lease is over, another one takes its jobs. This process goes on as that other."""
        heartbeat = self._worker.heartbeat
        async with self.database.runtime() as conn:
            await self._store.beat(conn, worker=worker, lease=-1.0, running=0)
        for run in list(self._running.values()):
            if run.job.worker == worker and run.task is not asyncio.current_task():
                self._worker.slots.runner.stop(run, Cause.LEASE_LOST)
        await heartbeat.register()
        while True:
            async with self.database.runtime() as conn:
                found = await self._store.rescue(conn, worker=heartbeat.worker, limit=BATCH)
            if found is None or not found[1]:
                return
            self._app.observers.emit(JobsRescued(*found))

    async def _cancel_asked(self) -> None:
        """End what is cancelled while it runs."""
        while True:
            await asyncio.sleep(LOOK)
            if not self._running:
                continue
            async with self.database.runtime() as conn:
                tick = await self._store.tick(conn, worker=self._worker.heartbeat.worker, questions=[])
            for run in list(self._running.values()):
                if run.job.job_id in tick.cancelled:
                    self._worker.slots.runner.stop(run, Cause.CANCELLED)

    async def _claim(self, scans: Sequence[LaneScan], limit: int, only: UUID | None = None) -> int:
        slots = self._worker.slots
        try:
            async with self.database.runtime() as conn:
                claims = await self._store.claim(conn, worker=self._worker.heartbeat.worker, lanes=scans, limit=limit)
        except psycopg.DatabaseError as error:
            if error.sqlstate != WORKER_DEAD:
                raise
            return 0  # it dies right now; the job that lets it die still runs
        if claims.passed:
            slots.unparker.passed(claims.passed)
        for job in claims.jobs:
            self._claimed[job.job_id, job.attempt] = job
            if only is not None and job.job_id != only:
                slots.recorder.put(job, Released(Reason.INTERRUPTED, "another job was to be run"))
                continue
            self._app.observers.emit(JobClaimed.of(job))
            slots.start(job)
        return len(claims.jobs)

    async def _stop(self) -> None:
        slots = self._worker.slots
        slots.runner.stop_all(Cause.INTERRUPTED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._app.settings.limits.abandon + 1.0):
                await slots.empty.wait()
                await slots.recorder.wait_idle()
                await slots.unparker.wait_idle()

    async def _promote(self) -> None:
        while True:
            async with self.database.runtime() as conn:
                count = await self._store.promote(conn, limit=BATCH)
            if count > 0:
                self._app.observers.emit(JobsPromoted(count))
            if count < BATCH:
                return

    async def _make_due(self, job_id: UUID) -> bool:
        if await self._state(job_id) != "scheduled":
            return False
        async with self._forward() as conn:
            cursor = await conn.execute(as_sql(_MAKE_DUE, self._store.schema), [job_id])
            return await cursor.fetchone() is not None

    @contextlib.asynccontextmanager
    async def _forward(self) -> AsyncIterator[Any]:
        try:
            async with self._owner.runtime() as conn:
                yield conn
        except InsufficientPrivilege as error:
            raise TestingError(
                "to put a scheduled job's time forward needs the owner of aioqueue's schema: testing.queue(…, owner_dsn=…)"
            ) from error

    async def _position(self, job_id: UUID) -> tuple[int, int, bool] | None:
        async with self.database.runtime() as conn:
            row = await (await conn.execute(as_sql(POSITION, self._store.schema), [job_id])).fetchone()
        return None if row is None else (row[0], row[1], row[2])

    async def _state(self, job_id: UUID) -> str:
        async with self.database.runtime() as conn:
            status = await self._store.job_status(conn, job_id)
        return "unknown" if status is None else str(status.state)

    def _see(self, event: Event) -> None:
        if isinstance(event, JobLost):
            job = self._claimed[event.job_id, event.attempt]
            self._add(job, LOST, Reason.WORKER_LOST, "its worker died", None)
        elif isinstance(event, JobRecorded):
            job = self._claimed[event.job_id, event.attempt]
            if self._faults.take("after_record", event.task) or (event.state == "succeeded" and self._commits(event.task)):
                self._died = True
            self._add(job, event.state, event.reason, event.error, event.delay)

    def _commits(self, name: str) -> bool:
        """Whether a worker is to die after the commit that records the task's success."""
        task = self._app.tasks.get(name)
        own = task is not None and task.definition.holds not in (Holds.CONTEXT, Holds.NOTHING)
        return own and self._faults.take("after_commit", name)

    def _add(self, job: Claimed, state: str, reason: str | None, message: str | None, delay: float | None) -> None:
        key = (job.job_id, job.attempt)
        self._runs.append(
            Ran(
                job.job_id, job.task, job.tenant, job.queue, job.attempt, state,
                reason=reason, message=message, error=self._faults.raised.get(key), expected=key in self._faults.expected,
                delay=delay,
            )
        )  # fmt: skip
