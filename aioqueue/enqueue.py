"""Writes new jobs and cancels: on the caller's connection, in the running job's own transaction, or on the pool.

The base of the app, and what its tasks enqueue with. It never begins, commits or retries on a connection that it was given;
on the pool an enqueue is tried again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from pydantic import BaseModel

from .callers import AsyncCaller, SyncCaller, async_caller, sync_caller
from .callers.caller import Statements
from .callers.refusal import translated, translated_retry
from .context import HeldSession, InTransaction, JobTransaction, current_job
from .errors import JobNotFound, TenantRequired, UnknownTask
from .job import Job, JobSource, JobState
from .job_connection import JobConnection
from .listen import Kind
from .new_jobs import NewJobs, Parts
from .options import Options
from .payload import check_json
from .pool import AllInUse
from .registry import Opened, TaskRegistry
from .server import connection_lost
from .services import Services
from .settings import Settings
from .store import Store
from .wakeup import Notifier

TRIES = 5
"""Times at least that an enqueue on the pool is tried when its connection is lost; the id makes that safe."""
PAUSE = 0.1
"""Seconds between two of these at most, times the number of tries so far."""
AT_A_TIME = 100_000
"""Jobs that are written within the pool's deadline; twice as many have it twice."""

ENDED: tuple[Kind, ...] = ("ready", "done")
"""Hints after a cancel: to the job's worker, and to those who wait for its end."""

R = TypeVar("R")


class Enqueuing(TaskRegistry[Opened], JobSource):
    """The app's tasks, and what brings their jobs into the database."""

    settings: Settings
    write_outside: Callable[[NewJobs], Awaitable[None]] | None = None
    """Writes the jobs that join no transaction, in place of the pool: for tests, which roll them back."""

    @property
    @abstractmethod
    def notifier(self) -> Notifier | None:
        """What gives hints; None while the app is closed, or is open in another process or on another loop."""
        raise NotImplementedError

    @abstractmethod
    def tell(self, call: Callable[[Notifier], None]) -> bool:
        """Have the notifier told something, from whatever thread; False: there is none in this process."""
        raise NotImplementedError

    @property
    @abstractmethod
    def store(self) -> Store:
        """The operations, bound to a schema."""
        raise NotImplementedError

    @abstractmethod
    def services(self, action: str) -> Services:
        """Return pool and notifier for an action, which is named in the AppNotOpen that this raises."""
        raise NotImplementedError

    @property
    def payload_limit(self) -> int:
        """Bytes of a payload's JSON."""
        return self.settings.limits.payload

    def handle(self, job_id: UUID, decode: Callable[[str], Any] | None, tenant: str | None, *, on: object | None) -> Job[Any]:
        """Make the handle of a job; `on` the app, it leaves the running job's tenant, as the enqueue did."""
        return Job(job_id, source=self, decode=decode, tenant=tenant, leaves_tenant=on is self)

    async def enqueue_jobs(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        """Write the jobs and those of the parts after them, all or none: on `on`, in the running job's transaction, on the pool.

        They are given the tenant that they get. On the pool each part is asked for while the server writes the one before.
        """
        self._prepare(jobs, on)
        joined = self._joined(on)
        parts = (self._prepare(part, on) for part in parts)
        if joined is None:
            if self.write_outside is not None:
                await self.write_outside(jobs.joined(parts))
            else:
                await self._enqueue_on_pool(jobs, parts)
            return
        jobs = jobs.joined(parts)
        caller = async_caller(joined)
        with translated():
            xid = await caller.fetch(self._statements.enqueue_alike, *jobs.parameters)
        if isinstance(joined, InTransaction):
            joined.hints.add("ready")
            joined.enqueued.update(jobs.ids)
        else:
            self._watch(caller, xid, jobs.ids, kinds=("ready",))

    def enqueue_jobs_sync(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        """Do as `enqueue_jobs` on the connection or session `on`, which blocks."""
        jobs = self._prepare(jobs, on).joined(self._prepare(part, on) for part in parts)
        caller = sync_caller(on)
        with translated():
            xid = caller.fetch(self._statements.enqueue_alike, *jobs.parameters)
        self._watch(caller, xid, jobs.ids, kinds=("ready",))

    async def cancel_job(self, job: Job[Any], *, on: object | None) -> JobState:
        """Cancel a job; see `Job.cancel`."""
        tenant = as_seen_here(job).tenant
        on = self._joined(on)
        if on is None:
            services = self.services("cancel()")
            async with services.database.for_caller() as conn:
                state = await self.store.cancel_job(conn, job.id, tenant=tenant)
            for kind in ENDED:
                services.notifier.hint(kind)
        else:
            caller = async_caller(on)
            with translated():
                answer = await caller.fetch(self._statements.cancel_job, str(job.id), tenant)
            word, _, xid = (answer or "").partition(" ")
            state = JobState(word) if word else None
            if isinstance(on, InTransaction):
                on.hints.update(ENDED)
            else:
                self._watch(caller, xid, [], kinds=ENDED)
        if state is None:
            raise JobNotFound(job.id)
        return state

    async def retry_job(self, job: Job[Any], *, on: object | None) -> Job[Any]:
        """Run a dead or cancelled job again; see `Job.retry`."""
        tenant = as_seen_here(job).tenant
        on = self._joined(on)
        new: UUID | None
        with translated(), translated_retry(job.id):
            if on is None:
                services = self.services("retry()")
                async with services.database.for_caller() as conn:
                    new = await self.store.retry_job(conn, job.id, tenant=tenant)
                services.notifier.hint("ready")
            else:
                caller = async_caller(on)
                answer = await caller.fetch(self._statements.retry_job, str(job.id), tenant)
                word, _, xid = (answer or "").partition(" ")
                new = UUID(word) if word else None
                if new is not None and isinstance(on, InTransaction):
                    on.hints.add("ready")
                    on.enqueued.add(new)
                elif new is not None:
                    self._watch(caller, xid, [new], kinds=("ready",))
        if new is None:
            raise JobNotFound(job.id)
        return Job(new, source=self, decode=job.decode, tenant=job.tenant, leaves_tenant=job.leaves_tenant)

    async def enqueue_by_name(
        self,
        name: str,
        payload: Mapping[str, Any] | BaseModel | None = None,
        *,
        tenant: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        key: str | None = None,
        on: object | None = None,
    ) -> Job[Any]:
        """Enqueue a job of a task that may be registered elsewhere only; options as in `Task.options`.

        A task that neither this app nor any worker so far has registered is UnknownTask. Of one that is registered here the
        payload is validated; of another it must be JSON, and its worker validates it.
        """
        options = Options.of(
            tenant=tenant, queue=queue, priority=priority, delay=delay, run_at=run_at, max_attempts=max_attempts, key=key
        )  # fmt: skip
        given = {} if payload is None else payload
        if name in self.tasks:
            return await self.get(name).bound(options, on=on).enqueue_payload(given)
        if on is not None and on is not self and not isinstance(on, JobTransaction):
            known = json.loads(await async_caller(on).fetch(self._statements.known_tasks) or "[]")
        else:
            async with self.services(f"enqueue_by_name({name!r})").database.for_caller() as conn:
                known = await self.store.known_tasks(conn)
        if name not in known:
            raise UnknownTask(name, [*known, *self.tasks])
        jobs = options.jobs(name, [check_json(given, task=name, limit=self.payload_limit)])
        await self.enqueue_jobs(jobs, on=on)
        return self.handle(jobs.ids[0], None, jobs.tenant, on=on)

    async def _enqueue_on_pool(self, jobs: NewJobs, parts: Iterable[NewJobs]) -> None:
        services = self.services("enqueue")
        database, notifier, store = services.database, services.notifier, self.store
        # Every connection may have died in the pool; a server that hangs is not waited for without end.
        tries = max(TRIES, self.settings.pool.size + 1)
        give_up: float | None = None
        hinted = False
        every = None if jobs.total is None else Parts(jobs, parts)
        seconds = self.settings.pool.deadline * max(1, -(-(jobs.total or 0) // AT_A_TIME))
        for attempt in range(1, tries + 1):
            try:
                async with database.for_caller(seconds) as conn:
                    if every is not None:
                        await store.enqueue_parts(conn, every)
                    elif database.pooler:
                        await store.enqueue_alike(conn, jobs)
                    else:
                        hint = store.hint(conn, "ready") if notifier.take("ready") else None
                        try:
                            await store.enqueue_alone(conn, jobs, hint=hint)
                        finally:
                            hinted = hint is not None and hint.was_sent
                            if hint is not None and not hinted:
                                notifier.hint("ready")  # it may be that of others, too
                break
            except psycopg.Error as error:
                # Written or not, the same ids again make it exactly one job each. Waiting for others in vain is no loss.
                lost = connection_lost(error) and not isinstance(error, AllInUse)
                if attempt == tries or not lost or (give_up is not None and time.monotonic() > give_up):
                    with translated():
                        raise
                give_up = give_up or time.monotonic() + self.settings.pool.deadline
                await asyncio.sleep(random.uniform(0, PAUSE * attempt))
        if not hinted:
            notifier.hint("ready")

    @property
    def has_sessions(self) -> bool:
        """Whether the app was given `session=`."""
        return self.settings.session is not None

    @functools.cached_property
    def _statements(self) -> Statements:
        return Statements(self.settings.schema)

    def _prepare(self, jobs: NewJobs, on: object | None) -> NewJobs:
        """Give the jobs the tenant of the running job, unless they leave it. Raises TenantRequired."""
        running = current_job()
        if jobs.tenant is None and running is not None and running.tenant and on is not self:
            jobs.tenant = str(running.tenant)
        if jobs.tenant is None and (task := self.tasks.get(jobs.task)) is not None:
            if self.settings.tenants.requires(task.definition.require_tenant):
                raise TenantRequired(jobs.task)
        return jobs

    def _joined(self, on: object | None) -> object | None:
        """Return whose transaction is joined: the caller's, the running job's own, or none: the pool is used."""
        running = current_job()
        if isinstance(running, HeldSession) and on is None:
            return running
        if isinstance(running, JobTransaction) and (on is None or (isinstance(on, JobConnection) and on is running.connection)):
            return running
        return None if on is self else on

    def _watch(
        self, caller: AsyncCaller | SyncCaller, xid: str | None, job_ids: Sequence[UUID], *, kinds: Sequence[Kind]
    ) -> None:
        """See to the hints that follow the end of the caller's transaction; one that has written nothing has no XID."""
        if not xid:
            return
        transaction = caller.transaction()
        if isinstance(caller, AsyncCaller) and (notifier := self.notifier) is not None:
            caller.after_commit(notifier.look)
        told = self.tell(lambda notifier: notifier.watch(transaction, int(xid), job_ids, kinds=kinds))
        if not told and isinstance(caller, SyncCaller):
            caller.notify_after_commit(self._statements.notify)


def as_seen_here(job: Job[R]) -> Job[R]:
    """Return the handle as the running job may use it: without a tenant of its own, for that job's tenant only."""
    running = current_job()
    if running is None or job.tenant is not None or job.leaves_tenant:
        return job
    return job.of_tenant(str(running.tenant or "") or None)
