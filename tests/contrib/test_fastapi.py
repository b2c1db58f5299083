"""The routes, and the request's transaction, on the application itself; tests/contrib/test_uvicorn.py has a real server."""

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any
from uuid import UUID

import asyncpg
import httpx
import psycopg
import pytest
import sqlalchemy
from fastapi import Depends, FastAPI, Header, HTTPException
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from aioqueue import AioQueue, ConfigurationError, Job, JobContext, ResultTimeout
from aioqueue.contrib.fastapi import EVERY_TENANT, jobs_router, lifespan, transaction
from aioqueue.contrib.web import Jobs, Told
from aioqueue.events import JobClaimed
from aioqueue.job import JobStatus, new_job_id
from aioqueue.states import ProgressChanged
from tests.kit import PATIENCE, MakeApp, Seen, passed
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Shop = AsyncConnection[Any]


def tenant(x_tenant: Annotated[str | None, Header()] = None) -> str:
    """As an application would know its user; here the client says it."""
    if x_tenant is None:
        raise HTTPException(401)
    return x_tenant


@asynccontextmanager
async def client(web: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(web), base_url="http://web", timeout=PATIENCE) as opened:
        yield opened


def web_of(app: AioQueue, **options: Any) -> FastAPI:
    web = FastAPI()
    web.include_router(jobs_router(app, auth=tenant, **options))
    return web


# -- the request's transaction ----------------------------------------------------------------------------------------


def alchemy(dsn: str, driver: str) -> sqlalchemy.URL:
    return sqlalchemy.make_url(dsn).set(drivername=f"postgresql+{driver}")


@asynccontextmanager
async def awaited_engine(dsn: str, driver: str = "asyncpg") -> AsyncIterator[Any]:
    engine = create_async_engine(alchemy(dsn, driver))
    yield engine
    await engine.dispose()


@asynccontextmanager
async def awaited_sessions(dsn: str, driver: str = "asyncpg") -> AsyncIterator[Any]:
    async with awaited_engine(dsn, driver) as engine:
        yield async_sessionmaker(engine)


@asynccontextmanager
async def awaited_sessions_on_psycopg(dsn: str) -> AsyncIterator[Any]:
    async with awaited_sessions(dsn, "psycopg") as sessions:
        yield sessions


@asynccontextmanager
async def psycopg_pool(dsn: str) -> AsyncIterator[Any]:
    async with AsyncConnectionPool(dsn, min_size=1, open=False) as pool:
        yield pool


@asynccontextmanager
async def psycopg_pool_in_autocommit(dsn: str) -> AsyncIterator[Any]:
    async with AsyncConnectionPool(dsn, min_size=1, open=False, kwargs={"autocommit": True}) as pool:
        yield pool


@asynccontextmanager
async def asyncpg_pool(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(dsn, min_size=1) as pool:
        yield pool


@asynccontextmanager
async def blocking_engine(dsn: str) -> AsyncIterator[Any]:
    engine = sqlalchemy.create_engine(alchemy(dsn, "psycopg"))
    yield engine
    engine.dispose()


@asynccontextmanager
async def blocking_sessions(dsn: str) -> AsyncIterator[Any]:
    async with blocking_engine(dsn) as engine:
        yield sessionmaker(engine)


@asynccontextmanager
async def blocking_pool(dsn: str) -> AsyncIterator[Any]:
    with ConnectionPool(dsn, min_size=1, open=False) as pool:
        yield pool


Source = Callable[[str], AbstractAsyncContextManager[Any]]
AWAITED: list[Source] = [
    awaited_sessions, awaited_sessions_on_psycopg, awaited_engine, psycopg_pool, psycopg_pool_in_autocommit,
    asyncpg_pool,
]  # fmt: skip
BLOCKING: list[Source] = [blocking_sessions, blocking_engine, blocking_pool]


@pytest.fixture(params=[*AWAITED, *BLOCKING], ids=lambda source: source.__name__)
async def shop_web(request: pytest.FixtureRequest, client_dsn: str, app: AioQueue) -> AsyncIterator[FastAPI]:
    """An application that writes an order and enqueues its job in the request's transaction."""
    web = FastAPI()
    add = app.get("add")
    async with request.param(client_dsn) as source:
        held = transaction(source)

        async def place(n: int, on: Annotated[Any, held], fails: str = "") -> dict[str, UUID]:
            statement = f"INSERT INTO shop.orders (n) VALUES ({n})"
            await on.execute(sqlalchemy.text(statement) if "sqlalchemy" in type(on).__module__ else statement)
            job = await add.options(on=on).enqueue(n)
            check(fails)
            return {"job": job.id}

        def place_blocking(n: int, on: Annotated[Any, held], fails: str = "") -> dict[str, UUID]:
            statement = f"INSERT INTO shop.orders (n) VALUES ({n})"
            on.execute(sqlalchemy.text(statement) if "sqlalchemy" in type(on).__module__ else statement)
            job = add.options(on=on).enqueue_sync(n)
            check(fails)
            return {"job": job.id}

        web.post("/orders/{n}", status_code=202)(place_blocking if request.param in BLOCKING else place)
        yield web


def check(fails: str) -> None:
    if fails == "http":
        raise HTTPException(409, "no")
    if fails:
        raise ZeroDivisionError


async def both(boss: Session) -> tuple[list[Any], list[Any]]:
    orders = await boss.rows("SELECT n FROM shop.orders ORDER BY n")
    jobs = await boss.rows("SELECT (payload ->> 'a')::int FROM aioqueue.job ORDER BY 1")
    return [n for (n,) in orders], [n for (n,) in jobs]


async def test_it_is_committed_before_the_response(shop_web: FastAPI, shop: Shop, boss: Session) -> None:
    there: list[tuple[list[Any], list[Any]]] = []

    async def looking(scope: Any, receive: Any, send: Any) -> None:
        async def look_and_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                there.append(await both(boss))
            await send(message)

        await shop_web(scope, receive, look_and_send)

    async with client(looking) as http:
        response = await http.post("/orders/1")
    assert response.status_code == 202
    assert there == [([1], [1])]


async def test_an_exception_rolls_it_back(shop_web: FastAPI, shop: Shop, boss: Session) -> None:
    async with client(shop_web) as http:
        assert (await http.post("/orders/1", params={"fails": "http"})).status_code == 409
        with pytest.raises(ZeroDivisionError):
            await http.post("/orders/1", params={"fails": "badly"})
    assert await both(boss) == ([], [])


async def test_a_commit_that_fails_is_the_requests_error(shop_web: FastAPI, shop: Shop, boss: Session) -> None:
    await shop.execute(
        "CREATE FUNCTION shop.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$;"
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON shop.orders DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION shop.refuse()"
    )
    async with client(shop_web) as http:
        with pytest.raises(Exception, match="not today"):
            await http.post("/orders/1")
    assert await both(boss) == ([], [])


def test_of_what_there_can_be_no_transaction() -> None:
    for wrong in (None, psycopg, lambda: None):
        with pytest.raises(ConfigurationError, match="transaction: expected an SQLAlchemy async_sessionmaker"):
            transaction(wrong)


# -- jobs by their id -------------------------------------------------------------------------------------------------


async def test_a_job_is_read_by_its_tenant(app: AioQueue) -> None:
    job = await app.get("add").options(tenant="42", queue="q", priority=1).enqueue(1)
    async with client(web_of(app)) as http:
        response = await http.get(f"/jobs/{job.id}", headers={"x-tenant": "42"})
        assert response.status_code == 200
        view = response.json()
        assert {**view, "created_at": None} == {
            "id": str(job.id), "task": "add", "queue": "q", "state": "ready", "attempt": 0, "max_attempts": 5, "created_at": None,
            "run_at": None, "started_at": None, "finished_at": None, "progress": None, "result": None, "error": None,
        }  # fmt: skip
        async with app.worker(queues=["q"]):
            await job.result(30)
        view = (await http.get(f"/jobs/{job.id}", headers={"x-tenant": "42"})).json()
        assert (view["state"], view["attempt"], view["result"]) == ("succeeded", 1, 2)


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/events"), ("DELETE", "")])
async def test_another_tenants_job_is_as_an_unknown_one(app: AioQueue, method: str, path: str) -> None:
    job = await app.get("add").options(tenant="42").enqueue(1)
    async with client(web_of(app)) as http:
        answers = [
            await http.request(method, f"/jobs/{job_id}{path}", headers={"x-tenant": "43"}) for job_id in (job.id, new_job_id())
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].content == answers[1].content
        assert (await http.request(method, f"/jobs/{job.id}{path}")).status_code == 401
        assert (await http.request(method, "/jobs/no-id")).status_code == 401
        assert (await http.request(method, "/jobs/no-id", headers={"x-tenant": "43"})).status_code == 422
    assert (await job.status()).state == "ready"


async def test_a_job_that_is_not_committed_yet_is_unknown(app: AioQueue, shop: Shop) -> None:
    async with client(web_of(app)) as http, shop.transaction():
        job = await app.get("add").options(tenant="42", on=shop).enqueue(1)
        for path in ("", "/events"):
            assert (await http.get(f"/jobs/{job.id}{path}", headers={"x-tenant": "42"})).status_code == 404


AWAY = [PoolTimeout("for the test"), ResultTimeout(new_job_id(), 1, None), psycopg.OperationalError("the connection is lost")]


@pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
async def test_a_database_that_does_not_answer_in_time_is_to_be_asked_again(
    app: AioQueue, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    job = await app.get("add").options(tenant="42").enqueue(1)

    async def job_status(job: Job[Any]) -> JobStatus:
        raise error

    monkeypatch.setattr(app, "job_status", job_status)
    async with client(web_of(app)) as http:
        for path in ("", "/events"):
            refused = await http.get(f"/jobs/{job.id}{path}", headers={"x-tenant": "42"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_statement_that_the_database_refuses_is_the_applications_error(
    app: AioQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await app.get("add").options(tenant="42").enqueue(1)

    async def job_status(job: Job[Any]) -> JobStatus:
        raise psycopg.errors.InsufficientPrivilege("for the test")

    monkeypatch.setattr(app, "job_status", job_status)
    async with client(web_of(app)) as http:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await http.get(f"/jobs/{job.id}", headers={"x-tenant": "42"})


async def test_whoever_forgets_to_return_the_tenant_shows_nothing(app: AioQueue) -> None:
    job = await app.get("add").enqueue(1)
    web = FastAPI()
    web.include_router(jobs_router(app, auth=lambda: None))
    web.include_router(jobs_router(app, auth=lambda: EVERY_TENANT, prefix="/all"))
    async with client(web) as http:
        with pytest.raises(ConfigurationError, match="EVERY_TENANT"):
            await http.get(f"/jobs/{job.id}")
        assert (await http.get(f"/all/{job.id}")).json()["state"] == "ready"


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_what_auth_takes_for_the_function_alone_is_given_back_before_the_stream_begins(app: AioQueue, ends: str) -> None:
    """By FastAPI's default it would be kept to the stream's end, as docs/fastapi.md says."""
    order: list[str] = []

    async def session() -> AsyncIterator[str]:
        yield "42"
        order.append("given back")

    scope: Any = "function" if ends == "before" else "request"

    async def tenant_in_session(name: Annotated[str, Depends(session, scope=scope)]) -> str:
        return name

    web = FastAPI()
    web.include_router(jobs_router(app, auth=tenant_in_session))
    job = await app.get("add").options(tenant="42", delay=60).enqueue(1)
    await job.cancel()
    follow = Jobs.follow

    async def noted(self: Jobs, job: Job[Any]) -> AsyncIterator[Told]:
        async for told in follow(self, job):
            order.append(str(told.name))
            yield told

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Jobs, "follow", noted)
        async with client(web) as http:
            await http.get(f"/jobs/{job.id}/events")
    assert order == (["given back", "result"] if ends == "before" else ["result", "given back"])


async def test_why_a_job_is_dead_is_shown_only_if_it_may_be(app: AioQueue) -> None:
    @app.task(name="fail")
    async def fail() -> None:
        raise ValueError("the password is 1234")

    job = await app.get("fail").options(tenant="42", max_attempts=1).enqueue()
    cancelled = await app.get("fail").options(tenant="42", delay=60).enqueue()
    await cancelled.cancel()
    async with app.worker():
        with pytest.raises(Exception, match="1234"):
            await job.result(30)
    seen = []
    for web in (web_of(app), web_of(app, show_errors=True)):
        async with client(web) as http:
            for each in (job, cancelled):
                view = (await http.get(f"/jobs/{each.id}", headers={"x-tenant": "42"})).json()
                seen.append((view["state"], view["error"]))
    assert seen == [
        ("dead", None), ("cancelled", None),
        ("dead", "ValueError: the password is 1234"), ("cancelled", "cancelled before it ran"),
    ]  # fmt: skip


async def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_soon(app: AioQueue, seen: Seen) -> None:
    @app.task(name="wait")
    async def wait(ctx: JobContext) -> None:
        await asyncio.Event().wait()

    async with client(web_of(app)) as http:
        job = await app.get("wait").options(tenant="42").enqueue()
        response = await http.delete(f"/jobs/{job.id}", headers={"x-tenant": "42"})
        assert (response.status_code, response.json()["state"]) == (200, "cancelled")
        async with app.worker():
            job = await app.get("wait").options(tenant="42").enqueue()
            await seen.wait(JobClaimed, job_id=job.id)
            response = await http.delete(f"/jobs/{job.id}", headers={"x-tenant": "42"})
            assert response.status_code == 202
            with pytest.raises(Exception, match="was cancelled"):
                await job.result(30)
        assert (await http.delete(f"/jobs/{job.id}", headers={"x-tenant": "42"})).json()["state"] == "cancelled"


def first_chunk_of(web: Any) -> tuple[Any, asyncio.Event]:
    """The application, and what is set once a response of it has begun to arrive."""
    begun = asyncio.Event()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def note_and_send(message: Any) -> None:
            await send(message)
            if message.get("body"):
                begun.set()

        await web(scope, receive, note_and_send)

    return watched, begun


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name and data."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def test_a_job_is_followed_to_its_end(app: AioQueue, seen: Seen) -> None:
    inside, goes_on = asyncio.Event(), asyncio.Event()

    @app.task(name="slow")
    async def slow(ctx: JobContext) -> str:
        await ctx.progress(0.4, "page 4 of 10")
        async for event in app.job(ctx.job_id).watch():
            if isinstance(event, ProgressChanged):
                break
        inside.set()
        await goes_on.wait()
        return "done"

    job = await app.get("slow").options(tenant="42").enqueue()
    web, begun = first_chunk_of(web_of(app))
    async with client(web) as http:
        headers = {"x-tenant": "42"}
        following = asyncio.create_task(http.get(f"/jobs/{job.id}/events", headers=headers))
        await passed(begun)
        async with app.worker():
            await passed(inside)
            goes_on.set()
            response = await following
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "no-store" in response.headers["cache-control"]
        assert response.headers["x-accel-buffering"].startswith("no")
        found = events(response.text)
        assert found == [
            ("state", {"state": "ready", "attempt": 0, "progress": None, "result": None, "error": None}),
            ("state", {"state": "running", "attempt": 1, "progress": None, "result": None, "error": None}),
            ("progress", {"state": "running", "attempt": 1, "progress": {"value": 0.4, "message": "page 4 of 10"},
                          "result": None, "error": None}),
            ("result", {"state": "succeeded", "attempt": 1, "progress": None, "result": "done", "error": None}),
        ]  # fmt: skip
        assert "\nretry: 2000\n" in response.text
        assert "\nid: end\n" in response.text
        # Who comes too late has all in one event; a browser that comes back after the end is told to stay away.
        late = await http.get(f"/jobs/{job.id}/events", headers=headers)
        assert [name for name, _ in events(late.text)] == ["result"]
        again = await http.get(f"/jobs/{job.id}/events", headers={**headers, "last-event-id": "end"})
        assert (again.status_code, again.content) == (204, b"")


def test_the_routes_are_described(make_app: MakeApp) -> None:
    paths = web_of(make_app(), prefix="/tasks").openapi()["paths"]
    assert {path: set(methods) for path, methods in paths.items()} == {
        "/tasks/{job_id}": {"get", "delete"}, "/tasks/{job_id}/events": {"get"},
    }  # fmt: skip


async def test_followers_of_a_closing_app_are_let_go(make_app: MakeApp) -> None:
    app = make_app()
    await app.open()
    job = await app.get("add").options(tenant="42").enqueue(1)
    web, begun = first_chunk_of(web_of(app))
    async with client(web) as http:
        following = asyncio.create_task(http.get(f"/jobs/{job.id}/events", headers={"x-tenant": "42"}))
        await passed(begun)
        await app.close()
        async with asyncio.timeout(PATIENCE):
            response = await following
    assert [name for name, _ in events(response.text)] == ["state"]


async def test_the_lifespan_opens_the_app_and_runs_a_worker(make_app: MakeApp) -> None:
    app = make_app()
    async with lifespan(app, concurrency=1)(None):
        assert await (await app.get("add").enqueue(1)).result(30) == 2
    assert not app.is_open


async def test_a_lifespan_with_wrong_queues_is_refused_before_the_app_is_open(make_app: MakeApp) -> None:
    app = make_app()
    with pytest.raises(ConfigurationError, match="expected a sequence of names"):
        await lifespan(app, queues="ab")(None).__aenter__()
    assert not app.is_open


def test_without_fastapi_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aioqueue.contrib.fastapi")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ImportError, match=r"pip install 'aioqueue-pg\[fastapi\]'"):
        importlib.import_module("aioqueue.contrib.fastapi")


async def test_a_lifespan_that_fails_ends_the_worker(make_app: MakeApp, boss: Session) -> None:
    app = make_app()
    with contextlib.suppress(ZeroDivisionError):
        async with lifespan(app)(None):
            raise ZeroDivisionError
    assert not app.is_open
    assert await boss.value("SELECT count(*) FROM aioqueue.worker WHERE NOT dead") == 0
