"""A job's AsyncSession: the tenant inside, both or neither, and what misbehaving tasks get; on both of SQLAlchemy's drivers.

The engine's pool has one connection, which jobs and application share: what a job leaves behind, the next would find.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session as SyncSession
from sqlalchemy.orm.exc import DetachedInstanceError

from aioqueue import AioQueue, LimitSettings, Snooze, TransactionViolation, current_job
from aioqueue.attempt import Cause
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.events import JobLost
from aioqueue.outcome import Failed, Reason, Released, Snoozed
from aioqueue.session_driver import Below
from aioqueue.settings import LeaseSettings
from tests.kit import Bench, bench, passed, session, until
from tests.session_kit import DRIVERS, Note, add_probe, assert_clean, make_engine, write
from tests.shop import notes
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Act = Callable[[JobSession], Awaitable[object]]
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


# -- the tenant ----------------------------------------------------------------------------------------------------------


async def test_a_job_sees_and_writes_the_rows_of_its_tenant_only(at: Bench, shop: Session) -> None:
    seen: list[Any] = []

    async def work(session: JobSession, body: str) -> None:
        session.add(Note(body=body))
        seen.append([(note.tenant, note.body) for note in await session.scalars(select(Note).order_by(Note.id))])

    at.tasks.task(name="work")(work)
    for tenant, body in (("a", "one"), ("b", "two"), ("a", "three")):
        assert await at.run("work", f'{{"body": "{body}"}}', tenant=tenant) is None, at.outcomes
    assert seen == [[("a", "one")], [("b", "two")], [("a", "one"), ("a", "three")]]
    assert await notes(shop) == [("a", "one"), ("b", "two"), ("a", "three")]


async def test_a_job_of_no_tenant_has_an_empty_setting_and_sees_nobody_s_rows(at: Bench, shop: Session) -> None:
    await shop.rows("INSERT INTO shop.note (tenant, body) VALUES ('a', 'secret')")
    seen: list[Any] = []

    async def work(session: JobSession) -> None:
        seen.append((session.tenant, await session.scalar(text("SELECT current_setting('app.tenant')"))))
        seen.append((await session.scalars(select(Note))).all())

    at.tasks.task(name="work")(work)
    assert await at.run("work") is None, at.outcomes
    assert seen == [("", ""), []]


async def test_a_row_of_another_tenant_cannot_be_written(at: Bench, shop: Session) -> None:
    async def work(session: JobSession) -> None:
        session.add(Note(tenant="b", body="planted"))

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and "row-level security" in outcome.error.message
    assert await notes(shop) == []


async def test_the_session_knows_its_job_and_is_the_current_one(at: Bench) -> None:
    seen: list[Any] = []

    async def work(session: JobSession) -> None:
        seen.append((session.job_id, session.task, session.attempt, session.tenant, session.resources))
        assert current_job() is session
        assert isinstance(session, AsyncSession)

    at.tasks.task(name="work")(work)
    job = await at.start("work", tenant="a")
    await at.end()
    assert job.job_id not in at.outcomes, at.outcomes
    assert seen == [(job.job_id, "work", 1, "a", None)]


async def test_the_session_is_made_as_the_factory_says(at: Bench, engine: AsyncEngine, shop: Session, worker_dsn: str) -> None:
    class Below(SyncSession):
        pass

    class Own(AsyncSession):
        sync_session_class = Below

        async def bodies(self) -> list[str]:
            return [note.body for note in await self.scalars(select(Note))]

    class OwnJobSession(JobSession, Own):
        pass

    seen: list[Any] = []

    async def work(session: JobSession) -> None:
        own: Any = session
        seen.append((isinstance(session, Own), await own.bodies(), session.autoflush, type(session.sync_session)))

    async def typed(session: OwnJobSession) -> None:
        seen.append((isinstance(session, Own), await session.bodies(), session.autoflush, type(session.sync_session)))

    factory = async_sessionmaker(engine, class_=Own, autoflush=False)
    app = AioQueue(schema=shop.store.schema, session=factory)
    app.task(name="work")(work)
    app.task(name="typed")(typed)
    async with bench(worker_dsn, shop, app, session=factory) as own:
        assert await own.run("work") is None, own.outcomes
        assert await own.run("typed") is None, own.outcomes
    assert seen == [(True, [], False, Below)] * 2


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_isolation_level_is_the_engine_s_own(shop: Session, worker_dsn: str, driver: str) -> None:
    engine = make_engine(worker_dsn, driver, isolation_level="SERIALIZABLE", pool_pre_ping=True)
    factory = async_sessionmaker(engine)
    seen: list[str | None] = []

    async def work(session: JobSession) -> None:
        session.add(Note(body="one"))
        seen.append(await session.scalar(text("SHOW transaction_isolation")))

    app = AioQueue(schema=shop.store.schema, session=factory)
    app.task(name="work")(work)
    async with bench(worker_dsn, shop, app, session=factory) as at:
        found = add_probe(at)
        pid = await assert_clean(at, found, engine)
        assert await at.run("work", tenant="a") is None, at.outcomes
        assert await assert_clean(at, found, engine) == pid
    assert seen == ["serializable"]
    assert await notes(shop) == [("a", "one")]
    await engine.dispose()


# -- nothing is left for the next user of the connection -------------------------------------------------------------------


def statement(*statements: str) -> Act:
    async def run(session: JobSession) -> None:
        for each in statements:
            await session.execute(text(each))

    return run


async def nothing(session: JobSession) -> None:
    pass


async def error_in_savepoint(session: JobSession) -> None:
    with contextlib.suppress(DBAPIError):
        async with session.begin_nested():
            await session.execute(text("SELECT 1 / 0"))


async def streams(session: JobSession) -> None:
    """A server-side cursor, read to its end; one that is not."""
    assert [n async for n in await session.stream_scalars(text("SELECT * FROM generate_series(1, 200)"))] == list(range(1, 201))
    result = await session.stream(text("SELECT * FROM generate_series(1, 2000)"))
    await result.fetchone()


async def options(session: JobSession) -> None:
    conn = await session.connection()
    await conn.execution_options(stream_results=True)
    await (await session.stream(text("SELECT 1"))).close()


WELL_BEHAVED: dict[str, Act] = {
    "nothing": nothing,
    "search_path": statement("SET search_path = shop, pg_temp"),
    "session settings": statement("SET own.secret = 'a'", "SET TimeZone = 'Asia/Tokyo'"),
    "isolation of the session": statement("SET default_transaction_isolation = 'serializable'"),
    "a tenant for the session, the same": statement("SET app.tenant = 'before'"),
    "a temporary table": statement("CREATE TEMP TABLE left_behind AS SELECT body FROM shop.note"),
    "temporary tables that shadow ours": statement(
        *(f"CREATE TEMP TABLE {name} (id integer)" for name in ("job", "live", "outcome", "attempt", "worker", "note"))
    ),
    "temporary tables that shadow types": statement(
        *(f"CREATE TEMP TABLE {name} (id integer)" for name in ("uuid", "text", "jsonb", "timestamptz", "int8", "bool"))
    ),
    "LISTEN": statement("LISTEN left_behind"),
    "session characteristics": statement("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"),
    "session authorization, the same": statement("SET SESSION AUTHORIZATION aioqueue_worker"),
    "an error in a savepoint": error_in_savepoint,
    "a savepoint of SQL left open": statement("SAVEPOINT one", "SAVEPOINT two"),
    "advisory locks": statement("SELECT pg_advisory_lock(1), pg_advisory_lock_shared(2)"),
    "a cursor with hold": statement("DECLARE left_open CURSOR WITH HOLD FOR SELECT body FROM shop.note"),
    "PREPARE": statement("PREPARE left_behind AS SELECT body FROM shop.note"),
    "a role, taken back": statement("SET ROLE aioqueue_worker", "RESET ROLE"),
    "a local time-out": statement("SET statement_timeout = '1h'", "SET lock_timeout = '1h'"),
    "streams": streams,
    "options and info": options,
}


@pytest.mark.parametrize("name", WELL_BEHAVED)
async def test_nothing_of_a_job_that_succeeds_is_left(at: Bench, shop: Session, engine: AsyncEngine, name: str) -> None:
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        await write(session, "before")
        await WELL_BEHAVED[name](session)

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine)
    for _ in range(2):
        assert await at.run("work", tenant="before") is None, at.outcomes
        assert await assert_clean(at, found, engine) == pid, "the connection is kept"
    assert await notes(shop) == [("before", "before")] * 2


async def fail(session: JobSession) -> None:
    raise ValueError("no")


async def snooze(session: JobSession) -> None:
    raise Snooze(60)


FAILING: dict[str, Act] = {"an exception": fail, "Snooze": snooze, "a refused statement": statement("SELECT 1 / 0")}


@pytest.mark.parametrize("name", FAILING)
async def test_nothing_of_a_job_that_fails_is_left(at: Bench, shop: Session, engine: AsyncEngine, name: str) -> None:
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        await write(session, "before")
        for left in ("session settings", "a temporary table", "LISTEN", "advisory locks", "PREPARE"):
            await WELL_BEHAVED[left](session)
        await FAILING[name](session)

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine)
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed | Snoozed), outcome
    assert await notes(shop) == []
    assert await assert_clean(at, found, engine) == pid, "the connection is kept"


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
async def test_what_the_application_sets_when_it_connects_stays(
    at: Bench, shop: Session, engine: AsyncEngine, fails: bool
) -> None:
    def on_connect(conn: Any, _record: object) -> None:
        cursor = conn.cursor()
        cursor.execute("SET search_path = shop, public")
        cursor.execute("SET work_mem = '5MB'")
        cursor.execute("SET ROLE aioqueue_worker")
        cursor.close()
        conn.commit()

    event.listen(engine.sync_engine, "connect", on_connect)
    found = add_probe(at)
    settings = {"path": "shop, public", "settings": ["search_path=shop, public", "work_mem=5120"]}

    async def work(session: JobSession) -> None:
        await session.execute(text("SET search_path = pg_temp"))
        await session.execute(text("SET work_mem = '1MB'"))
        await session.execute(text("SET TimeZone = 'Asia/Tokyo'"))
        if fails:
            raise ValueError

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine, **settings)
    await at.run("work", tenant="before")
    assert await assert_clean(at, found, engine, **settings) == pid
    async with engine.connect() as conn:
        assert await conn.scalar(text("SELECT current_setting('role')")) == "aioqueue_worker"


async def test_statements_that_a_job_deallocates_unseen_are_prepared_anew(at: Bench, engine: AsyncEngine) -> None:
    """The client believes that they are there; the next statement of the application would fail."""

    async def work(session: JobSession) -> None:
        await session.execute(text("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"))

    at.tasks.task(name="work")(work)

    async def application() -> None:
        async with engine.connect() as conn:
            for _ in range(8):
                await conn.execute(text("SELECT id FROM shop.parent"))
            await conn.commit()  # after a ROLLBACK psycopg prepares anew

    await application()
    assert await at.run("work", tenant="a") is None, at.outcomes
    await application()


# -- what breaks the transaction -------------------------------------------------------------------------------------------


async def swallow(session: JobSession) -> None:
    with contextlib.suppress(DBAPIError):
        await session.execute(text("SELECT 1 / 0"))


async def swallow_a_flush(session: JobSession) -> None:
    session.add(Note(tenant="somebody else's", body="refused"))
    with contextlib.suppress(DBAPIError):
        await session.flush()


async def leave_nested(session: JobSession) -> None:
    await session.begin_nested()


async def raw(session: JobSession, *statements: str) -> None:
    driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
    for each in statements:
        await driver.execute(each)


def raw_statement(*statements: str) -> Act:
    return lambda session: raw(session, *statements)


def in_sync(act: Callable[[SyncSession], object]) -> Act:
    async def run(session: JobSession) -> None:
        with contextlib.suppress(Exception):
            await session.run_sync(act)

    return run


async def go_on_after_commit(session: JobSession) -> None:
    for each in ("COMMIT", "INSERT INTO shop.parent VALUES (1)", "SET app.tenant = 'victim'"):
        with contextlib.suppress(Exception):
            await session.execute(text(each))


ENDED = "COMMIT or ROLLBACK"
VIOLATIONS: dict[str, tuple[Act, str]] = {
    "COMMIT": (statement("COMMIT"), ENDED),
    "ROLLBACK": (statement("ROLLBACK"), ENDED),
    "END": (statement("END"), ENDED),
    "COMMIT AND CHAIN": (statement("COMMIT AND CHAIN"), ENDED),
    "ROLLBACK AND CHAIN": (statement("ROLLBACK AND CHAIN"), ENDED),
    "COMMIT, and going on": (go_on_after_commit, ENDED),
    "COMMIT; BEGIN on the driver": (raw_statement("COMMIT; BEGIN"), ENDED),
    "COMMIT on the driver": (raw_statement("COMMIT"), ENDED),
    "a tenant set in a savepoint that is kept": (
        statement("SAVEPOINT s", "SET LOCAL app.tenant = 'victim'", "RELEASE s"),
        "app.tenant",
    ),
    "SET app.tenant": (statement("SET app.tenant = 'victim'"), "app.tenant"),
    "SET LOCAL app.tenant": (statement("SET LOCAL app.tenant = 'victim'"), "app.tenant"),
    "set_config for the session": (statement("SELECT set_config('app.tenant', 'victim', false)"), "app.tenant"),
    "set_config on the driver": (raw_statement("SET app.tenant = 'victim'"), "app.tenant"),
    "RESET ALL": (statement("RESET ALL"), ENDED),
    "SET ROLE": (statement("SET ROLE aioqueue_worker"), "role"),
    "row_security": (statement("SET row_security = off"), "row_security"),
    "an error swallowed": (swallow, "a statement failed"),
    "a failed flush swallowed": (swallow_a_flush, "a statement failed"),
    "a begin_nested() not left": (leave_nested, "begin_nested()"),
    "commit() below": (in_sync(lambda session: session.commit()), "a statement failed"),
    "rollback() below": (in_sync(lambda session: session.rollback()), ENDED),
    "close() below": (in_sync(lambda session: session.close()), ENDED),
    "invalidate() of the connection below": (in_sync(lambda session: session.connection().invalidate()), ""),
}


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_task_that_breaks_its_transaction_fails_and_harms_nobody(
    at: Bench, shop: Session, engine: AsyncEngine, name: str, raises: bool
) -> None:
    found = add_probe(at)
    misbehave, said = VIOLATIONS[name]

    async def work(session: JobSession) -> None:
        await write(session, "before")
        await misbehave(session)
        if raises:
            raise ValueError("mine")

    at.tasks.task(name="work")(work)
    await assert_clean(at, found, engine)
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed), outcome
    # What the task committed itself, in SQL, is its own doing; everything else is rolled back.
    commits = name.startswith("COMMIT") or name == "END"
    assert await notes(shop) == ([("before", "before")] if commits else [])
    assert await shop.rows("SELECT * FROM shop.parent") == []
    if not raises:
        assert said in outcome.error.message
        assert outcome.reason is Reason.VIOLATION or name == "invalidate() of the connection below", outcome
    elif commits:
        # What it wrote is there for good: that is said, with the line that did it, or what it raised as the cause.
        assert outcome.reason is Reason.VIOLATION and said in outcome.error.message
    await assert_clean(at, found, engine)


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_jobs_of_many_tenants_do_no_statement_runs_for_another(
    at: Bench, shop: Session, engine: AsyncEngine, seed: int
) -> None:
    """One after the other on one connection, each with some of all these acts, in an order of chance."""
    dice = random.Random(seed)
    found = add_probe(at)
    wrong: list[Any] = []
    acts = {**WELL_BEHAVED, **FAILING, **{name: act for name, (act, _) in VIOLATIONS.items()}}

    async def work(session: JobSession, names: list[str]) -> None:
        async def look() -> None:
            tenant = session.tenant
            row = (await session.execute(text("SELECT current_setting('app.tenant'), current_setting('own.secret', true)"))).one()
            if row[0] != tenant or (not looked and row[1]):
                wrong.append((tenant, row, names))
            wrong.extend(note for note in await session.scalars(select(Note)) if note.body != tenant)
            looked.append(tenant)

        looked: list[str] = []
        await look()
        await write(session, session.tenant)
        for name in names:
            await acts[name](session)
            if name in WELL_BEHAVED:
                await look()

    at.tasks.task(name="work")(work)
    outcomes: set[type | None] = set()
    for number in range(40):
        names = dice.sample(sorted(WELL_BEHAVED), dice.randrange(3)) + dice.sample(sorted(acts), dice.randrange(2))
        names = [name for name in names if name != "a tenant for the session, the same"]  # of other tests
        outcome = await at.run("work", json.dumps({"names": names}), tenant=f"t{number % 5}")
        outcomes.add(None if outcome is None else type(outcome))
        assert not wrong
    assert {None, Failed} <= outcomes
    # Whatever was committed is of the tenant that it was written for.
    assert all(tenant == body for tenant, body in await notes(shop))
    await assert_clean(at, found, engine)


REFUSED_AT_THE_END: dict[str, tuple[Act, str]] = {
    "a deferred constraint": (statement("INSERT INTO shop.child VALUES (404)"), "violates foreign key"),
    "SET CONSTRAINTS": (statement("SET CONSTRAINTS ALL DEFERRED", "INSERT INTO shop.child VALUES (404)"), "violates foreign key"),
    "READ ONLY": (statement("SET TRANSACTION READ ONLY"), "read-only"),
    "DISCARD ALL": (statement("DISCARD ALL"), "DISCARD ALL"),
    "VACUUM": (statement("VACUUM shop.parent"), "VACUUM"),
}


@pytest.mark.parametrize("name", REFUSED_AT_THE_END)
async def test_what_the_server_refuses_fails_the_attempt_with_its_reason(
    at: Bench, shop: Session, engine: AsyncEngine, name: str
) -> None:
    found = add_probe(at)
    misbehave, said = REFUSED_AT_THE_END[name]

    async def work(session: JobSession) -> None:
        await write(session, "before")
        await misbehave(session)

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine)
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed) and outcome.delay is not None and outcome.reason is Reason.ERROR, outcome
    assert said in outcome.error.message
    assert await notes(shop) == []
    assert await assert_clean(at, found, engine) == pid, "the connection is kept"


async def test_what_would_end_the_session_is_refused_in_the_task_s_own_stack_and_does_nothing(
    at: Bench, shop: Session, engine: AsyncEngine, worker_dsn: str
) -> None:
    refused: list[str] = []
    other = make_engine(worker_dsn, engine.dialect.driver)

    async def call(method: Callable[[], Any]) -> None:
        with pytest.raises(TransactionViolation, match="begin_nested") as caught:
            await method()
        refused.append(str(caught.value).partition(" ")[0])

    async def work(session: JobSession) -> None:
        await write(session, "one")
        for method in (session.commit, session.rollback, session.close, session.aclose, session.reset, session.invalidate):
            await call(method)
        conn = await session.connection()
        for method in (conn.commit, conn.rollback, conn.close, conn.aclose, conn.invalidate):
            await call(method)
        for begin in (session.begin, conn.begin):
            with pytest.raises(TransactionViolation, match="begin_nested"):
                async with begin():
                    raise AssertionError
        for name in ("commit", "rollback", "close", "begin", "detach"):
            with pytest.raises(TransactionViolation, match="begin_nested"):
                await session.run_sync(lambda below, name=name: getattr(below.connection(), name)())  # type: ignore[misc]
        with pytest.raises(TransactionViolation, match="second connection"):
            await session.execute(text("SELECT 1"), bind_arguments={"bind": other.sync_engine})
        with pytest.raises(TransactionViolation):
            async with session:
                await write(session, "two")

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert await notes(shop) == [("a", "one"), ("a", "two")]
    await other.dispose()
    assert refused == [
        "commit()", "rollback()", "close()", "aclose()", "reset()", "invalidate()",
        "commit()", "rollback()", "close()", "aclose()", "invalidate()",
    ]  # fmt: skip


async def test_a_savepoint_lets_a_task_go_on_after_an_error(at: Bench, shop: Session) -> None:
    async def work(session: JobSession) -> None:
        session.add(Note(body="outer"))
        with contextlib.suppress(DBAPIError):
            async with session.begin_nested():
                session.add(Note(body="inner"))
                session.add(Note(tenant="b", body="refused"))
        session.add(Note(body="after"))

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert await notes(shop) == [("a", "outer"), ("a", "after")]


async def test_a_session_that_a_failed_flush_has_rolled_back_says_so(at: Bench, shop: Session) -> None:
    async def work(session: JobSession) -> None:
        await write(session, "one")
        session.add(Note(tenant="b", body="refused"))
        with pytest.raises(DBAPIError):
            await session.flush()
        with pytest.raises(PendingRollbackError):
            await session.execute(text("SELECT 1"))
        session.expunge_all()
        await session.execute(text("SELECT 1"))

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.error.type.endswith("PendingRollbackError"), outcome
    assert "row-level security" in outcome.error.message
    assert await notes(shop) == []


async def test_what_is_pending_is_flushed_before_the_end_and_an_error_of_it_is_the_job_s(at: Bench, shop: Session) -> None:
    order: list[str] = []

    async def work(session: JobSession, body: str | None) -> None:
        event.listen(session.sync_session, "before_commit", lambda _: order.append("commit"))
        event.listen(session.sync_session, "after_flush", lambda *_: order.append("flush"))
        session.add(Note(body=body))

    at.tasks.task(name="work")(work)
    await shop.conn.execute("ALTER TABLE shop.note ALTER body SET NOT NULL")
    outcome = await at.run("work", '{"body": null}', tenant="a")
    assert (
        isinstance(outcome, Failed) and outcome.error.type.endswith("IntegrityError") and not outcome.error.type.startswith("aio")
    )
    assert order == []
    assert await at.run("work", '{"body": "one"}', tenant="a") is None, at.outcomes
    assert order == ["flush", "commit"]
    assert await notes(shop) == [("a", "one")]


async def test_hooks_of_the_session_s_commit_are_called_and_what_they_write_is_the_job_s(at: Bench, shop: Session) -> None:
    calls: list[str] = []

    def before(session: SyncSession) -> None:
        session.add(Note(body="by a hook"))
        calls.append("before")

    def after(_session: SyncSession) -> None:
        calls.append("after")
        raise ZeroDivisionError  # committed is committed

    async def work(session: JobSession, tenant: str) -> None:
        event.listen(session.sync_session, "before_commit", before)
        event.listen(session.sync_session, "after_commit", after)
        if tenant:
            event.listen(session.sync_session, "before_commit", lambda s: s.execute(text(f"SET app.tenant = '{tenant}'")))

    at.tasks.task(name="work")(work)
    assert await at.run("work", '{"tenant": ""}', tenant="a") is None, at.outcomes
    assert calls == ["before", "after"]
    assert await notes(shop) == [("a", "by a hook")]
    # A hook cannot go around the check at the end.
    outcome = await at.run("work", '{"tenant": "victim"}', tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION and "app.tenant" in outcome.error.message
    assert len(await notes(shop)) == 1


# -- the session's end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["succeeded", "failed"])
async def test_a_session_that_was_kept_is_of_no_use_to_anybody(
    at: Bench, shop: Session, engine: AsyncEngine, fails: bool
) -> None:
    kept: dict[str, Any] = {}

    async def keep(session: JobSession) -> None:
        await write(session, "kept")
        kept.update(
            session=session,
            below=session.sync_session,
            conn=await session.connection(),
            driver=(await (await session.connection()).get_raw_connection()).driver_connection,
            result=await session.stream(text("SELECT * FROM generate_series(1, 5000)")),
            note=await session.scalar(select(Note)),
        )
        if fails:
            raise ValueError

    async def victim(session: JobSession) -> None:
        await use(kept)
        await write(session, "mine")

    async def use(kept: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError, match="has ended"):
            await kept["session"].execute(text("INSERT INTO shop.note (body) VALUES ('late')"))
        with pytest.raises(RuntimeError, match="has ended"):
            kept["session"].add(Note(body="late"))
        for act in (
            lambda: kept["conn"].execute(text("SELECT 1")),
            lambda: kept["driver"].execute("SELECT 1"),
            lambda: asyncio.to_thread(kept["below"].execute, text("SELECT 1")),
        ):
            with pytest.raises(Exception, match=r"closed|lost|consum|ended"):
                await act()
        with contextlib.suppress(Exception):
            assert len(await kept["result"].fetchmany(4000)) < 3000

    at.tasks.task(name="keep")(keep)
    at.tasks.task(name="victim")(victim)
    outcome = await at.run("keep", tenant="keeper")
    assert isinstance(outcome, Failed if fails else type(None)), outcome
    await use(kept)
    assert await at.run("victim", tenant="victim") is None, at.outcomes
    # As after any commit of the application's own sessions.
    with contextlib.nullcontext() if fails else pytest.raises(DetachedInstanceError):
        assert kept["note"].body
    expected = [] if fails else [("keeper", "kept")]
    assert await notes(shop) == [*expected, ("victim", "mine")]
    await use(kept)


async def test_a_stream_that_was_kept_reads_nothing_in_somebody_else_s_transaction(at: Bench, engine: AsyncEngine) -> None:
    kept: list[Any] = []

    async def work(session: JobSession) -> None:
        kept.append(await session.stream(text("SELECT * FROM generate_series(1, 5000)")))
        await kept[0].fetchone()

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    async with engine.connect() as conn:
        await conn.execute(text("SELECT 1"))
        with contextlib.suppress(Exception):
            await kept[0].fetchmany(4900)
        assert await conn.scalar(text("SELECT 2")) == 2


PG_SLEEPS = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"


@pytest.mark.parametrize("swallows", [False, True], ids=["let out", "swallowed"])
async def test_two_tasks_that_use_it_at_once_fail_the_job(at: Bench, shop: Session, engine: AsyncEngine, swallows: bool) -> None:
    """On psycopg the second one would wait for its turn, on asyncpg it would be refused."""
    found = add_probe(at)
    raised: list[BaseException] = []

    async def work(session: JobSession) -> None:
        await write(session, "one")
        first = asyncio.create_task(session.execute(text("SELECT pg_sleep(0.5)")))
        await until(shop, PG_SLEEPS)
        try:
            await (await session.connection()).execute(text("SELECT 1"))
        except TransactionViolation as error:
            raised.append(error)
            if not swallows:
                raise
        await first

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert "at once" in str(raised[0]) and "at once" in outcome.error.message
    assert await notes(shop) == []
    await assert_clean(at, found, engine)


async def test_a_task_that_reads_a_stream_uses_it_too(at: Bench, shop: Session, engine: AsyncEngine) -> None:
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        async def read() -> None:
            async for _ in await session.stream(text("SELECT pg_sleep(0.5) FROM generate_series(1, 1000)")):
                pass

        reading = asyncio.create_task(read())
        await until(shop, PG_SLEEPS)
        try:
            await write(session, "beside it")
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed), outcome
    if engine.dialect.driver == "psycopg":  # asyncpg says so itself
        assert outcome.reason is Reason.VIOLATION and "at once" in outcome.error.message
    assert await notes(shop) == []
    await assert_clean(at, found, engine)


async def test_a_statement_that_is_under_way_at_the_end_fails_the_job(at: Bench, shop: Session, engine: AsyncEngine) -> None:
    found = add_probe(at)
    alive: list[asyncio.Task[Any]] = []

    async def work(session: JobSession) -> None:
        await write(session, "one")
        alive.append(asyncio.create_task(session.execute(text("SELECT pg_sleep(1000)"))))
        await until(shop, PG_SLEEPS)

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert "under way" in outcome.error.message
    with pytest.raises(Exception, match=r"clos|lost|consum|terminat|connection"):
        await alive[0]
    assert await notes(shop) == []
    await assert_clean(at, found, engine)


async def test_a_task_that_lives_on_gets_nothing_more_done(at: Bench, shop: Session) -> None:
    alive: list[asyncio.Task[None]] = []
    go_on, errors = asyncio.Event(), list[BaseException]()

    async def late(session: JobSession) -> None:
        await passed(go_on)
        try:
            await write(session, "late")
        except Exception as error:
            errors.append(error)

    async def work(session: JobSession) -> None:
        await write(session, "mine")
        alive.append(asyncio.create_task(late(session)))

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    go_on.set()
    await alive[0]
    assert len(errors) == 1 and "has ended" in str(errors[0])
    assert await notes(shop) == [("a", "mine")]


# -- time limits and cancellation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", ["in a query", "in the loop"])
async def test_a_time_out_rolls_back_and_the_pool_is_whole(at: Bench, shop: Session, engine: AsyncEngine, waits: str) -> None:
    """In a query SQLAlchemy itself closes the connection whose statement was cancelled."""
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        await write(session, "before")
        await session.execute(text("SET TimeZone = 'Asia/Tokyo'"))
        if waits == "in a query":
            await session.execute(text("SELECT pg_sleep(1000)"))
        await asyncio.Event().wait()

    at.tasks.task(name="work", timeout=0.3)(work)
    pid = await assert_clean(at, found, engine)
    for _ in range(2):
        outcome = await at.run("work", tenant="before")
        assert isinstance(outcome, Failed) and outcome.reason is Reason.TIME_LIMIT, outcome
        after = await assert_clean(at, found, engine)
        assert after == pid or waits == "in a query"
    assert await notes(shop) == []


async def test_user_code_is_cancelled_once_and_may_use_a_finally(at: Bench, shop: Session, engine: AsyncEngine) -> None:
    found = add_probe(at)
    inside, seen = asyncio.Event(), list[str]()

    async def work(session: JobSession) -> None:
        try:
            inside.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append(str(await session.scalar(text("SELECT current_setting('app.tenant')"))))

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine)
    job = await at.start("work", tenant="a")
    await passed(inside)
    at.stop(job, Cause.INTERRUPTED)
    await at.end()
    assert isinstance(at.outcomes[job.job_id], Released)
    assert seen == ["a"]
    assert await assert_clean(at, found, engine) == pid


async def test_a_lock_that_is_waited_for_beyond_the_time_limit_is_a_time_out(at: Bench, shop: Session, owner_dsn: str) -> None:
    at.tasks.task(name="work", timeout=0.3)(_lock)
    async with session(owner_dsn, at.store.schema) as other, other.conn.transaction():
        await other.rows("LOCK TABLE shop.parent")
        outcome = await at.run("work")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.TIME_LIMIT, outcome


async def _lock(session: JobSession) -> None:
    await session.execute(text("LOCK TABLE shop.parent"))


async def test_a_flush_at_the_end_is_the_task_s_and_can_be_cancelled(at: Bench, shop: Session, owner_dsn: str) -> None:
    async def work(session: JobSession) -> None:
        session.add(Note(body="one"))

    at.tasks.task(name="work")(work)
    async with session(owner_dsn, at.store.schema) as other, other.conn.transaction():
        await other.rows("LOCK TABLE shop.note")
        job = await at.start("work", tenant="a")
        await until(shop, "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'shop.note'::regclass AND NOT granted)")
        at.stop(job, Cause.INTERRUPTED)
        await at.end()
    outcome = at.outcomes[job.job_id]
    assert isinstance(outcome, Released), outcome
    assert await notes(shop) == []


async def test_a_rollback_that_hangs_ends_with_the_connection(shop: Session, worker_dsn: str, factory: Factory) -> None:
    limits = LimitSettings(rollback=0.2)
    app = AioQueue(schema=shop.store.schema, session=factory)
    async with bench(worker_dsn, shop, app, limits=limits, session=factory) as at:
        pids: list[int] = []

        async def work(session: JobSession) -> None:
            pids.append(int(await session.scalar(text("SELECT pg_backend_pid()")) or 0))
            os.kill(pids[0], signal.SIGSTOP)
            raise ValueError("mine")

        at.tasks.task(name="work")(work)
        try:
            outcome = await at.run("work", tenant="a")
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert isinstance(outcome, Failed) and outcome.error.message == "mine"
        assert await notes(shop) == []


async def test_a_job_that_gets_no_connection_in_time_is_handed_back(
    at: Bench, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    async def work(session: JobSession) -> None:
        ran.append(1)

    at.tasks.task(name="work")(work)
    object.__setattr__(at.settings.pool, "acquire_timeout", 0.1)
    object.__setattr__(at.settings.limits, "transaction_wait", 0.1)
    async with engine.connect():
        outcome = await at.run("work")
    assert isinstance(outcome, Released) and outcome.reason is Reason.NO_CONNECTION, outcome
    assert ran == [] and at.database.waiting == 0
    assert await at.run("work") is None, at.outcomes


async def test_the_end_of_the_lease_shuts_the_session_s_connection(at: Bench, shop: Session) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def work(session: JobSession) -> None:
        await write(session, "late")
        inside.set()
        await passed(go_on)
        await write(session, "later")

    at.tasks.task(name="work")(work)
    await at.start("work", tenant="a")
    await passed(inside)
    at.database.sever_jobs()
    go_on.set()
    await at.end()
    assert await notes(shop) == []
    assert not at.database.severed_with_jobs


# -- both or neither -----------------------------------------------------------------------------------------------------


async def test_success_and_writes_commit_together(at: Bench, shop: Session) -> None:
    states: list[Any] = []

    async def work(session: JobSession) -> int:
        session.add(Note(body="one"))
        await session.flush()
        states.append((await shop.state(session.job_id), await notes(shop)))
        return 7

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    (job,) = at.settled_jobs
    assert states == [("running", [])]
    assert await notes(shop) == [("a", "one")]
    assert await shop.rows("SELECT state, result FROM aioqueue.outcome WHERE job_id = %s", job.job_id) == [("succeeded", 7)]


async def test_a_result_that_postgresql_refuses_is_an_invalid_result(at: Bench, shop: Session) -> None:
    async def work(session: JobSession) -> str:
        await write(session, "one")
        return "\x00"

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.INVALID_RESULT, outcome
    assert await notes(shop) == []


async def test_a_late_run_s_transaction_rolls_back(at: Bench, shop: Session, engine: AsyncEngine) -> None:
    """Its worker was declared dead and the job was taken over in the middle of its transaction."""
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        await write(session, "late")
        await at.engine.end_lease(at.worker)
        assert await at.engine.rescue() == (at.worker, 1)

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine)
    job = await at.start("work", tenant="a")
    await at.end()
    assert job.job_id not in at.outcomes
    assert [settled.job_id for settled in at.settled_jobs if settled.job_id == job.job_id] == []
    assert at.seen.all(JobLost, job_id=job.job_id)
    assert await notes(shop) == []
    assert await at.state(job) == "ready"
    async with engine.connect() as conn:
        assert await conn.scalar(text("SELECT pg_backend_pid()")) == pid


async def kill(shop: Session, pid: int) -> None:
    """End a session and wait until the server has let go of it."""
    await shop.rows("SELECT pg_terminate_backend(%s)", pid)
    await until(shop, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", pid)


async def pid_of(session: JobSession) -> int:
    return int(await session.scalar(text("SELECT pg_backend_pid()")) or 0)


async def test_a_connection_that_died_in_the_pool_is_replaced_before_user_code(
    at: Bench, shop: Session, engine: AsyncEngine
) -> None:
    found = add_probe(at)
    pid = await assert_clean(at, found, engine)
    for _ in range(2):
        await kill(shop, pid)
        job = await at.start("probe", tenant="next")
        await at.end()
        assert job.job_id not in at.outcomes, at.outcomes
        assert (job.attempt, await at.state(job)) == (1, "succeeded")
        pid = await assert_clean(at, found, engine)


@pytest.mark.parametrize("when", ["in user code", "before the commit"])
async def test_a_server_process_that_dies_fails_the_attempt(at: Bench, shop: Session, engine: AsyncEngine, when: str) -> None:
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        await write(session, "one")
        await kill(shop, await pid_of(session))
        if when == "in user code":
            await session.execute(text("SELECT 1"))

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.delay is not None and outcome.reason is Reason.ERROR, outcome
    assert await notes(shop) == []
    await assert_clean(at, found, engine)


SLOW_COMMIT = """
    CREATE FUNCTION shop.wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON shop.note DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION shop.wait_at_commit();
"""


async def test_a_server_process_that_dies_at_the_end_is_read_back_as_failed(at: Bench, shop: Session, owner_dsn: str) -> None:
    pids: list[int] = []

    async def work(session: JobSession) -> None:
        pids.append(await pid_of(session))
        await write(session, "one")

    at.tasks.task(name="work")(work)
    await shop.conn.execute(SLOW_COMMIT)
    async with session(owner_dsn, at.store.schema) as other:
        await other.rows("SELECT pg_advisory_lock(4711)")
        job = await at.start("work", tenant="a")
        await until(shop, "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted)")
        await kill(shop, pids[0])
        await at.end()
    outcome = at.outcomes[job.job_id]
    assert isinstance(outcome, Failed) and outcome.delay is not None
    assert await notes(shop) == []
    assert await at.state(job) == "running"


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "not committed"])
async def test_a_commit_without_an_answer_is_read_back(
    at: Bench, shop: Session, engine: AsyncEngine, commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection dies when COMMIT has been executed, or right before."""

    async def work(session: JobSession) -> None:
        await write(session, "one")

    at.tasks.task(name="work")(work)
    dialect = engine.sync_engine.dialect
    do_commit = dialect.do_commit

    def lose_the_answer(conn: Any) -> None:
        if commits:
            do_commit(conn)
        raise dialect.loaded_dbapi.OperationalError("the answer to COMMIT is lost")

    with monkeypatch.context() as patch:
        patch.setattr(dialect, "do_commit", lose_the_answer)
        outcome = await at.run("work", tenant="a")
    if commits:
        assert outcome is None, outcome
        assert await at.state(at.settled_jobs[0]) == "succeeded"
        assert await notes(shop) == [("a", "one")]
    else:
        assert isinstance(outcome, Failed) and "the answer to COMMIT is lost" in outcome.error.message
        assert await notes(shop) == []
    add = add_probe(at)
    if commits:
        await shop.rows("DELETE FROM shop.note")
    await assert_clean(at, add, engine)


async def test_a_commit_that_cannot_be_read_back_is_left_to_the_recorder(
    shop: Session, worker_dsn: str, factory: Factory, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(session: JobSession) -> None:
        await write(session, "one")

    async def no_answer(*_: object) -> str:
        raise psycopg.OperationalError("the server is away")

    dialect = engine.sync_engine.dialect

    def lost(_conn: Any) -> None:
        raise dialect.loaded_dbapi.OperationalError("lost")

    app = AioQueue(schema=shop.store.schema, session=factory)
    async with bench(worker_dsn, shop, app, lease=LeaseSettings(lease=0.5), session=factory) as at:
        at.tasks.task(name="work")(work)
        monkeypatch.setattr(dialect, "do_commit", lost)
        monkeypatch.setattr(at.store, "read_back", no_answer)
        job = await at.start("work", tenant="a")
        await at.end()
        assert isinstance(at.outcomes.get(job.job_id), Failed)
        assert not at.seen.all(JobLost)


async def test_a_scrub_that_is_refused_changes_no_outcome(
    at: Bench, shop: Session, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = add_probe(at)

    async def work(session: JobSession) -> None:
        await session.execute(text("SET TimeZone = 'Asia/Tokyo'"))

    async def refused(*_: object) -> bool:
        raise ValueError("refused for the test")

    at.tasks.task(name="work")(work)
    pid = await assert_clean(at, found, engine)
    with monkeypatch.context() as patch:
        patch.setattr(Below, "scrub", refused)
        assert await at.run("work", tenant="a") is None, at.outcomes
    assert await at.state(at.settled_jobs[-1]) == "succeeded"
    assert await assert_clean(at, found, engine) != pid
