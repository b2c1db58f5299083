"""The app as its user makes it: its options, the workers inside it, and jobs by their id.

How it is opened and closed stands in opening.py, how jobs are written in enqueue.py, what an operator changes in control.py, what
a worker is to its user in running.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, overload
from uuid import UUID

from .control import Controlling
from .dsn import checked
from .enqueue import as_seen_here
from .errors import InvalidOption
from .eventlog import EventLog
from .events import Observer, Observers
from .job import Job, JobStatus
from .location import Location
from .middleware import Middleware, check_middleware
from .opening import Openable
from .options import check_tenant
from .registry import Opened
from .running import RunningWorker
from .session_factory import SessionFactory, check_factory
from .settings import (
    DEFAULT_SCHEMA,
    EMBEDDED_GRACE,
    LeaseSettings,
    LimitSettings,
    PoolSettings,
    RetentionSettings,
    Settings,
    TenantSettings,
    WorkerSettings,
    check_kind,
)
from .states import JobEvent
from .task import Task

R = TypeVar("R")


# Openable first: its store and services are those that Controlling works with.
class AioQueue(Openable, Controlling[Opened]):
    """A job queue on PostgreSQL.

    `dsn`: where none is given, AIOQUEUE_DSN, DATABASE_URL, PG*, then the embedded server in `data_dir` (default
    `.aioqueue`). `listen_dsn`: a direct way to the same database for wake-ups, where `dsn` leads through a pooler in transaction
    mode (default: AIOQUEUE_LISTEN_DSN, then `dsn`). `session`, SQLAlchemy's async_sessionmaker, makes the sessions of tasks that
    take a `JobSession`. `auto_migrate` brings the schema up to date when the app is opened;
    otherwise a schema that does not fit is a SchemaError. `observers` are shown every event, `middleware` runs around every task,
    `resources` makes an async context manager whose value is `ctx.resources` of every job: each worker enters it before its
    first claim and leaves it after its last job. `log_events=False` leaves out the observer that logs what happens
    to "aioqueue", such as failed attempts as warnings (docs/api.md). All settings have defaults; see aioqueue.settings.
    """

    worker_class: type[RunningWorker] = RunningWorker
    """What `worker()` returns; tests have one that claims nothing."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        listen_dsn: str | None = None,
        schema: str = DEFAULT_SCHEMA,
        tenants: TenantSettings | None = None,
        pool: PoolSettings | None = None,
        lease: LeaseSettings | None = None,
        limits: LimitSettings | None = None,
        worker: WorkerSettings | None = None,
        retention: RetentionSettings | None = None,
        session: SessionFactory | None = None,
        auto_migrate: bool = False,
        data_dir: Path | str | None = None,
        observers: Iterable[Observer] = (),
        middleware: Iterable[Middleware] = (),
        resources: Callable[[AioQueue], AbstractAsyncContextManager[Opened]] | None = None,
        log_events: bool = True,
    ) -> None:
        settings = Settings(
            schema=schema,
            tenants=TenantSettings() if tenants is None else check_kind("tenants", tenants, TenantSettings),
            pool=PoolSettings() if pool is None else check_kind("pool", pool, PoolSettings),
            lease=LeaseSettings() if lease is None else check_kind("lease", lease, LeaseSettings),
            limits=LimitSettings() if limits is None else check_kind("limits", limits, LimitSettings),
            worker=WorkerSettings() if worker is None else check_kind("worker", worker, WorkerSettings),
            retention=RetentionSettings() if retention is None else check_kind("retention", retention, RetentionSettings),
            session=None if session is None else check_factory(session),
        )
        self.middleware = check_middleware(middleware)
        self._resources = resources
        location = Location(
            None if dsn is None else _checked(check_kind("dsn", dsn, str), "dsn"),
            None if listen_dsn is None else _checked(check_kind("listen_dsn", listen_dsn, str), "listen_dsn"),
            None if data_dir is None else Path(data_dir),
            schema,
            auto_migrate,
        )
        logs = [EventLog()] if check_kind("log_events", log_events, bool) else []
        super().__init__(settings, Observers([*logs, *observers]), location)

    # -- workers ------------------------------------------------------------------------------------------------------

    def worker(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int | None = None,
        drain: bool | None = None,
        grace: float | timedelta = EMBEDDED_GRACE,
        standalone: bool = False,
    ) -> RunningWorker:
        """Return a worker to run inside this application: `async with app.worker(): …`. Opens the app if need be.

        No signal handlers. Options left out come from the app's WorkerSettings. `standalone`: the process is the worker's
        own (the CLI): a job that ignores its cancellation makes it drain and stop, where an embedded worker only claims
        nothing more and reports itself unhealthy.
        """
        changes: dict[str, Any] = {
            "queues": queues, "concurrency": concurrency, "drain": drain,
        }  # fmt: skip
        settings = dataclasses.replace(
            self.settings.worker, **{name: value for name, value in changes.items() if value is not None}
        )
        seconds = grace.total_seconds() if isinstance(grace, timedelta) else float(grace)
        return self.worker_class(self, settings, seconds, standalone=standalone)

    def make_resources(self) -> AbstractAsyncContextManager[Any]:
        """Make what one worker opens for its jobs; see AioQueue. For workers, and for tests that run tasks by themselves."""
        return contextlib.nullcontext() if self._resources is None else self._resources(self)

    # -- jobs by their id ---------------------------------------------------------------------------------------------

    @overload
    def job(
        self, job_id: UUID | str, *, of: Task[..., ..., R], tenant: str | None = None, on: AioQueue | None = None
    ) -> Job[R]: ...
    @overload
    def job(self, job_id: UUID | str, *, of: None = None, tenant: str | None = None, on: AioQueue | None = None) -> Job[Any]: ...
    def job(
        self,
        job_id: UUID | str,
        *,
        of: Task[..., ..., Any] | None = None,
        tenant: str | None = None,
        on: AioQueue | None = None,
    ) -> Job[Any]:
        """Return the handle of a job by its id, from any process; `of` gives the result its type.

        With `tenant`, a job of another tenant is JobNotFound, as an unknown one is. Used inside a job that has a tenant, a
        handle without one is that tenant's; `on=app` leaves it, as in an enqueue. Raises InvalidOption for what is no id or
        no tenant's name; asks nothing of the database.
        """
        try:
            number = job_id if isinstance(job_id, UUID) else UUID(job_id)
        except (ValueError, AttributeError, TypeError):
            raise InvalidOption("job_id", f"expected a UUID, got {job_id!r}") from None
        if on is not None and on is not self:
            raise InvalidOption("on", f"expected the app itself, to leave the running job's tenant, got {type(on).__name__}")
        return self.handle(number, None if of is None else of.definition.result.load, check_tenant(tenant), on=on)

    async def wait_result(self, job: Job[Any], timeout: float | None) -> Any:
        """Wait for a job's end; see `Job.result`."""
        return await self.services("result()").reader.wait(as_seen_here(job), timeout)

    def watch_job(self, job: Job[Any], timeout: float | None) -> AsyncIterator[JobEvent[Any]]:
        """Watch a job; see `Job.watch`."""
        return self.services("watch()").reader.watch(as_seen_here(job), timeout)

    async def job_status(self, job: Job[Any]) -> JobStatus:
        """Read a job's state; see `Job.status`."""
        return await self.services("status()").reader.status(as_seen_here(job))

    # -- the worker's side of wake-ups -------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        """Whether LISTEN is in force, or cannot be: behind a pooler without a `listen_dsn`."""
        services = self.services("a worker")
        return services.listener.connected or not services.database.can_listen

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be work."""
        self.services("a worker").listener.subscribe("ready", callback)

    def off_ready(self, callback: Callable[[], None]) -> None:
        """Stop calling back."""
        self.services("a worker").listener.unsubscribe("ready", callback)


def _checked(dsn: str, option: str) -> str:
    checked(dsn, option)  # a driver in it is left out when it is used
    return dsn
