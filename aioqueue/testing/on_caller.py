"""Runs one job within a transaction that a test has open: claim, run and record are statements on its connection.

The test sees what the job wrote. When it rolls back, neither job nor attempt has ever been.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import anyio
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import tuple_row

from aioqueue.app import AioQueue
from aioqueue.attempt import Cause
from aioqueue.claimed import Claimed
from aioqueue.definition import Holds
from aioqueue.events import JobClaimed
from aioqueue.identity import Identity
from aioqueue.new_jobs import NewJobs
from aioqueue.outcome import Outcome
from aioqueue.pending import encode, parts
from aioqueue.run import Runner
from aioqueue.sql import as_sql
from aioqueue.store import LaneScan
from aioqueue.version import VERSION

from .engine import POSITION
from .faults import Faults
from .ran import Ran, Runs, TestingError
from .savepoint import SavepointTransactions, put_back, run_statement

LEASE = 3600.0
"""Seconds of the worker's lease: of a row that nobody else ever sees."""


class _Sink:
    """Where the one outcome goes."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.committed = False

    def put(self, job: Claimed, outcome: Outcome) -> None:
        """Take the outcome."""
        self.outcome = outcome

    def recorded_by_commit(self, job: Claimed) -> None:
        """Take note of the success that is recorded."""
        self.committed = True


class OnCaller:
    """Runs jobs on one connection of psycopg in a transaction that stays open."""

    def __init__(self, app: AioQueue[Any], faults: Faults, resources: object, conn: AsyncConnection[Any]) -> None:
        self._app = app
        self._store = app.store
        self._faults = faults
        self._conn = conn
        self._sink = _Sink()
        self._over = asyncio.Event()
        # As a worker's; what would have a connection of its own is given the test's, and the one outcome goes here.
        self._runner = Runner(
            tasks=app.tasks,
            transactions=SavepointTransactions(app.store, app.settings, conn),
            sink=self._sink,
            limits=app.settings.limits,
            tenants=app.settings.tenants,
            concurrency=1,
            observers=app.observers,
            middleware=faults.around(app.middleware),
            resources=resources,
            freed=lambda _: self._over.set(),
            abandoned=self._over.set,
        )

    async def run_one(self, job_id: UUID) -> Runs:
        """Run one ready job. Raises TestingError for another."""
        if self._faults.crashes:
            raise TestingError(
                "a worker dies with its transaction, which is the test's here: crash_worker_at needs run_job without on"
            )
        await run_statement(self._conn, "SAVEPOINT aioqueue_run")
        try:
            job = await self._claim(job_id)
            async with put_back(self._conn, self._store, list(Identity.of(job, self._app.settings.tenants).settings)):
                with self._enqueues_here():
                    self._runner.start(job)
                    await self._over.wait()
                ran = await self._record(job)
            await self._store.resign(self._conn, worker=job.worker)
        except BaseException:
            # A scope of anyio's around the call would cancel again at every await.
            with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
                await self._end_run()
                await run_statement(self._conn, "ROLLBACK TO SAVEPOINT aioqueue_run")
            raise
        finally:
            self._runner.close()
        await run_statement(self._conn, "RELEASE SAVEPOINT aioqueue_run")
        return Runs([ran])

    async def _end_run(self) -> None:
        """End what still runs, and wait for it: the connection is the test's again."""
        if self._runner.runs:
            self._over.clear()
            self._runner.stop_all(Cause.INTERRUPTED)
            async with asyncio.timeout(self._app.settings.limits.abandon + 1.0):
                await self._over.wait()

    async def _claim(self, job_id: UUID) -> Claimed:
        worker = secrets.randbits(63)
        await self._store.register_worker(
            self._conn,
            worker=worker,
            host=socket.gethostname()[:200],
            pid=os.getpid(),
            version=VERSION,
            queues=[],
            concurrency=1,
            lease=LEASE,
            tasks=[],
        )
        cursor = AsyncCursor(self._conn, row_factory=tuple_row)
        row = await (await cursor.execute(as_sql(POSITION, self._store.schema), [job_id])).fetchone()
        if row is None or row[2]:
            status = await self._store.job_status(self._conn, job_id)
            state = "unknown to this transaction" if status is None else str(status.state)
            raise TestingError(f"job {job_id} is not ready: it is {state}")
        claims = await self._store.claim(self._conn, worker=worker, lanes=[LaneScan(row[0], (row[1], job_id), 1)], limit=1)
        job = next((job for job in claims.jobs if job.job_id == job_id), None)
        if job is None:
            raise TestingError(f"job {job_id} could not be claimed: it waits for a limit, or its queue or tenant is paused")
        task = self._app.tasks.get(job.task)
        if task is not None and task.definition.holds is Holds.SESSION:
            raise TestingError(
                f"task {job.task!r} takes a session, which begins a transaction of its own: commit, and use run_job without on"
            )
        self._app.observers.emit(JobClaimed.of(job))
        return job

    async def _record(self, job: Claimed) -> Ran[object]:
        key = (job.job_id, job.attempt)
        error, expected = self._faults.raised.get(key), key in self._faults.expected
        if self._sink.outcome is None:
            state = "succeeded" if self._sink.committed else "lost"
            return Ran(job.job_id, job.task, job.tenant, job.queue, job.attempt, state, error=error, expected=expected)
        written = encode(job, self._sink.outcome)
        outcomes, succeeded, results = parts([written])
        states = await self._store.record(self._conn, worker=job.worker, outcomes=outcomes, succeeded=succeeded, results=results)
        state = "succeeded" if states is None else states.get(job.job_id, "lost")
        failed = written.state != "succeeded"
        return Ran(
            job.job_id, job.task, job.tenant, job.queue, job.attempt, state,
            reason=written.reason, message=written.name if failed else None, error=error, expected=expected, delay=written.delay,
        )  # fmt: skip

    @contextlib.contextmanager
    def _enqueues_here(self) -> Iterator[None]:
        """Write what the job enqueues outside of its transaction on the test's connection, too: the pool would commit it."""

        async def write(jobs: NewJobs) -> None:
            await self._store.enqueue_alike(self._conn, jobs)

        self._app.write_outside = write
        try:
            yield
        finally:
            self._app.write_outside = None
