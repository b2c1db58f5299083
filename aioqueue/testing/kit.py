"""The face of the kit: a queue as a test holds it. Each call does one thing and is over; nothing runs between two of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar, cast, overload
from uuid import UUID

from psycopg import AsyncConnection
from pydantic import BaseModel

from aioqueue.app import AioQueue
from aioqueue.callers import recognise
from aioqueue.callers.caller import AsyncCaller, Statement
from aioqueue.database import Database
from aioqueue.job import Job
from aioqueue.outcome import Reason
from aioqueue.sql import place

from .engine import Engine
from .enqueued import ANY, READ, Enqueued, Given, Wanted, parse, report
from .faults import AnyTask, CrashPoint, Error, Faults, task_name
from .on_caller import OnCaller
from .ran import LOST, JobsFailed, Ran, Runs, TestingError, raise_failures
from .savepoint import psycopg_connection

R = TypeVar("R")

TIMEOUT = 60.0
"""Seconds that one call may take."""
LIMIT = 1000
"""Attempts that one `drain` runs at most."""


class Queue:
    """The queue of one app in one test; made by `queue`."""

    def __init__(
        self, app: AioQueue[Any], stack: AsyncExitStack, *, worker: Database | None = None, owner: Database | None = None
    ) -> None:
        self.app = app
        self._stack = stack
        self._given = worker
        self._owner = owner
        self._made: Engine | None = None
        self._resources: object = None
        self._turn = asyncio.Lock()
        self._faults = Faults(self._die)

    # -- running ------------------------------------------------------------------------------------------------------

    async def drain(
        self,
        *,
        include_scheduled: bool = False,
        queues: Sequence[str] | None = None,
        raises: bool = True,
        concurrency: int = 1,
        timeout: float = TIMEOUT,
        limit: int = LIMIT,
    ) -> Runs:
        """Run every ready job here, and what these enqueue, until nothing is ready; return what ran.

        Claimed, run and recorded as by a worker, one after the other unless `concurrency` says otherwise. `include_scheduled`:
        also what is delayed and what waits to be tried again, in the order of its time, as if that time had come. `queues`: of
        these only. The first error of a task is raised at the end (with a note which job's it was), unless `raises` is False or
        the test has asked for it (`fail_next`).

        Raises TestingError when jobs of this process are not committed, after `limit` attempts, and after `timeout` seconds;
        JobsFailed for a failure that is no error of a task. What still runs then is cancelled and handed back.
        """
        self._check_committed("drain()")
        engine = await self._engine()
        async with self._turn, _within(timeout, "drain()"), engine.at_work(concurrency) as runs:
            while True:
                await engine.run_ready(queues, concurrency, limit)
                # One of an unknown task would come again for ever.
                unknown = {ran.job_id for ran in runs if ran.reason == Reason.UNKNOWN_TASK}
                if not include_scheduled or not await engine.make_next_due(unknown):
                    break
        runs = await self._with_results(runs, engine.database)
        if raises:
            raise_failures(runs)
        return runs

    @overload
    async def run_job(
        self, job: Job[R] | Awaitable[Job[R]], *, on: object | None = None, raises: bool = True, timeout: float = TIMEOUT
    ) -> Ran[R]: ...
    @overload
    async def run_job(
        self, job: UUID | str | Enqueued, *, on: object | None = None, raises: bool = True, timeout: float = TIMEOUT
    ) -> Ran[Any]: ...
    async def run_job(
        self,
        job: Job[Any] | Awaitable[Job[Any]] | UUID | str | Enqueued,
        *,
        on: object | None = None,
        raises: bool = True,
        timeout: float = TIMEOUT,
    ) -> Ran[Any]:
        """Run one job here, once, whatever else is ready: claimed, run and recorded as by a worker. Return what became of it.

        `job`: its handle, its id, or the call that enqueues it, not awaited: `run_job(send.enqueue("ada@example.org"))`. One that
        is scheduled runs as if its time had come. `on`: the test's connection or session with an open transaction (of psycopg,
        or SQLAlchemy on psycopg); the job runs within it, its own transaction is a savepoint of it, and is rolled back with it.

        Raises what the task raises unless `raises` is False, JobsFailed for an attempt that was lost with its worker though the
        test has not asked for that, and TestingError for a job that cannot run.
        """
        if isinstance(job, Awaitable):
            job = await job
        job_id = job.id if isinstance(job, Job | Enqueued) else UUID(str(job))
        if on is not None:
            runs = await self._run_on(await psycopg_connection(on), job_id, timeout)
        else:
            self._check_committed("run_job() without on", job_id)
            engine = await self._engine()
            async with self._turn, _within(timeout, "run_job()"), engine.at_work() as runs:
                await engine.run_one(job_id)
            runs = await self._with_results(runs, engine.database)
        mine = [ran for ran in runs if ran.job_id == job_id]
        if raises:
            raise_failures(mine)
            if mine[-1].state == LOST and not mine[-1].expected:
                raise JobsFailed(f"{mine[-1]}; nothing of this attempt was recorded")
        return mine[-1]

    # -- what was enqueued --------------------------------------------------------------------------------------------

    async def enqueued(self, task: AnyTask | None = None, *, on: object | None = None) -> list[Enqueued]:
        """Return all jobs (of a task), oldest first, whatever became of them; `on`: as your connection sees it."""
        name = None if task is None else task_name(task, self.app.tasks)
        return [job for job in await self._read(on) if name in (None, job.task)]

    async def assert_enqueued(
        self,
        task: AnyTask | None = None,
        *,
        payload: BaseModel | Mapping[str, Any] | tuple[Any, ...] | Given = ANY,
        tenant: str | Given | None = ANY,
        queue: str | Given = ANY,
        priority: int | Given = ANY,
        state: str | Given = ANY,
        count: int | None = None,
        on: object | None = None,
    ) -> list[Enqueued]:
        """Assert that such jobs were enqueued, `count` of them or at least one, and return them.

        What is not named may be anything; `tenant=None`: without a tenant. `payload`: a model or a tuple of arguments is the
        whole payload, a mapping names the keys that matter. `on`: as your connection sees it, with what it has not committed.
        Jobs that have run count, too. Raises AssertionError that shows what is there, the nearest first, and what differs.
        """
        wanted = self._wanted(task, payload, tenant=tenant, queue=queue, priority=priority, state=state)
        jobs = await self._read(on)
        found = [job for job in jobs if wanted.matches(job)]
        if len(found) != count if count is not None else not found:
            expected = "at least one job" if count is None else f"{count} job" + ("" if count == 1 else "s")
            raise AssertionError(report(wanted, expected, found, jobs, self._hint(on)))
        return found

    async def refute_enqueued(
        self,
        task: AnyTask | None = None,
        *,
        payload: BaseModel | Mapping[str, Any] | tuple[Any, ...] | Given = ANY,
        tenant: str | Given | None = ANY,
        queue: str | Given = ANY,
        priority: int | Given = ANY,
        state: str | Given = ANY,
        on: object | None = None,
    ) -> None:
        """Assert that no such job was enqueued; see `assert_enqueued`."""
        wanted = self._wanted(task, payload, tenant=tenant, queue=queue, priority=priority, state=state)
        jobs = await self._read(on)
        found = [job for job in jobs if wanted.matches(job)]
        if found:
            raise AssertionError(report(wanted, "no job", found, jobs, ""))

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def fail_next(self, task: AnyTask, error: Error, *, times: int = 1) -> None:
        """Let the next attempts of a task raise an error in place of its function; retries follow as ever.

        An error that never comes fails the test at the end.
        """
        self._faults.fail_next(task_name(task, self.app.tasks), error, times)

    def crash_worker_at(self, point: CrashPoint, task: AnyTask | None = None, *, times: int = 1) -> None:
        """Let the worker die at a point of the next attempts (of a task): its lease ends, another takes its job over.

        `after_claim`: before the task has begun. `after_commit`: after a `ctx.transaction()` of it, or after the commit of a
        task that takes a transaction. `before_record`: the task has returned, nobody knows. `after_record`: all is written.
        The call of `drain` goes on as the other worker, and runs the job again; of `run_job`, it is ready again afterwards.
        `finally` blocks of the task run, which a real death would not let them. One that never comes fails the test at the end.
        """
        self._faults.crash_at(point, None if task is None else task_name(task, self.app.tasks), times)

    def check_faults(self) -> None:
        """Raise TestingError where something that was to go wrong has not; called at the end of the test."""
        if left := self._faults.left():
            raise TestingError(f"what was to go wrong has not: {', '.join(left)}")

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _engine(self) -> Engine:
        if self._made is None:
            self._resources = await self._stack.enter_async_context(self.app.make_resources())
            database = self._given or self.app.database
            self._made = Engine(self.app, database, self._owner, self._resources, self._faults)
        return self._made

    async def _die(self, worker: int) -> None:
        await (await self._engine()).die(worker)

    async def _run_on(self, conn: AsyncConnection[Any], job_id: UUID, timeout: float) -> Runs:
        await self._engine()  # opens the resources
        async with self._turn, _within(timeout, "run_job()"):
            runs = await OnCaller(self.app, self._faults, self._resources, conn).run_one(job_id)
            return await self._read_results(runs, conn)

    async def _with_results(self, runs: Runs, database: Database) -> Runs:
        async with database.runtime() as conn:
            return await self._read_results(runs, conn)

    async def _read_results(self, runs: Runs, conn: AsyncConnection[Any]) -> Runs:
        succeeded = [(ran.job_id, None) for ran in runs if ran.succeeded]
        ended = {row.job_id: row.result for row in await self.app.store.read_outcomes(conn, succeeded)} if succeeded else {}
        return Runs(
            replace(ran, result=self.app.get(ran.task).definition.result.load(ended[ran.job_id] or "null"))
            if ran.succeeded and ran.job_id in ended
            else ran
            for ran in runs
        )

    def _wanted(self, task: AnyTask | None, payload: object, **facts: object) -> Wanted:
        name = None if task is None else task_name(task, self.app.tasks)
        return Wanted.of(None if name is None else self.app.get(name), name, payload, facts)

    async def _read(self, on: object | None) -> list[Enqueued]:
        statement = Statement((place(READ, self.app.settings.schema),))
        if on is None:
            database = self._owner or self._given or self.app.database
            async with database.runtime() as conn:
                found = recognise(conn)
                return parse(await cast(AsyncCaller, found).fetch(statement) or "[]")
        caller = recognise(on)
        if caller is None:
            raise TestingError(f"on: expected a connection or session that .options(on=…) takes, got {type(on).__name__}")
        text = caller.fetch(statement)
        return parse((await text if isinstance(text, Awaitable) else text) or "[]")

    def _uncommitted(self) -> list[UUID]:
        notifier = self.app.notifier
        return [] if notifier is None else notifier.all_uncommitted()

    def _hint(self, on: object | None) -> str:
        number = 0 if on is not None else len(self._uncommitted())
        if not number:
            return ""
        return f"{number} more are enqueued in a transaction of this process that is open: commit it, or look there (on=…)"

    def _check_committed(self, action: str, job_id: UUID | None = None) -> None:
        found = [one for one in self._uncommitted() if job_id in (None, one)]
        if found:
            raise TestingError(
                f"{action} runs committed jobs, and {len(found)} are enqueued in a transaction of this process that is still "
                f"open (job {found[0]}): commit it first; or, in a test that rolls it back, run one job within it: "
                "run_job(job, on=…)"
            )


@contextlib.asynccontextmanager
async def _within(seconds: float, action: str) -> AsyncIterator[None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TestingError(f"{action} was not over within {seconds:g} s; what still ran was cancelled and handed back") from None
