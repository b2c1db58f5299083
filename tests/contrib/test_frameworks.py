"""The routes in Starlette and in Litestar, by their own test clients: an application with its lifespan in a thread of its own.

FastAPI has tests of its own, test_fastapi.py; what is answered is the same code.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import litestar
import pytest
from litestar.exceptions import NotAuthorizedException
from litestar.testing import TestClient as LitestarClient
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient as StarletteClient

from aioqueue import AioQueue, JobContext
from aioqueue.contrib import litestar as on_litestar
from aioqueue.contrib import starlette as on_starlette
from aioqueue.job import new_job_id
from aioqueue.states import ProgressChanged
from tests.kit import PATIENCE, MakeApp

MINE, FOREIGN = {"x-tenant": "42"}, {"x-tenant": "43"}


def starlette_client(app: AioQueue, **options: Any) -> Any:
    async def enqueue(request: Request) -> JSONResponse:
        job = await app.get(request.path_params["task"]).options(tenant="42").enqueue()
        return JSONResponse(str(job.id))

    def tenant(request: Request) -> str | None:
        if "x-tenant" not in request.headers:
            raise HTTPException(401)
        return request.headers["x-tenant"] or None

    routes = [on_starlette.jobs_routes(app, auth=tenant, **options), Route("/{task}", enqueue, methods=["POST"])]
    return StarletteClient(Starlette(routes=routes, lifespan=on_starlette.lifespan(app)))


def litestar_client(app: AioQueue, **options: Any) -> Any:
    @litestar.post("/{task:str}")
    async def enqueue(request: litestar.Request[Any, Any, Any]) -> str:
        return str((await app.get(request.path_params["task"]).options(tenant="42").enqueue()).id)

    async def tenant(request: litestar.Request[Any, Any, Any]) -> str | None:
        if "x-tenant" not in request.headers:
            raise NotAuthorizedException
        return request.headers["x-tenant"] or None

    handlers: list[Any] = [on_litestar.jobs_router(app, auth=tenant, **options), enqueue]
    return LitestarClient(litestar.Litestar(handlers, lifespan=[on_litestar.lifespan(app)]))


@pytest.fixture(params=[starlette_client, litestar_client], ids=["starlette", "litestar"])
def client_of(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes the client of an application around the app; entered, it is open and has a worker."""
    found: Callable[..., Any] = request.param
    return found


@pytest.fixture
def app(make_app: MakeApp) -> AioQueue:
    app = make_app()

    @app.task(name="steps")
    async def steps(ctx: JobContext) -> str:
        async for _ in ctx.track(range(4)):
            pass
        await ctx.progress(0.5, "half")
        async for event in app.job(ctx.job_id).watch(PATIENCE):  # until a follower may have seen it
            if isinstance(event, ProgressChanged) and event.progress.message == "half":
                break
        return "done"

    @app.task(name="fail")
    async def fail(ctx: JobContext) -> None:
        raise ValueError("the password is 1234")

    @app.task(name="hang")
    async def hang(ctx: JobContext) -> None:
        while not ctx.should_stop:
            await ctx.progress(0.1)

    return app


def told(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name and data."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_a_job_is_read_and_followed_by_its_tenant_and_unknown_to_others(app: AioQueue, client_of: Callable[..., Any]) -> None:
    with client_of(app) as http:
        job_id = http.post("/steps").text.strip('"')
        stream = http.get(f"/jobs/{job_id}/events", headers=MINE)
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-store", "no")
        events = told(stream.text)
        assert events[-1] == (
            "result", {"state": "succeeded", "attempt": 1, "progress": None, "result": "done", "error": None},
        )  # fmt: skip
        assert {name for name, _ in events[:-1]} <= {"state", "progress"}
        assert "\nid: end\n" in stream.text
        assert http.get(f"/jobs/{job_id}/events", headers={**MINE, "last-event-id": "end"}).status_code == 204
        view = http.get(f"/jobs/{job_id}", headers=MINE).json()
        assert (view["id"], view["state"], view["result"], view["progress"]) == (job_id, "succeeded", "done", None)
        for path in ("", "/events"):
            answers = [http.get(f"/jobs/{each}{path}", headers=FOREIGN) for each in (job_id, new_job_id())]
            assert [answer.status_code for answer in answers] == [404, 404]
            assert answers[0].content == answers[1].content
            assert http.get(f"/jobs/{job_id}{path}").status_code == 401
        assert http.get("/jobs/no-id", headers=MINE).status_code == 404


def test_a_running_job_is_cancelled_soon(app: AioQueue, client_of: Callable[..., Any]) -> None:
    with client_of(app) as http:
        response = http.post("/hang")
        job_id = response.text.strip('"')
        while http.get(f"/jobs/{job_id}", headers=MINE).json()["progress"] is None:
            pass
        assert http.delete(f"/jobs/{job_id}", headers=FOREIGN).status_code == 404
        assert http.delete(f"/jobs/{job_id}", headers=MINE).status_code == 202
        assert told(http.get(f"/jobs/{job_id}/events", headers=MINE).text)[-1][1]["state"] == "cancelled"
        again = http.delete(f"/jobs/{job_id}", headers=MINE)
        assert (again.status_code, again.json()["state"]) == (200, "cancelled")


def test_errors_are_shown_only_if_they_may_be(app: AioQueue, client_of: Callable[..., Any]) -> None:
    for shown in (False, True):
        with client_of(app, show_errors=shown) as http:
            job_id = http.post("/fail").text.strip('"')
            assert http.delete(f"/jobs/{job_id}", headers=MINE).status_code in (200, 202)
            (_, end) = told(http.get(f"/jobs/{job_id}/events", headers=MINE).text)[-1]
            assert end["state"] == "cancelled"
            assert (end["error"] is not None) == shown
            assert (http.get(f"/jobs/{job_id}", headers=MINE).json()["error"] is not None) == shown


def test_whoever_forgets_to_return_the_tenant_shows_nothing(app: AioQueue, client_of: Callable[..., Any]) -> None:
    with client_of(app) as http:
        job_id = http.post("/fail").text.strip('"')
        try:
            status = http.get(f"/jobs/{job_id}", headers={"x-tenant": ""}).status_code
        except Exception as error:
            assert "EVERY_TENANT" in str(error)
        else:
            assert status == 500


@pytest.mark.parametrize("name", ["starlette", "litestar"])
def test_without_the_framework_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"aioqueue.contrib.{name}")
    for module in [each for each in sys.modules if each.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'aioqueue-pg\[{name}\]'"):
        importlib.import_module(f"aioqueue.contrib.{name}")
