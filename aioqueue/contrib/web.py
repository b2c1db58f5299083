"""What a web application answers about jobs, whatever its framework: a job by its id, its events, its cancellation.

The core of contrib.fastapi, contrib.starlette and contrib.litestar, which find out the tenant and send what stands here. Uses the
face that the app has for its users, and no framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
from pydantic import BaseModel
from pydantic_core import to_json

from aioqueue.app import AioQueue
from aioqueue.errors import (
    AppNotOpen,
    ConfigurationError,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotCommitted,
    ResultError,
    ResultTimeout,
)
from aioqueue.job import Job
from aioqueue.server import connection_lost
from aioqueue.settings import EMBEDDED_GRACE
from aioqueue.states import JobEnded, JobEvent, JobState, ProgressChanged

EVERY_TENANT: Final = object()
"""What `auth` returns for whoever may see the jobs of all tenants, and in an application without any."""
SLICE = 1.0
"""Seconds after which a stream sees at the latest that the server stops."""
HEARTBEAT = 15.0
"""Seconds of silence after which a stream gives a sign of life, so that no proxy ends it."""
RETRY_AFTER = "1"
"""Seconds after which a client may ask again when the database did not answer in time."""
RECONNECT = 2_000
"""Milliseconds after which a browser whose stream broke connects again."""
LAST = "end"
"""Id of the last event: a browser that comes back with it is told to stay away."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
STREAM_TYPE = "text/event-stream"


class ProgressView(BaseModel):
    """How far a running job is, from 0 to 1."""

    value: float
    message: str | None


class JobView(BaseModel):
    """A job as its tenant sees it."""

    id: UUID
    task: str
    queue: str
    state: JobState
    attempt: int
    max_attempts: int
    created_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    progress: ProgressView | None = None
    """While it runs, if it says how far it is."""
    result: Any = None
    """Of a job that succeeded."""
    error: str | None = None
    """Why it is dead or cancelled, if errors are shown."""


class Refused(Exception):
    """The answer is no job: 404 unknown or another tenant's, 503 the database did not answer in time."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        super().__init__(f"{status} {detail}")


@dataclass(frozen=True, slots=True)
class Told:
    """One server-sent event. Without a name: a sign of life."""

    name: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    retry: int | None = None

    @property
    def text(self) -> str:
        """What it says, as JSON in one line."""
        return to_json(self.data).decode()

    def encode(self) -> bytes:
        """Return it as it goes over the wire."""
        if self.name is None:
            return b": still here\n\n"
        retry = [] if self.retry is None else [f"retry: {self.retry}"]
        return "\n".join([f"event: {self.name}", f"data: {self.text}", f"id: {self.id}", *retry, "", ""]).encode()


class Jobs:
    """Answers about the jobs of one app; every method raises Refused."""

    def __init__(self, app: AioQueue, *, show_errors: bool) -> None:
        self._app = app
        self._show_errors = show_errors

    def find(self, job_id: UUID | str, tenant: Any) -> Job[Any]:
        """Return the handle for what `auth` has returned; asks nothing of the database."""
        if tenant is None:
            raise ConfigurationError(
                "auth returned None: return the tenant's name, refuse the request, or return EVERY_TENANT for all jobs"
            )
        return self._app.job(job_id, tenant=None if tenant is EVERY_TENANT else tenant)

    async def find_for(self, request: Any, auth: Callable[[Any], Any]) -> Job[Any]:
        """Do as `find` for a request of Starlette's or Litestar's; a coroutine function as `auth` is awaited."""
        tenant = auth(request)
        if inspect.isawaitable(tenant):
            tenant = await tenant
        return self.find(request.path_params["job_id"], tenant)

    async def read(self, job: Job[Any]) -> JobView:
        """Read where the job stands, and its result."""
        with _refusing():
            now = await job.status()
            result = error = None
            if now.state.ended:
                try:
                    result = await job.result(SLICE)
                except (JobFailed, JobCancelled) as end:
                    error = self._reason(end)
        shown = {name: getattr(now, name) for name in JobView.model_fields if name not in ("progress", "result", "error")}
        far = now.progress
        progress = None if far is None else ProgressView(value=far.value, message=far.message)
        return JobView(**shown, progress=progress, result=result, error=error)

    async def cancel(self, job: Job[Any]) -> tuple[JobView, bool]:
        """Cancel the job; how it stands now, and whether it still runs, and was asked to end."""
        with _refusing():
            runs = await job.cancel() is JobState.RUNNING
        return await self.read(job), runs

    async def check(self, job: Job[Any], last_event_id: str | None) -> bool:
        """Refuse a stream before it begins: afterwards it is too late for a status. False: there is nothing to tell, a 204."""
        if last_event_id == LAST:
            return False
        with _refusing():
            await job.status()
        return True

    async def follow(self, job: Job[Any]) -> AsyncIterator[Told]:
        """Tell what happens to the job, and give signs of life, until it has ended or the server stops.

        Nothing is held between two events: whoever leaves leaves nothing behind. One query serves all who follow in the process.
        """
        try:
            events = job.watch()
        except AppNotOpen:
            return
        number, spoke = 0, time.monotonic()
        while not _server_stops():
            try:
                async with asyncio.timeout(SLICE):
                    event = await anext(events, None)
            except TimeoutError:
                if time.monotonic() - spoke < HEARTBEAT:
                    continue
                told = Told()
            except (ResultError, AppNotOpen):
                return
            else:
                if event is None:
                    return
                number += 1
                told = self._told(event, number)
            spoke = time.monotonic()
            yield told

    async def stream(self, job: Job[Any]) -> AsyncIterator[bytes]:
        """Do as `follow`; the events as they go over the wire."""
        async for told in self.follow(job):
            yield told.encode()

    def _told(self, event: JobEvent[Any], number: int) -> Told:
        state = JobState.RUNNING if isinstance(event, ProgressChanged) else event.state
        data: dict[str, Any] = {"state": state, "attempt": event.attempt, "progress": None, "result": None, "error": None}
        name, told_as = "state", str(number)
        if isinstance(event, ProgressChanged):
            name, data["progress"] = "progress", {"value": event.progress.value, "message": event.progress.message}
        elif isinstance(event, JobEnded):
            name, told_as = "result", LAST
            data["result"], data["error"] = event.result, self._reason(event.error)
        return Told(name, data, told_as, RECONNECT if number == 1 else None)

    def _reason(self, error: ResultError | None) -> str | None:
        if error is None or not self._show_errors:
            return None
        if isinstance(error, JobCancelled):
            return error.reason or "cancelled"
        if isinstance(error, JobFailed):
            return ": ".join(text for text in (error.error_type, error.error_message) if text)
        return str(error)


def lifespan(
    app: AioQueue,
    *,
    queues: Sequence[str] | None = None,
    concurrency: int | None = None,
    grace: float | timedelta = EMBEDDED_GRACE,
) -> Callable[[Any], contextlib.AbstractAsyncContextManager[None]]:
    """Open the app and run a worker for as long as the application lives: `FastAPI(lifespan=lifespan(app))`.

    In each process of the server, without signal handlers; options as in `app.worker`. Without a worker: `app.lifespan`.
    In a lifespan of your own write `async with app, app.worker(): yield`.
    """

    @contextlib.asynccontextmanager
    async def living(_web: Any) -> AsyncIterator[None]:
        worker = app.worker(queues=queues, concurrency=concurrency, grace=grace)
        async with app, worker:
            yield

    return living


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (JobNotFound, NotCommitted):
        raise Refused(404, "no such job") from None
    except (ResultTimeout, psycopg.Error) as error:
        if isinstance(error, psycopg.Error) and not connection_lost(error):
            raise
        raise Refused(503, "the database did not answer in time", {"Retry-After": RETRY_AFTER}) from None


def _server_stops() -> bool:
    """Whether uvicorn was told to stop: it waits for streams to end. Its own signal handler knows."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))
