"""The app: registers tasks, enqueues, answers for results, and lends its services to workers.

Owns the pool, the notifier and, from the first waiter or worker on, the listener and the reader of results: plain asyncio
tasks, opened and awaited here, so that an app can be opened in a test's fixture. One app, one event loop, one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload
from uuid import UUID

import anyio
import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg_pool import PoolTimeout
from pydantic import BaseModel

from . import embedded, migrate
from .context import JobTransaction, current_job
from .database import Database, connection_lost, deadline
from .dsn import find_dsn, no_dsn
from .errors import (
    AppNotOpen,
    ConfigurationError,
    DuplicateJob,
    InvalidOption,
    JobNotFound,
    TransactionAborted,
    UnknownTask,
)
from .events import Observer, Observers
from .job import Job, JobState, JobStatus, NewJob
from .keep import keep_running
from .listen import Kind, Listener
from .options import Options, check_tenant
from .payload import check_json
from .result import ResultReader
from .settings import DEFAULT_SCHEMA, LeaseSettings, LimitSettings, PoolSettings, Settings, WorkerSettings
from .store import Store
from .task import BoundTask, Task, TaskRegistry
from .wakeup import Notifier
from .worker import Worker

R = TypeVar("R")

EMBEDDED_GRACE = 10.0
"""Seconds that a worker inside an application lets its jobs finish."""
ENQUEUE_TRIES = 5
"""Times at least that an enqueue on the pool is tried when its connection is lost; the id makes that safe."""
ENQUEUE_PAUSE = 0.1
"""Seconds between two of these at most, times the number of tries so far."""


class AioQueue(TaskRegistry):
    """A job queue on PostgreSQL.

    `dsn`: where none is given, AIOQUEUE_DSN, DATABASE_URL, PG*, then the embedded server in `data_dir` (default
    `.aioqueue`). `auto_migrate` brings the schema up to date when the app is opened; otherwise a schema that does not fit
    is a SchemaError. All settings have defaults; see aioqueue.settings.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str = DEFAULT_SCHEMA,
        tenant_setting: str = "app.tenant",
        pool: PoolSettings | None = None,
        lease: LeaseSettings | None = None,
        limits: LimitSettings | None = None,
        worker: WorkerSettings | None = None,
        auto_migrate: bool = False,
        data_dir: Path | str | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        super().__init__()
        self.settings = Settings(
            schema=schema,
            tenant_setting=tenant_setting,
            pool=pool or PoolSettings(),
            lease=lease or LeaseSettings(),
            limits=limits or LimitSettings(),
            worker=worker or WorkerSettings(),
        )
        self.observers = Observers(observers)
        self._dsn = dsn
        self._auto_migrate = auto_migrate
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._store = Store(schema)
        self._server: embedded.EmbeddedServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._database: Database | None = None
        self._services: dict[str, asyncio.Task[None]] = {}
        self._notifier: Notifier
        self._listener: Listener
        self._reader: ResultReader

    # -- opening and closing ------------------------------------------------------------------------------------------

    @property
    def dsn(self) -> str | None:
        """The DSN that the app was given; None: it looks for one when it is opened."""
        return self._dsn

    @property
    def data_dir(self) -> Path | None:
        """The directory of the embedded server that the app was given; None: the default one."""
        return self._data_dir

    @property
    def is_open(self) -> bool:
        """Whether the app is open in this process."""
        return self._database is not None and self._pid == os.getpid()

    async def open(self) -> None:
        """Open the pool and the notifier. Raises SchemaError, ConfigurationError, psycopg.OperationalError."""
        if self._database is not None:
            raise ConfigurationError("the app is open already; open it once, or make another AioQueue")
        loop = asyncio.get_running_loop()
        if sys.platform == "win32" and isinstance(loop, asyncio.ProactorEventLoop):
            raise ConfigurationError(
                "psycopg needs a selector event loop on Windows: asyncio.run(main(), loop_factory=asyncio.SelectorEventLoop)"
            )
        try:
            dsn = await self._find_database()
            database = Database(dsn, self.settings.pool)
            async with await database.connect() as conn, deadline(conn, self.settings.pool.deadline):
                await migrate.check(conn, schema=self.settings.schema)
            await database.open()
        except BaseException:
            self._leave_server()
            raise
        self._database, self._loop, self._pid = database, loop, os.getpid()
        self._notifier = Notifier(database, self._store)
        self._listener = Listener(database.connect, schema=self.settings.schema, observers=self.observers)
        self._reader = ResultReader(database, self._store, self._listener, self._notifier, poll=self.settings.worker.poll)
        self._serve("notifier", self._notifier.run)

    async def close(self) -> None:
        """Close everything; waiters get AppNotOpen. Idempotent."""
        services, self._services = list(self._services.values()), {}
        database, self._database = self._database, None
        for service in services:
            service.cancel()
        # A cancelled anyio scope around us would end every await here; each of these is bounded.
        with anyio.CancelScope(shield=True):
            try:
                if services:
                    await asyncio.wait(services)
            finally:
                if database is not None:
                    await database.close()
                self._leave_server()

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
            "queues": None if queues is None else tuple(queues), "concurrency": concurrency, "drain": drain,
        }  # fmt: skip
        settings = dataclasses.replace(
            self.settings.worker, **{name: value for name, value in changes.items() if value is not None}
        )
        seconds = grace.total_seconds() if isinstance(grace, timedelta) else float(grace)
        return RunningWorker(self, settings, seconds, standalone=standalone)

    # -- what tasks need ----------------------------------------------------------------------------------------------

    @property
    def payload_limit(self) -> int:
        """Bytes of a payload's JSON."""
        return self.settings.limits.payload

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
            if self.is_open:
                if on.info.transaction_status == TransactionStatus.IDLE:
                    self._notifier.hint("ready")
                else:
                    self._notifier.watch(on, xid, [job.id for job in jobs])
        else:
            raise InvalidOption("on", f"expected a psycopg AsyncConnection, a JobTransaction or the app, got {type(on).__name__}")

    def handle(self, job_id: UUID, decode: Callable[[str], Any] | None, tenant: str | None) -> Job[Any]:
        """Make the handle of a job."""
        return Job(job_id, source=self, decode=decode, tenant=tenant)

    @overload
    def job(self, job_id: UUID | str, *, of: Task[..., ..., R], tenant: str | None = None) -> Job[R]: ...
    @overload
    def job(self, job_id: UUID | str, *, of: None = None, tenant: str | None = None) -> Job[Any]: ...
    def job(self, job_id: UUID | str, *, of: Task[..., ..., Any] | None = None, tenant: str | None = None) -> Job[Any]:
        """Return the handle of a job by its id, from any process; `of` gives the result its type.

        With `tenant`, a job of another tenant is JobNotFound, as an unknown one is. Raises InvalidOption for what is no
        id or no tenant's name; asks nothing of the database.
        """
        try:
            number = job_id if isinstance(job_id, UUID) else UUID(job_id)
        except (ValueError, AttributeError, TypeError):
            raise InvalidOption("job_id", f"expected a UUID, got {job_id!r}") from None
        check_tenant(tenant)
        return self.handle(number, None if of is None else of.definition.result.load, tenant)

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
        options: dict[str, Any] = {
            "tenant": tenant, "queue": queue, "priority": priority, "delay": delay, "run_at": run_at,
            "max_attempts": max_attempts,
        }  # fmt: skip
        if name in self.tasks:
            return (await self.get(name).options(**options, on=on).enqueue_many([{} if payload is None else payload]))[0]
        checked = Options.of(**options)
        if isinstance(on, AsyncConnection):
            known = await self._store.known_tasks(on)
        else:
            async with self._open_database(f"enqueue_by_name({name!r})").for_caller() as conn:
                known = await self._store.known_tasks(conn)
        if name not in known:
            raise UnknownTask(name, [*known, *self.tasks])
        text = check_json({} if payload is None else payload, task=name, limit=self.payload_limit)
        job = checked.job(name, text)
        await self.enqueue_jobs([job], on=on)
        return self.handle(job.id, None, tenant)

    # -- what job handles need ----------------------------------------------------------------------------------------

    async def wait_result(self, job: Job[Any], timeout: float | None) -> Any:
        """Wait for a job's end; see `Job.result`."""
        self._open_database("result()")
        self._serve("listener", self._listener.run)
        self._serve("reader of results", self._reader.run)
        return await self._reader.wait(job, timeout)

    async def job_status(self, job: Job[Any]) -> JobStatus:
        """Read a job's state; see `Job.status`."""
        self._open_database("status()")
        return await self._reader.status(job)

    async def cancel_job(self, job: Job[Any]) -> JobState:
        """Cancel a job; see `Job.cancel`. Inside a job's own transaction it joins that."""
        running = current_job.get()
        if isinstance(running, JobTransaction):
            state = await self._store.cancel_job(running.connection, job.id, tenant=job.tenant)
        else:
            async with self._open_database("cancel()").for_caller() as conn:
                state = await self._store.cancel_job(conn, job.id, tenant=job.tenant)
            for kind in ("ready", "done"):
                self._notifier.hint(kind)
        if state is None:
            raise JobNotFound(job.id)
        return state

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The operations, bound to this app's schema."""
        return self._store

    @property
    def database(self) -> Database:
        """The pool of the open app. Raises AppNotOpen."""
        return self._open_database("the pool")

    def _open_database(self, action: str) -> Database:
        if self._database is None:
            raise AppNotOpen(action)
        if self._pid != os.getpid():
            raise ConfigurationError("the app was opened before a fork: connections cannot be shared; open it in each process")
        if self._loop is not asyncio.get_running_loop():
            raise ConfigurationError("the app is open on another event loop: make one AioQueue for each loop")
        return self._database

    async def _find_database(self) -> str:
        dsn = find_dsn(self._dsn)
        if dsn is None:
            if not embedded.available():
                raise no_dsn()
            self._server = await asyncio.to_thread(embedded.start, self._data_dir)
            await self._migrate_embedded(self._server)
            dsn = self._server.dsn("worker")
        elif self._auto_migrate:
            await migrate.migrate(dsn, schema=self.settings.schema)
        return dsn

    async def _migrate_embedded(self, server: embedded.EmbeddedServer) -> None:
        owner = server.dsn("owner")
        before = await migrate.migrate(owner, schema=self.settings.schema)
        if before.pending:
            await migrate.grant(owner, role="aioqueue_worker", schema=self.settings.schema, kind="worker")
            await migrate.grant(owner, role="aioqueue_client", schema=self.settings.schema, kind="client")

    def _leave_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _serve(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a service unless it runs."""
        service = self._services.get(name)
        if service is None or service.done():
            self._services[name] = asyncio.create_task(keep_running(run, name), name=f"aioqueue {name}")

    async def _enqueue_on_pool(self, jobs: Sequence[NewJob]) -> None:
        database = self._open_database("enqueue")
        # Every connection may have died in the pool; a server that hangs is not waited for without end.
        tries = max(ENQUEUE_TRIES, self.settings.pool.size + 1)
        give_up: float | None = None
        for attempt in range(1, tries + 1):
            try:
                async with database.for_caller() as conn:
                    await self._write(conn, jobs)
                break
            except psycopg.Error as error:
                # Written or not, the same ids again make it exactly one job each. Waiting in vain is no lost connection.
                lost = connection_lost(error) and not isinstance(error, PoolTimeout)
                if attempt == tries or not lost or (give_up is not None and time.monotonic() > give_up):
                    raise
                give_up = give_up or time.monotonic() + self.settings.pool.deadline
                await asyncio.sleep(random.uniform(0, ENQUEUE_PAUSE * attempt))
        self._notifier.hint("ready")

    async def _write(self, conn: AsyncConnection[Any], jobs: Sequence[NewJob]) -> int:
        if conn.info.transaction_status == TransactionStatus.INERROR:
            raise TransactionAborted
        try:
            return await self._store.enqueue_many(conn, jobs)
        except psycopg.errors.InFailedSqlTransaction:
            raise TransactionAborted from None
        except psycopg.errors.UniqueViolation as error:
            raise DuplicateJob(jobs[0].id) from error
        except psycopg.errors.InvalidParameterValue as error:
            raise InvalidOption("job", str(error).partition("\n")[0]) from None

    # The worker's side of wake-ups.

    @property
    def listening(self) -> bool:
        """Whether LISTEN is in force."""
        return self._listener.connected

    def hint(self, kind: Kind) -> None:
        """Say that there may be work, or that jobs have ended."""
        self._notifier.hint(kind)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be work."""
        self._serve("listener", self._listener.run)
        self._listener.subscribe("ready", callback)

    def off_ready(self, callback: Callable[[], None]) -> None:
        """Stop calling back."""
        self._listener.unsubscribe("ready", callback)


class RunningWorker:
    """A worker of an app: `async with` runs it beside the block, `run()` runs it and nothing else."""

    def __init__(self, app: AioQueue, settings: WorkerSettings, grace: float, *, standalone: bool) -> None:
        self._app = app
        self._settings = settings
        self._grace = grace
        self._standalone = standalone
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._opened_app = False

    @property
    def id(self) -> int:
        """The worker's present identity; 0 before it has one."""
        return 0 if self._worker is None else self._worker.heartbeat.worker

    @property
    def running(self) -> int:
        """Jobs that run now."""
        return 0 if self._worker is None else self._worker.running

    def problems(self) -> list[str]:
        """Say what keeps the worker from its work now; empty when all is well."""
        return ["the worker has not started yet"] if self._worker is None else self._worker.problems()

    @property
    def abandoned(self) -> int:
        """Jobs that ignored their cancellation and were given up on; then the worker claims nothing more."""
        return 0 if self._worker is None else self._worker.abandoned

    @property
    def unwritten(self) -> int:
        """Outcomes that the database did not take before the worker had to stop; others run these jobs again."""
        return 0 if self._worker is None else self._worker.unwritten

    def stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop; see `Worker.stop`. Idempotent."""
        if self._worker is not None:
            self._worker.stop(hurry=hurry)

    async def run(self) -> None:
        """Run until stopped, drained or cancelled; opens the app if need be."""
        async with contextlib.AsyncExitStack() as stack:
            if not self._app.is_open:
                await stack.enter_async_context(self._app)
            await self._make().run()

    async def __aenter__(self) -> Self:
        if not self._app.is_open:
            await self._app.open()
            self._opened_app = True
        try:
            worker = self._make()
            self._task = asyncio.create_task(worker.run(), name="aioqueue worker")
            started = asyncio.create_task(worker.started.wait())
            try:
                await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
            finally:
                started.cancel()
            if self._task.done():
                self._task.result()
        except BaseException:
            if self._task is not None:
                self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._leave()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        await self._leave()

    async def wait(self) -> None:
        """Wait until the worker has ended by itself (drain)."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _leave(self) -> None:
        # Whoever cancels us, and however often: the worker stops by its own limits. A cancellation makes it hurry.
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while self._task is not None and not self._task.done():
                try:
                    await asyncio.wait([self._task])
                except asyncio.CancelledError as error:
                    cancelled = error
                    self.stop(hurry=True)
            if self._opened_app:
                await self._app.close()
        if cancelled is not None:
            raise cancelled
        if self._task is not None:
            self._task.result()

    def _make(self) -> Worker:
        if self._worker is not None:
            raise ConfigurationError("this worker was started already; make another with app.worker()")
        self._worker = Worker(
            self._app.database,
            self._app.store,
            self._app.observers,
            self._app,
            self._app.tasks,
            self._app.settings,
            worker=self._settings,
            grace=self._grace,
            standalone=self._standalone,
        )
        return self._worker


__all__ = ["AioQueue", "BoundTask", "RunningWorker"]
