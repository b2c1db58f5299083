"""Starlette without FastAPI: jobs by their id over HTTP, a worker beside the application.

What is answered stands in contrib/web.py; here it is routed and sent. Needs the extra `starlette`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aioqueue.app import AioQueue

from .web import EVERY_TENANT, STREAM_HEADERS, STREAM_TYPE, Jobs, JobView, Refused, lifespan

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Mount, Route
except ImportError as error:
    raise ImportError(
        f"aioqueue.contrib.starlette needs Starlette: pip install 'aioqueue-pg[starlette]' ({error})", name=error.name
    ) from error

__all__ = ["EVERY_TENANT", "JobView", "jobs_routes", "lifespan"]


def jobs_routes(app: AioQueue, *, auth: Callable[[Request], Any], prefix: str = "/jobs", show_errors: bool = False) -> Mount:
    """Make the routes GET /jobs/{id}, GET /jobs/{id}/events (server-sent events) and DELETE /jobs/{id} (cancel).

    `Starlette(routes=[jobs_routes(app, auth=current_tenant)])`. `auth` takes the request, raises HTTPException, and returns the
    tenant whose jobs may be seen; a coroutine function is awaited. A job of another tenant is a 404, just as an unknown one.
    `show_errors`: see `aioqueue.contrib.fastapi.jobs_router`.
    """
    jobs = Jobs(app, show_errors=show_errors)

    async def read_job(request: Request) -> Response:
        return _answer(await jobs.read(await jobs.find_for(request, auth)))

    async def follow_job(request: Request) -> Response:
        job = await jobs.find_for(request, auth)
        if not await jobs.check(job, request.headers.get("last-event-id")):
            return Response(status_code=204)
        return StreamingResponse(jobs.stream(job), media_type=STREAM_TYPE, headers=STREAM_HEADERS)

    async def cancel_job(request: Request) -> Response:
        view, runs = await jobs.cancel(await jobs.find_for(request, auth))
        return _answer(view, 202 if runs else 200)

    return Mount(
        prefix,
        routes=[
            Route("/{job_id:uuid}", _refusing(read_job), methods=["GET"]),
            Route("/{job_id:uuid}/events", _refusing(follow_job), methods=["GET"]),
            Route("/{job_id:uuid}", _refusing(cancel_job), methods=["DELETE"]),
        ],
    )


def _refusing(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Refused as refused:
            raise HTTPException(refused.status, refused.detail, refused.headers) from None

    return answered


def _answer(view: JobView, status: int = 200) -> Response:
    return Response(view.model_dump_json(), status, media_type="application/json")
