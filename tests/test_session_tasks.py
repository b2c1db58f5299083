"""JobSession: what is refused where it is given, a worker's start, jobs and tenants inside a job's session, whole workers."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import sqlalchemy
import sqlmodel
import sqlmodel.ext.asyncio.session
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session as SyncSession
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from aioqueue import (
    AioQueue,
    ConfigurationError,
    JobContext,
    JobState,
    NotCommitted,
    Retry,
    TaskDefinitionError,
    TenantSettings,
    TransactionViolation,
)
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.errors import UnsafeDatabase
from aioqueue.outcome import Failed, Reason
from tests.kit import Bench, bench
from tests.postgres import Database
from tests.session_kit import DRIVERS, Note, add_probe, assert_clean, make_engine, write
from tests.shop import notes
from tests.sql.engine import Session
from tests.test_identity import SEEN, clerk, user_of

pytestmark = pytest.mark.anyio

__all__ = ["clerk"]

Factory = async_sessionmaker[AsyncSession]


@pytest.fixture(params=DRIVERS)
async def engine(request: pytest.FixtureRequest, worker_dsn: str) -> AsyncIterator[AsyncEngine]:
    made = make_engine(worker_dsn, request.param)
    yield made
    await made.dispose()


@pytest.fixture
def factory(engine: AsyncEngine) -> Factory:
    return async_sessionmaker(engine)


@pytest.fixture
async def at(shop: Session, worker_dsn: str, factory: Factory) -> AsyncIterator[Bench]:
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema, session=factory), session=factory) as made:
        yield made


# -- what is refused where it is given -------------------------------------------------------------------------------------

URL = "postgresql+psycopg://nowhere/nothing"

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a blocking factory": (sessionmaker, "expected SQLAlchemy's async_sessionmaker, got sessionmaker"),
    "an engine": (lambda: create_async_engine(URL), "got AsyncEngine"),
    "a session": (lambda: AsyncSession(create_async_engine(URL)), "got AsyncSession"),
    "a class": (lambda: AsyncSession, "got the class AsyncSession"),
    "a blocking engine": (lambda: async_sessionmaker(sqlalchemy.create_engine(URL)), "bound to an AsyncEngine, got Engine"),  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    "another database": (lambda: async_sessionmaker(create_async_engine("sqlite+aiosqlite://")), "postgresql"),
    "AUTOCOMMIT": (lambda: async_sessionmaker(create_async_engine(URL, isolation_level="AUTOCOMMIT")), "AUTOCOMMIT"),
    "AUTOCOMMIT by option": (
        lambda: async_sessionmaker(create_async_engine(URL).execution_options(isolation_level="AUTOCOMMIT")),
        "AUTOCOMMIT",
    ),
    "binds": (lambda: async_sessionmaker(create_async_engine(URL), binds={Note: create_async_engine(URL)}), "binds="),
    "two phases": (lambda: async_sessionmaker(create_async_engine(URL), twophase=True), "twophase"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_makes_no_sessions_is_refused_where_it_is_given(name: str) -> None:
    make, said = REFUSED[name]
    try:
        given = make()
    except ImportError:
        pytest.skip("the driver is not installed")
    with pytest.raises(ConfigurationError, match=f"^session: .*{said}"):
        AioQueue(session=given)


async def test_an_engine_may_be_given_to_the_factory_later() -> None:
    factory = async_sessionmaker()
    assert AioQueue(session=factory).settings.session is factory
    engine = create_async_engine(URL, isolation_level="AUTOCOMMIT")
    AioQueue(session=async_sessionmaker(engine.execution_options(isolation_level="READ COMMITTED")))


async def test_a_task_that_takes_a_session_is_refused_by_an_app_without_a_factory() -> None:
    async def work(session: JobSession) -> None: ...

    with pytest.raises(TaskDefinitionError, match=r"AioQueue\(session=async_sessionmaker"):
        AioQueue().task(work)


class Own(AsyncSession):
    pass


class OwnJobSession(JobSession, Own):
    pass


async def test_the_first_parameter_is_a_job_session_and_no_other(factory: Factory) -> None:
    app = AioQueue(session=factory)

    async def awaited(session: AsyncSession, n: int) -> None: ...
    async def blocking(session: SyncSession) -> None: ...
    async def own(session: Own) -> None: ...
    async def models(session: sqlmodel.ext.asyncio.session.AsyncSession) -> None: ...
    async def second(n: int, session: JobSession) -> None: ...
    async def union(session: JobSession | None) -> None: ...
    async def keyword(*, session: JobSession) -> None: ...
    def in_thread(session: JobSession) -> None: ...

    sessions: tuple[Callable[..., Any], ...] = (awaited, blocking, own, models)
    for fn in sessions:
        with pytest.raises(TaskDefinitionError, match=r"from aioqueue\.contrib\.sqlalchemy import JobSession"):
            app.task(fn)
    elsewhere: tuple[Callable[..., Any], ...] = (second, union, keyword)
    for fn in elsewhere:
        with pytest.raises(TaskDefinitionError, match="first parameter"):
            app.task(fn)
    with pytest.raises(TaskDefinitionError, match="async def"):
        app.task(in_thread)

    async def generic(session: JobSession[int], n: int) -> None: ...
    async def subclass(session: OwnJobSession, n: int) -> None: ...

    assert app.task(generic).definition.session is JobSession
    assert app.task(subclass).definition.session is OwnJobSession


async def test_aioqueue_imports_no_sqlalchemy() -> None:
    program = "import sys, aioqueue.cli.main, aioqueue.contrib; sys.exit(any(n.startswith('sqlalchemy') for n in sys.modules))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0


# -- a worker's start --------------------------------------------------------------------------------------------------------


async def start(app: AioQueue) -> None:
    async def work(session: JobSession) -> None: ...

    app.task(name="work")(work)
    async with app, app.worker():
        pass


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_worker_does_not_start_with_an_engine_that_cannot_do_it(
    worker_dsn: str, client_dsn: str, schema: str, driver: str, database: Database, fresh_database: Callable[[], Database]
) -> None:
    elsewhere = fresh_database()
    for dsn, said in ((client_dsn, "--grants aioqueue_client"), (elsewhere.dsn("superuser"), "another database")):
        engine = make_engine(dsn, driver)
        with pytest.raises(ConfigurationError, match=said):
            await start(AioQueue(worker_dsn, schema=schema, session=async_sessionmaker(engine)))
        await engine.dispose()
    with pytest.raises(ConfigurationError, match="bound to an AsyncEngine, got none"):
        await start(AioQueue(worker_dsn, schema=schema, session=async_sessionmaker()))
    boss = make_engine(database.dsn("superuser"), driver)
    strict = TenantSettings(strict_rls=True)
    with pytest.raises(UnsafeDatabase, match="is a superuser"):
        await start(AioQueue(worker_dsn, schema=schema, session=async_sessionmaker(boss), tenants=strict))
    await boss.dispose()


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"pool_size": 3, "max_overflow": 4}, 7),
        ({"pool_size": 3, "max_overflow": -1}, 20),
        ({"pool_size": 0}, 20),
        ({"poolclass": NullPool}, 20),
    ],
    ids=["bounded", "overflow without end", "size without end", "none"],
)
async def test_a_worker_says_what_its_engine_takes_of_the_servers_connections(
    worker_dsn: str, shop: Session, options: dict[str, Any], more: int
) -> None:
    """A pool without bounds opens no more for jobs than run at once; an app whose tasks take no session opens none for them."""
    url = sqlalchemy.make_url(worker_dsn).set(drivername="postgresql+psycopg")
    engine = create_async_engine(url, **options)
    factory = async_sessionmaker(engine)

    async def said(app: AioQueue) -> int:
        async with app, app.worker(concurrency=20) as worker:
            found: int = await shop.value("SELECT connections FROM aioqueue.worker WHERE id = %s", worker.id)
            return found

    app = AioQueue(worker_dsn, schema=shop.store.schema, session=factory)
    before = await said(app)

    @app.task(name="takes")
    async def takes(session: JobSession) -> None: ...

    assert await said(app) == before + more
    async with app, app.worker():
        await (await takes.enqueue()).result(30)
    await engine.dispose()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_autocommit_that_is_seen_on_the_connection_only_fails_the_job(worker_dsn: str, shop: Session, driver: str) -> None:
    engine = make_engine(worker_dsn, driver)

    @event.listens_for(engine.sync_engine, "engine_connect")
    def autocommit(conn: sqlalchemy.Connection) -> None:
        conn.execution_options(isolation_level="AUTOCOMMIT")

    factory = async_sessionmaker(engine)
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema, session=factory), session=factory) as at:

        async def work(session: JobSession) -> None:
            raise AssertionError

        at.tasks.task(name="work")(work)
        outcome = await at.run("work")
    await engine.dispose()
    assert isinstance(outcome, Failed) and "AUTOCOMMIT" in outcome.error.message


# -- jobs inside a job -----------------------------------------------------------------------------------------------------


async def test_jobs_enqueued_inside_join_the_transaction_and_the_tenant_and_hints_follow(
    worker_dsn: str, shop: Session, factory: Factory
) -> None:
    app = AioQueue(worker_dsn, schema=shop.store.schema, session=factory)
    seen: list[Any] = []

    @app.task(name="child")
    async def child(n: int) -> None: ...

    @app.task(name="parent", retry=Retry(max_attempts=1))
    async def parent(session: JobSession, fails: bool) -> None:
        session.add(Note(body="parent"))
        job = await child.enqueue(1)
        await child.options(on=session).enqueue(2)
        await app.enqueue_by_name("child", {"n": 3})
        await child.options(on=app).enqueue(4)
        await child.options(tenant="b").enqueue(5)
        seen.append(await shop.value("SELECT count(*) FROM aioqueue.job WHERE task = 'child'"))
        with pytest.raises(NotCommitted):
            await job.result(timeout=5)
        if fails:
            raise ValueError

    rows = "SELECT (payload ->> 'n')::int, tenant FROM aioqueue.job WHERE task = 'child' ORDER BY 1"
    async with bench(worker_dsn, shop, app, session=factory) as at, app:
        assert isinstance(await at.run("parent", '{"fails": true}', tenant="a"), Failed)
        assert at.hints == []
        assert await shop.rows(rows) == [(4, "")] or await shop.rows(rows) == [(4, None)]
        await shop.rows("DELETE FROM aioqueue.live WHERE worker IS NULL")
        assert await at.run("parent", '{"fails": false}', tenant="a") is None, at.outcomes
        assert at.hints == ["ready"]
        found = await shop.rows(rows)
        assert [row for row in found if row[0] != 4] == [(1, "a"), (2, "a"), (3, "a"), (5, "b")]
    assert seen == [1, 2]
    assert await notes(shop) == [("a", "parent")]


async def test_hints_follow_a_commit_that_cancelled(worker_dsn: str, shop: Session, factory: Factory) -> None:
    app = AioQueue(worker_dsn, schema=shop.store.schema, session=factory)

    @app.task(name="child")
    async def child() -> None: ...

    @app.task(name="parent")
    async def parent(session: JobSession, job_id: str) -> None:
        await app.job(job_id).cancel()

    async with bench(worker_dsn, shop, app, session=factory) as at, app:
        job = await child.options(delay=3600).enqueue()
        assert await at.run("parent", f'{{"job_id": "{job.id}"}}') is None, at.outcomes
        assert sorted(at.hints) == ["done", "ready"]
        assert (await job.status()).state is JobState.CANCELLED


# -- other tenants inside ------------------------------------------------------------------------------------------------


async def test_a_block_is_the_other_tenants_and_what_comes_after_it_the_job_s_own(
    at: Bench, shop: Session, engine: AsyncEngine
) -> None:
    names: list[Any] = []
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        session.add(Note(body="before"))
        async with session.tenant("b"):
            session.add(Note(body="inside"))
            names.append((session.tenant, [note.tenant for note in await session.scalars(select(Note))]))
            async with session.tenant("c"):
                session.add(Note(body="deeper"))
            session.add(Note(body="inside again"))
        names.append((session.tenant, [note.tenant for note in await session.scalars(select(Note))]))
        session.add(Note(body="after"))

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert names == [("b", ["b"]), ("a", ["a"])]
    assert await notes(shop) == [("a", "before"), ("b", "inside"), ("c", "deeper"), ("b", "inside again"), ("a", "after")]
    await assert_clean(at, found, engine)


async def test_what_was_loaded_for_one_tenant_is_not_found_by_another(at: Bench, shop: Session) -> None:
    """The identity map would give it without asking the server."""
    await shop.rows("INSERT INTO shop.note (tenant, body) VALUES ('a', 'mine'), ('b', 'theirs')")
    mine, theirs = [row[0] for row in await shop.rows("SELECT id FROM shop.note ORDER BY id")]

    async def work(session: JobSession) -> None:
        note = await session.get_one(Note, mine)
        async with session.tenant("b"):
            assert await session.get(Note, mine) is None
            other = await session.get_one(Note, theirs)
            other.body = "changed for b"
        assert await session.get(Note, theirs) is None
        assert await session.get(Note, mine) is note
        note.body = "changed for a"
        with pytest.raises(ZeroDivisionError):
            async with session.tenant("b"):
                (await session.get_one(Note, theirs)).body = "rolled back"
                raise ZeroDivisionError
        assert note in session and note.body == "changed for a"

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert sorted(await notes(shop)) == [("a", "changed for a"), ("b", "changed for b")]


async def test_an_error_in_a_block_rolls_it_back_and_restores_the_tenant(at: Bench, shop: Session) -> None:
    async def work(session: JobSession) -> None:
        with pytest.raises(DBAPIError):
            async with session.tenant("b"), session.tenant("c"):
                session.add(Note(body="gone"))
                await session.execute(text("SELECT 1 / 0"))
        assert session.tenant == "a"
        session.add(Note(body="kept"))

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert await notes(shop) == [("a", "kept")]


@pytest.mark.parametrize("where", ["before", "inside"])
@pytest.mark.parametrize("statement", ["SET app.tenant = 'c'", "SET ROLE aioqueue_worker", "SET LOCAL app.tenant = 'x'"])
async def test_a_block_hides_no_breach(at: Bench, shop: Session, engine: AsyncEngine, statement: str, where: str) -> None:
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        with contextlib.suppress(TransactionViolation):
            if where == "before":
                await session.execute(text(statement))
            async with session.tenant("b"):
                await session.execute(text(statement))
        with contextlib.suppress(Exception):
            await write(session, "after")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert await notes(shop) == []
    await assert_clean(at, found, engine)


async def test_no_other_task_of_the_job_sends_anything_meanwhile(at: Bench, shop: Session) -> None:
    async def work(session: JobSession) -> None:
        async def other() -> None:
            with contextlib.suppress(TransactionViolation):
                await write(session, "for whom?")

        inside, done = asyncio.Event(), asyncio.Event()

        async def beside() -> None:
            await inside.wait()
            await other()
            done.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(beside())
            await asyncio.sleep(0)
            async with session.tenant("b"):
                inside.set()
                await done.wait()

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed), outcome
    assert await notes(shop) == []


async def test_settings_and_role_are_those_of_tenant_settings(
    shop: Session, worker_dsn: str, clerk: str, factory: Factory, engine: AsyncEngine
) -> None:
    seen: list[Any] = []

    async def work(session: JobSession) -> None:
        async with session.tenant("b"):
            seen.append(tuple((await session.execute(text(SEEN))).one()))
        seen.append(tuple((await session.execute(text(SEEN))).one()))

    async def breaks(session: JobSession) -> None:
        await session.execute(text("RESET ROLE"))

    tenants = TenantSettings(values=user_of, role=lambda facts: clerk if facts.tenant == "a" else None)
    app = AioQueue(schema=shop.store.schema, session=factory)
    app.task(name="work")(work)
    app.task(name="breaks")(breaks)
    async with bench(worker_dsn, shop, app, tenants=tenants, session=factory) as at:
        assert await at.run("work", tenant="a") is None, at.outcomes
        outcome = await at.run("breaks", tenant="a")
    assert isinstance(outcome, Failed) and "SET ROLE" in outcome.error.message
    assert seen == [("b", "account of b", "1", "aioqueue_worker"), ("a", "account of a", "1", clerk)]
    async with engine.connect() as conn:
        assert await conn.scalar(text("SELECT current_user")) == "aioqueue_worker"


# -- whole workers -------------------------------------------------------------------------------------------------------


class Models(JobSession, sqlmodel.ext.asyncio.session.AsyncSession):
    """As SQLModel's users write it."""


async def test_a_worker_runs_tasks_of_every_kind_beside_the_application(
    worker_dsn: str, schema: str, shop: Session, engine: AsyncEngine
) -> None:
    factory = async_sessionmaker(engine, class_=sqlmodel.ext.asyncio.session.AsyncSession, expire_on_commit=False)
    app = AioQueue(worker_dsn, schema=schema, session=factory)

    @app.task(name="child")
    async def child(session: Models, body: str) -> int:
        note = Note(body=body)
        session.add(note)
        await session.flush()
        return note.id

    @app.task(name="parent")
    async def parent(session: Models, number: int) -> list[str]:
        for n in range(number):
            await child.enqueue(f"note {n}")
        return list(await session.exec(sqlmodel.select(Note.body)))

    @app.task(name="plain")
    async def plain(session: JobSession) -> bool:
        return isinstance(session, sqlmodel.ext.asyncio.session.AsyncSession)

    @app.task(name="other")
    async def other(ctx: JobContext) -> str:
        return ctx.task

    async with app, app.worker():
        async with factory() as session:
            job = await parent.options(tenant="a", on=session).enqueue(20)
            others = await other.options(on=session).enqueue(), await plain.options(on=session).enqueue()
            await session.commit()
        assert await job.result(timeout=60) == []
        assert [await each.result(timeout=60) for each in others] == ["other", True]
        ids = [row[0] for row in await shop.rows("SELECT id FROM aioqueue.job WHERE task = 'child'")]
        assert len(ids) == 20
        results = [await app.job(job_id, of=child).result(timeout=60) for job_id in ids]
    assert sorted(results) == [row[0] for row in await shop.rows("SELECT id FROM shop.note ORDER BY id")]
    assert {tenant for tenant, _ in await notes(shop)} == {"a"}
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
