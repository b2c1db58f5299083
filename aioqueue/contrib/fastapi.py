"""FastAPI: jobs by their id over HTTP, a request's transaction that ends before the response, a worker beside the application.

Uses the face that the app has for its users, and what recognises their libraries. Needs the extra `fastapi`. No
`from __future__ import annotations` here: FastAPI reads the annotations of functions inside functions.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final
from uuid import UUID

from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
from pydantic import BaseModel

from aioqueue.app import AioQueue
from aioqueue.callers.caller import is_a
from aioqueue.errors import AppNotOpen, ConfigurationError, JobCancelled, JobFailed, JobNotFound, NotCommitted, ResultTimeout
from aioqueue.job import Job, JobState
from aioqueue.settings import EMBEDDED_GRACE

try:
    from fastapi import APIRouter, Depends, Header, HTTPException, Response, status
    from fastapi.sse import EventSourceResponse, ServerSentEvent
except ImportError as error:
    raise ImportError(
        f"aioqueue.contrib.fastapi needs FastAPI 0.135 or later: pip install 'aioqueue-pg[fastapi]' ({error})", name=error.name
    ) from error

EVERY_TENANT: Final = object()
"""What `auth` returns for whoever may see the jobs of all tenants, and in an application without any."""
FIRST_LOOK, LONGEST_LOOK = 0.2, 10.0
"""Seconds between reads of the state of a job that is followed; doubling while it stays the same. Its end needs none."""
SLICE = 1.0
"""Seconds after which a stream sees at the latest that the server stops."""
RETRY_AFTER = "1"
"""Seconds after which a client may ask again when the database did not answer in time."""
RECONNECT = 2_000
"""Milliseconds after which a browser whose stream broke connects again."""
SOURCES = "an SQLAlchemy async_sessionmaker, AsyncEngine, sessionmaker or Engine, or a pool of psycopg_pool's or asyncpg's"
LAST = "end"
"""Id of the last event: a browser that comes back with it is told to stay away."""


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
    result: Any = None
    """Of a job that succeeded."""
    error: str | None = None
    """Why it is dead or cancelled, if errors are shown."""


def jobs_router(
    app: AioQueue, *, auth: Callable[..., Any], prefix: str = "/jobs", show_errors: bool = False, tags: Sequence[str] = ("jobs",)
) -> APIRouter:
    """Make the routes GET /jobs/{id}, GET /jobs/{id}/events (server-sent events) and DELETE /jobs/{id} (cancel).

    `auth` is a dependency: it takes what it needs of the request, raises HTTPException, and returns the tenant whose jobs may be
    seen. A job of another tenant is a 404, just as an unknown one. `show_errors` gives the text of errors to the client: they are
    your code's, and may say more than a client should read.
    """

    async def found(job_id: UUID, tenant: Annotated[Any, Depends(auth)]) -> Job[Any]:
        if tenant is None:
            raise ConfigurationError(
                "auth returned None: return the tenant's name, raise HTTPException, or return EVERY_TENANT for all jobs"
            )
        return app.job(job_id, tenant=None if tenant is EVERY_TENANT else tenant)

    async def followed(
        job: Annotated[Job[Any], Depends(found)], last_event_id: Annotated[str | None, Header()] = None
    ) -> JobView:
        # Before the stream begins: afterwards it is too late for a status.
        if last_event_id == LAST:
            raise HTTPException(status.HTTP_204_NO_CONTENT)
        return await _view(job, show_errors)

    router = APIRouter(prefix=prefix, tags=[*tags])

    @router.get("/{job_id}", responses={404: {"description": "unknown, or another tenant's"}})
    async def read_job(job: Annotated[Job[Any], Depends(found)]) -> JobView:
        """Read where the job stands, and its result."""
        return await _view(job, show_errors)

    @router.get("/{job_id}/events", response_class=EventSourceResponse)
    async def follow_job(
        job: Annotated[Job[Any], Depends(found)], view: Annotated[JobView, Depends(followed)]
    ) -> AsyncIterator[ServerSentEvent]:
        """Follow the job: an event `state` for each change that is seen, `result` at its end."""
        retry: int | None = RECONNECT
        async for seen in _changes(job, view, show_errors):
            end = seen.state.ended
            yield ServerSentEvent(event="result" if end else "state", data=seen, id=LAST if end else None, retry=retry)
            retry = None

    @router.delete("/{job_id}", responses={202: {"description": "it runs, and was asked to end"}})
    async def cancel_job(job: Annotated[Job[Any], Depends(found)], response: Response) -> JobView:
        """Cancel the job: a waiting one at once, a running one soon."""
        try:
            if await job.cancel() is JobState.RUNNING:
                response.status_code = status.HTTP_202_ACCEPTED
        except (JobNotFound, NotCommitted):
            raise _not_found() from None
        except PoolTimeout:
            raise _busy() from None
        return await _view(job, show_errors)

    return router


def transaction(source: Any) -> Any:
    """Give a path operation a transaction that is committed before the response is sent, and rolled back by an exception.

    `session: Annotated[AsyncSession, transaction(sessions)]`, then `task.options(on=session).enqueue(…)`. `source` is an
    SQLAlchemy async_sessionmaker or AsyncEngine, a pool of psycopg_pool's or asyncpg's; for `def` operations and `enqueue_sync`
    a sessionmaker, an Engine, a ConnectionPool. Pools must be open. A commit that fails is the request's error.
    """
    return Depends(_dependency(source), scope="function")


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


def _not_found() -> HTTPException:
    return HTTPException(status.HTTP_404_NOT_FOUND, "no such job")


def _busy() -> HTTPException:
    return HTTPException(
        status.HTTP_503_SERVICE_UNAVAILABLE, "the database did not answer in time", headers={"Retry-After": RETRY_AFTER}
    )


async def _view(job: Job[Any], show_errors: bool) -> JobView:
    try:
        now = await job.status()
        result = error = None
        if now.state.ended:
            try:
                result = await job.result(SLICE)
            except (JobFailed, JobCancelled) as end:
                error = _reason(end) if show_errors else None
    except (JobNotFound, NotCommitted):
        raise _not_found() from None
    except (ResultTimeout, PoolTimeout):
        raise _busy() from None
    shown = {name: getattr(now, name) for name in JobView.model_fields if name not in ("result", "error")}
    return JobView(**shown, result=result, error=error)


def _reason(error: JobFailed | JobCancelled) -> str:
    if isinstance(error, JobCancelled):
        return error.reason or "cancelled"
    return ": ".join(text for text in (error.error_type, error.error_message) if text)


async def _changes(job: Job[Any], view: JobView, show_errors: bool) -> AsyncIterator[JobView]:
    """The view now, after each change of state or attempt that is seen, and at the job's end."""
    yield view
    pause = looked = FIRST_LOOK
    while not view.state.ended and not _server_stops():
        try:
            # One query serves all who wait in this process, so that the end costs nothing but this.
            async with asyncio.timeout(min(pause, SLICE)):
                await job.result()
        except TimeoutError:
            pause -= SLICE
            if pause > 0:
                continue
        except (JobFailed, JobCancelled):
            pass
        except (JobNotFound, AppNotOpen):
            return
        try:
            seen = await _view(job, show_errors)
        except HTTPException as error:
            if error.status_code == status.HTTP_503_SERVICE_UNAVAILABLE:
                pause = looked  # the next look may be answered
                continue
            return
        changed = (seen.state, seen.attempt) != (view.state, view.attempt)
        pause = looked = FIRST_LOOK if changed else min(2 * looked, LONGEST_LOOK)
        if changed:
            view = seen
            yield view


def _server_stops() -> bool:
    """Whether uvicorn was told to stop: it waits for streams to end. Its own signal handler knows."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))


def _dependency(source: Any) -> Callable[[], AsyncIterator[Any]] | Callable[[], Iterator[Any]]:
    begin = _beginning(source)
    if begin is None:
        raise ConfigurationError(f"transaction: expected {SOURCES}, got {type(source).__module__}.{type(source).__qualname__}")
    if _blocks(source):

        def blocking() -> Iterator[Any]:
            with begin() as opened:
                yield opened

        return blocking

    async def awaited() -> AsyncIterator[Any]:
        async with begin() as opened:
            yield opened

    return awaited


def _blocks(source: object) -> bool:
    return (
        isinstance(source, ConnectionPool)
        or is_a(source, "sqlalchemy.orm", "sessionmaker")
        or is_a(source, "sqlalchemy", "Engine")
    )


def _beginning(source: Any) -> Callable[[], Any] | None:
    """Return what makes context managers that begin a transaction and end it."""
    if isinstance(source, ConnectionPool):
        return lambda: _lent_blocking(source)
    if isinstance(source, AsyncConnectionPool):
        return lambda: _lent(source.connection())
    if is_a(source, "asyncpg", "Pool"):
        return lambda: _lent(source.acquire())
    awaited = is_a(source, "sqlalchemy.ext.asyncio", "async_sessionmaker") or is_a(
        source, "sqlalchemy.ext.asyncio", "AsyncEngine"
    )
    begin: Callable[[], Any] | None = source.begin if awaited or _blocks(source) else None
    return begin


@contextlib.asynccontextmanager
async def _lent(connection: Any) -> AsyncIterator[Any]:
    async with connection as conn, conn.transaction():
        yield conn


@contextlib.contextmanager
def _lent_blocking(pool: ConnectionPool[Any]) -> Iterator[Any]:
    with pool.connection() as conn, conn.transaction():
        yield conn
