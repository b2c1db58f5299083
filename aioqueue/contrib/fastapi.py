"""FastAPI: jobs by their id over HTTP, a request's transaction that ends before the response, a worker beside the application.

Uses the face that the app has for its users, and what recognises their libraries. Needs the extra `fastapi`. No
`from __future__ import annotations` here: FastAPI reads the annotations of functions inside functions.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Any
from uuid import UUID

from psycopg_pool import AsyncConnectionPool, ConnectionPool

from aioqueue.app import AioQueue
from aioqueue.callers.caller import is_a
from aioqueue.errors import ConfigurationError
from aioqueue.job import Job

from .web import EVERY_TENANT, STREAM_HEADERS, Jobs, JobView, Refused, lifespan

try:
    from fastapi import APIRouter, Depends, Header, HTTPException, Response, status
    from fastapi.sse import EventSourceResponse, ServerSentEvent
except ImportError as error:
    raise ImportError(
        f"aioqueue.contrib.fastapi needs FastAPI 0.135 or later: pip install 'aioqueue-pg[fastapi]' ({error})", name=error.name
    ) from error

__all__ = ["EVERY_TENANT", "JobView", "jobs_router", "lifespan", "transaction"]

SOURCES = "an SQLAlchemy async_sessionmaker, AsyncEngine, sessionmaker or Engine, or a pool of psycopg_pool's or asyncpg's"


def jobs_router(
    app: AioQueue, *, auth: Callable[..., Any], prefix: str = "/jobs", show_errors: bool = False, tags: Sequence[str] = ("jobs",)
) -> APIRouter:
    """Make the routes GET /jobs/{id}, GET /jobs/{id}/events (server-sent events) and DELETE /jobs/{id} (cancel).

    `auth` is a dependency: it takes what it needs of the request, raises HTTPException, and returns the tenant whose jobs may be
    seen. A job of another tenant is a 404, just as an unknown one. `show_errors` gives the text of errors to the client: they are
    your code's, and may say more than a client should read.
    """
    jobs = Jobs(app, show_errors=show_errors)

    async def found(job_id: UUID, tenant: Annotated[Any, Depends(auth)]) -> Job[Any]:
        return jobs.find(job_id, tenant)

    async def checked(
        job: Annotated[Job[Any], Depends(found)], response: Response, last_event_id: Annotated[str | None, Header()] = None
    ) -> Job[Any]:
        response.headers.update(STREAM_HEADERS)
        with _refusals():
            if not await jobs.check(job, last_event_id):
                raise HTTPException(status.HTTP_204_NO_CONTENT)
        return job

    router = APIRouter(prefix=prefix, tags=[*tags])

    @router.get("/{job_id}", responses={404: {"description": "unknown, or another tenant's"}})
    async def read_job(job: Annotated[Job[Any], Depends(found)]) -> JobView:
        """Read where the job stands, and its result."""
        with _refusals():
            return await jobs.read(job)

    @router.get("/{job_id}/events", response_class=EventSourceResponse)
    async def follow_job(job: Annotated[Job[Any], Depends(checked)]) -> AsyncIterator[ServerSentEvent]:
        """Follow the job: an event `state` for each change that is seen, `progress` on the way, `result` at its end."""
        async for told in jobs.follow(job):
            if told.name is not None:  # FastAPI gives signs of life by itself
                yield ServerSentEvent(event=told.name, raw_data=told.text, id=told.id, retry=told.retry)

    @router.delete("/{job_id}", responses={202: {"description": "it runs, and was asked to end"}})
    async def cancel_job(job: Annotated[Job[Any], Depends(found)], response: Response) -> JobView:
        """Cancel the job: a waiting one at once, a running one soon."""
        with _refusals():
            view, runs = await jobs.cancel(job)
        if runs:
            response.status_code = status.HTTP_202_ACCEPTED
        return view

    return router


def transaction(source: Any) -> Any:
    """Give a path operation a transaction that is committed before the response is sent, and rolled back by an exception.

    `session: Annotated[AsyncSession, transaction(sessions)]`, then `task.options(on=session).enqueue(…)`. `source` is an
    SQLAlchemy async_sessionmaker or AsyncEngine, a pool of psycopg_pool's or asyncpg's; for `def` operations and `enqueue_sync`
    a sessionmaker, an Engine, a ConnectionPool. Pools must be open. A commit that fails is the request's error.
    """
    return Depends(_dependency(source), scope="function")


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        raise HTTPException(refused.status, refused.detail, refused.headers) from None


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
