"""Writes new jobs: on the caller's connection, in the running job's own transaction, or on the pool, where it is tried again.

The base of the app, and what its tasks enqueue with. It never begins, commits or retries on a connection that it was given.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from pydantic import BaseModel

from .context import JobTransaction, current_job
from .database import AllInUse, connection_lost
from .errors import DuplicateJob, InvalidOption, TransactionAborted, UnknownTask
from .job import Job, JobSource, NewJob
from .options import Options
from .payload import check_json
from .services import Services
from .settings import Settings
from .store import Store
from .task import TaskRegistry
from .wakeup import Notifier

TRIES = 5
"""Times at least that an enqueue on the pool is tried when its connection is lost; the id makes that safe."""
PAUSE = 0.1
"""Seconds between two of these at most, times the number of tries so far."""


class Enqueuing(TaskRegistry, JobSource):
    """The app's tasks, and what brings their jobs into the database."""

    settings: Settings

    @property
    @abstractmethod
    def notifier(self) -> Notifier | None:
        """What gives hints; None while the app is closed, or is open in another process or on another loop."""
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

    async def enqueue_jobs(self, jobs: Sequence[NewJob], *, on: object | None) -> None:
        """Write the jobs, all or none: on `on`, else in the running job's own transaction, else on the pool."""
        running = current_job.get()
        if running is not None and on is not self:
            jobs = [job if job.tenant is not None else dataclasses.replace(job, tenant=running.tenant) for job in jobs]
        if on is None and isinstance(running, JobTransaction):
            on = running
        if on is None or on is self:
            await self._enqueue_on_pool(jobs)
        elif isinstance(on, JobTransaction):
            await self._write(on.connection, jobs)
            on.enqueued = True
        elif isinstance(on, AsyncConnection):
            xid = await self._write(on, jobs)
            if (notifier := self.notifier) is not None:
                if on.info.transaction_status == TransactionStatus.IDLE:
                    notifier.hint("ready")
                else:
                    notifier.watch(on, xid, [job.id for job in jobs])
        else:
            raise InvalidOption("on", f"expected a psycopg AsyncConnection, a JobTransaction or the app, got {type(on).__name__}")

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
        on: object | None = None,
    ) -> Job[Any]:
        """Enqueue a job of a task that may be registered elsewhere only; options as in `Task.options`.

        A task that neither this app nor any worker so far has registered is UnknownTask. Of one that is registered here the
        payload is validated; of another it must be JSON, and its worker validates it.
        """
        options = Options.of(
            tenant=tenant, queue=queue, priority=priority, delay=delay, run_at=run_at, max_attempts=max_attempts
        )  # fmt: skip
        given = {} if payload is None else payload
        if name in self.tasks:
            return await self.get(name).bound(options, on=on).enqueue_payload(given)
        if isinstance(on, AsyncConnection):
            known = await self.store.known_tasks(on)
        else:
            async with self.services(f"enqueue_by_name({name!r})").database.for_caller() as conn:
                known = await self.store.known_tasks(conn)
        if name not in known:
            raise UnknownTask(name, [*known, *self.tasks])
        job = options.job(name, check_json(given, task=name, limit=self.payload_limit))
        await self.enqueue_jobs([job], on=on)
        return self.handle(job.id, None, tenant, on=on)

    async def _enqueue_on_pool(self, jobs: Sequence[NewJob]) -> None:
        services = self.services("enqueue")
        # Every connection may have died in the pool; a server that hangs is not waited for without end.
        tries = max(TRIES, self.settings.pool.size + 1)
        give_up: float | None = None
        for attempt in range(1, tries + 1):
            try:
                async with services.database.for_caller() as conn:
                    await self._write(conn, jobs)
                break
            except psycopg.Error as error:
                # Written or not, the same ids again make it exactly one job each. Waiting for others in vain is no loss.
                lost = connection_lost(error) and not isinstance(error, AllInUse)
                if attempt == tries or not lost or (give_up is not None and time.monotonic() > give_up):
                    raise
                give_up = give_up or time.monotonic() + self.settings.pool.deadline
                await asyncio.sleep(random.uniform(0, PAUSE * attempt))
        services.notifier.hint("ready")

    async def _write(self, conn: AsyncConnection[Any], jobs: Sequence[NewJob]) -> int:
        if conn.info.transaction_status == TransactionStatus.INERROR:
            raise TransactionAborted
        try:
            return await self.store.enqueue_many(conn, jobs)
        except psycopg.errors.InFailedSqlTransaction:
            raise TransactionAborted from None
        except psycopg.errors.UniqueViolation as error:
            raise DuplicateJob(_taken(error) or jobs[0].id) from error
        except psycopg.errors.InvalidParameterValue as error:
            raise InvalidOption("job", str(error).partition("\n")[0]) from None


def _taken(error: psycopg.errors.UniqueViolation) -> UUID | None:
    """Read which id is taken (sql/functions/same_jobs.sql)."""
    found = re.search(r"job id ([0-9a-f-]{36}) ", error.diag.message_primary or "")
    return None if found is None else UUID(found[1])
