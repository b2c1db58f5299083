"""Litestar: jobs by their id over HTTP, a worker beside the application.

What is answered stands in contrib/web.py; here it is routed and sent. Needs the extra `litestar`. No
`from __future__ import annotations` here: Litestar reads the annotations of functions inside functions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aioqueue.app import AioQueue

from .web import EVERY_TENANT, STREAM_HEADERS, STREAM_TYPE, Jobs, JobView, Refused, lifespan

try:
    from litestar import MediaType, Request, Response, Router, delete, get
    from litestar.exceptions import HTTPException
    from litestar.response import Stream
except ImportError as error:
    raise ImportError(
        f"aioqueue.contrib.litestar needs Litestar 2: pip install 'aioqueue-pg[litestar]' ({error})", name=error.name
    ) from error

__all__ = ["EVERY_TENANT", "JobView", "jobs_router", "lifespan"]


def jobs_router(
    app: AioQueue,
    *,
    auth: Callable[[Any], Any],
    path: str = "/jobs",
    show_errors: bool = False,
    tags: Sequence[str] = ("jobs",),
) -> Router:
    """Make the routes GET /jobs/{id}, GET /jobs/{id}/events (server-sent events) and DELETE /jobs/{id} (cancel).

    `Litestar(route_handlers=[jobs_router(app, auth=current_tenant)], lifespan=[lifespan(app)])`. `auth` takes the request, raises
    NotAuthorizedException, and returns the tenant whose jobs may be seen; a coroutine function is awaited. A job of another
    tenant is a 404, just as an unknown one. `show_errors`: see `aioqueue.contrib.fastapi.jobs_router`.
    """
    jobs = Jobs(app, show_errors=show_errors)

    @get("/{job_id:uuid}", media_type=MediaType.JSON)
    async def read_job(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Read where the job stands, and its result."""
        with _refusals():
            return _answer(await jobs.read(await jobs.find_for(request, auth)))

    @get("/{job_id:uuid}/events", media_type=STREAM_TYPE)
    async def follow_job(request: Request[Any, Any, Any]) -> Stream | Response[None]:
        """Follow the job: an event `state` for each change that is seen, `progress` on the way, `result` at its end."""
        with _refusals():
            job = await jobs.find_for(request, auth)
            if not await jobs.check(job, request.headers.get("last-event-id")):
                return Response(None, status_code=204)
        return Stream(jobs.stream(job), media_type=STREAM_TYPE, headers=STREAM_HEADERS)

    @delete("/{job_id:uuid}", status_code=200, media_type=MediaType.JSON)
    async def cancel_job(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Cancel the job: a waiting one at once, a running one soon."""
        with _refusals():
            view, runs = await jobs.cancel(await jobs.find_for(request, auth))
        return _answer(view, 202 if runs else 200)

    return Router(path, route_handlers=[read_job, follow_job, cancel_job], tags=[*tags])


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Refused as refused:
        raise HTTPException(detail=refused.detail, status_code=refused.status, headers=refused.headers) from None


def _answer(view: JobView, status: int = 200) -> Response[bytes]:
    return Response(view.model_dump_json().encode(), status_code=status, media_type=MediaType.JSON)
