"""The app: opens and closes what tasks, handles and workers need, and answers for jobs by their id.

Counts who needs the pool and the shared loops (services.py), which the last to leave closes. How jobs are written stands in
enqueue.py, what a worker is to its user in running.py. One app, one event loop, one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload
from uuid import UUID

import anyio

from .control import Controlling
from .database import Database
from .dsn import checked
from .enqueue import as_seen_here
from .errors import AppNotOpen, ConfigurationError, InvalidOption
from .eventlog import EventLog
from .events import Observer, Observers
from .job import Job, JobStatus
from .keep import outlast
from .location import Location
from .middleware import Middleware, check_middleware
from .options import check_tenant
from .patience import once_reached
from .registry import Opened
from .running import RunningWorker
from .services import Services
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
from .store import Store
from .task import BoundTask, Task
from .wakeup import Notifier

R = TypeVar("R")

_inherited: list[object] = []
"""What a parent process had opened: kept for ever, since an object that is collected may close what is the parent's."""


class AioQueue(Controlling[Opened]):
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
        super().__init__()
        self.settings = Settings(
            schema=schema,
            tenants=TenantSettings() if tenants is None else check_kind("tenants", tenants, TenantSettings),
            pool=PoolSettings() if pool is None else check_kind("pool", pool, PoolSettings),
            lease=LeaseSettings() if lease is None else check_kind("lease", lease, LeaseSettings),
            limits=LimitSettings() if limits is None else check_kind("limits", limits, LimitSettings),
            worker=WorkerSettings() if worker is None else check_kind("worker", worker, WorkerSettings),
            retention=RetentionSettings() if retention is None else check_kind("retention", retention, RetentionSettings),
            session=None if session is None else check_factory(session),
        )
        self.observers = Observers([EventLog(), *observers] if check_kind("log_events", log_events, bool) else observers)
        self.middleware = check_middleware(middleware)
        self._resources = resources
        self._location = Location(
            None if dsn is None else _checked(check_kind("dsn", dsn, str), "dsn"),
            None if listen_dsn is None else _checked(check_kind("listen_dsn", listen_dsn, str), "listen_dsn"),
            None if data_dir is None else Path(data_dir),
            schema,
            auto_migrate,
        )
        self._store = Store(schema)
        self.refusal: str | None = None
        """Why the database cannot be reached, while opening the app waits for it."""
        self._services: Services | None = None
        self._opened = False
        """Whether `open` was called, and `close` not yet."""
        self._users = 0
        """Who needs the pool: one for `open`, and each worker."""
        self._pid = os.getpid()
        self._turns = asyncio.Lock()
        self._turns_of: asyncio.AbstractEventLoop | None = None

    # -- opening and closing ------------------------------------------------------------------------------------------

    @property
    def dsn(self) -> str | None:
        """The DSN that the app was given; None: it looks for one when it is opened."""
        return self._location.dsn

    @property
    def listen_dsn(self) -> str | None:
        """The DSN that the app was given for wake-ups."""
        return self._location.listen_dsn

    @property
    def data_dir(self) -> Path | None:
        """The directory of the embedded server that the app was given; None: the default one."""
        return self._location.data_dir

    def point_at(self, dsn: str | None, listen_dsn: str | None) -> None:
        """Use these when it is opened next, in place of those that it was given: for tests."""
        self._location.dsn, self._location.listen_dsn = dsn, listen_dsn

    @property
    def is_open(self) -> bool:
        """Whether the app is open in this process."""
        return self._services is not None and not self._services.inherited

    async def open(self) -> None:
        """Open the pool and the notifier. Raises SchemaError, ConfigurationError, psycopg.OperationalError.

        A database that cannot be reached is waited for, `PoolSettings.start_timeout` at most.
        In a process that was forked since, what the parent has opened is left alone.
        """
        async with self._turn():
            if self._opened:
                raise ConfigurationError("the app is open already; open it once, or make another AioQueue")
            await self._join()
            self._opened = True

    async def close(self) -> None:
        """Close everything; waiters get AppNotOpen. Idempotent. While workers run, the last of them to end closes it."""
        await outlast(asyncio.create_task(self._close(), name="aioqueue close"))

    async def join(self) -> None:
        """Open the app if need be; it stays open until everybody who joined has left. For workers."""
        async with self._turn():
            await self._join()

    async def leave(self) -> None:
        """Undo one `join`."""
        await outlast(asyncio.create_task(self._leave(), name="aioqueue close"))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Open the app for as long as a web application lives: `FastAPI(lifespan=app.lifespan)`."""
        async with self:
            yield

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

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The operations, bound to this app's schema."""
        return self._store

    @property
    def notifier(self) -> Notifier | None:
        """What gives hints; None while the app is closed, or is open in another process or on another loop."""
        services = self._services
        return services.notifier if services is not None and services.usable else None

    def tell(self, call: Callable[[Notifier], None]) -> bool:
        """Have the notifier told something, from whatever thread; False: the app is not open in this process."""
        services = self._services
        if services is None or services.inherited:
            return False
        services.tell(call)
        return True

    @property
    def database(self) -> Database:
        """The pool of the open app. Raises AppNotOpen."""
        return self.services("the pool").database

    def services(self, action: str) -> Services:
        """Return what the open app has, for an action. Raises AppNotOpen, ConfigurationError (another process or loop)."""
        if self._services is None:
            raise AppNotOpen(action)
        _ = self._services.database
        return self._services

    def note_refusal(self, error: str) -> None:
        """Take note of why the database cannot be reached, while a start waits for it."""
        self.refusal = error

    def _turn(self) -> asyncio.Lock:
        """Return the lock of opening and closing: new in each process and on each loop, which may come one after the other."""
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            _inherited.extend([self._services, self._location, self._turns, self._turns_of])
            self._services = self._turns_of = None
            self._location = dataclasses.replace(self._location)
            self._opened, self._users, self._pid = False, 0, os.getpid()
        if self._turns_of is not loop:
            self._turns, self._turns_of = asyncio.Lock(), loop
        return self._turns

    async def _join(self) -> None:
        if self._users:
            self.services("joining")
        else:
            await self._start()
        self._users += 1

    async def _close(self) -> None:
        async with self._turn():
            if self._opened:
                self._opened = False
                await self._let_go()

    async def _leave(self) -> None:
        async with self._turn():
            await self._let_go()

    async def _let_go(self) -> None:
        self._users -= 1
        if not self._users:
            await self._end()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if sys.platform == "win32" and isinstance(loop, asyncio.ProactorEventLoop):
            raise ConfigurationError(
                "psycopg needs a selector event loop on Windows: asyncio.run(main(), loop_factory=asyncio.SelectorEventLoop)"
            )
        anyio.get_cancelled_exc_class()  # loads anyio's backend now: 25 ms that no stop must cost the loop
        try:
            self._services = await once_reached(self._open_services, self.settings.pool.start_timeout, self.note_refusal)
        except BaseException:
            self._location.leave()
            raise
        finally:
            self.refusal = None

    async def _open_services(self) -> Services:
        dsn, listen_dsn = await self._location.find()
        return await Services.open(dsn, self._store, self.settings, self.observers, listen_dsn=listen_dsn)

    async def _end(self) -> None:
        services, self._services = self._services, None
        try:
            if services is not None:
                await services.close()
        finally:
            self._location.leave()

    # The worker's side of wake-ups.

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


__all__ = ["AioQueue", "BoundTask", "RunningWorker"]
