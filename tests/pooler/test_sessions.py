"""What a job does to a session that the pooler lent it is gone before any stranger has it; what strangers left, before a job."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, LiteralString

import pytest
from psycopg import AsyncConnection
from psycopg import sql as pg

from aioqueue import AioQueue, JobFailed, JobTransaction, Retry
from aioqueue.settings import WorkerSettings
from benchmarks.pgbouncer import PROGRAM, pgbouncer
from tests.kit import PATIENCE, MakeApp, session
from tests.pooler.conftest import POOL_SIZE, ask_every_session, every_session, tell_every_session
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Act = Callable[[JobTransaction], Awaitable[object]]

SHOP = """
    CREATE SCHEMA shop;
    CREATE TABLE shop.note (tenant text NOT NULL DEFAULT current_setting('app.tenant', true), body text);
    ALTER TABLE shop.note ENABLE ROW LEVEL SECURITY;
    ALTER TABLE shop.note FORCE ROW LEVEL SECURITY;
    CREATE POLICY own_tenant ON shop.note USING (tenant = nullif(current_setting('app.tenant', true), ''));
    GRANT USAGE ON SCHEMA shop TO aioqueue_worker;
    GRANT SELECT, INSERT ON shop.note TO aioqueue_worker;
"""


@pytest.fixture
async def shop(database: Database, schema: str) -> AsyncIterator[Session]:
    """The application's own table, isolated by tenant; a session that sees through the isolation."""
    async with session(database.dsn("superuser"), schema) as boss:
        await boss.conn.execute("SET ROLE aioqueue_owner")
        await boss.conn.execute(SHOP)
        await boss.conn.execute("RESET ROLE")
        grant = pg.SQL("GRANT TEMPORARY ON DATABASE {} TO aioqueue_worker").format(pg.Identifier(database.name))
        await boss.conn.execute(grant)
        yield boss
        await boss.conn.execute("DROP SCHEMA shop CASCADE")


@pytest.fixture
def app(make_pooled: MakeApp) -> AioQueue:
    return make_pooled(worker=WorkerSettings(poll=0.05, tick=0.05))


async def run(app: AioQueue, act: Act, *, tenant: str = "7") -> BaseException | None:
    """Run one job that does this; why it failed."""

    @app.task(name=f"act {len(app.tasks)}", retry=Retry(max_attempts=1))
    async def task(tx: JobTransaction) -> None:
        await act(tx)

    async with app, app.worker():
        try:
            await (await task.options(tenant=tenant).enqueue()).result(timeout=PATIENCE)
        except JobFailed as error:
            return error
        return None


def sql(*statements: LiteralString) -> Act:
    """Run these statements."""

    async def act(tx: JobTransaction) -> None:
        for statement in statements:
            await tx.execute(statement)

    return act


def fails(act: Act) -> Act:
    """Do that, then raise."""

    async def acts(tx: JobTransaction) -> None:
        await act(tx)
        raise RuntimeError("after it")

    return acts


def refused(act: Act) -> Act:
    """Do that, then run into an error of the server."""

    async def acts(tx: JobTransaction) -> None:
        await act(tx)
        await tx.execute("SELECT 1 / 0")

    return acts


LEFT_BEHIND: dict[str, tuple[Act, LiteralString, object]] = {
    "search_path": (sql("SET search_path = shop"), "SELECT current_setting('search_path')", '"$user", public'),
    "a setting": (sql("SET app.person = 'Ada'"), "SELECT coalesce(current_setting('app.person', true), '')", ""),
    "a time-out": (sql("SET statement_timeout = '1h'"), "SELECT current_setting('statement_timeout')", "0"),
    "read only": (
        sql("SET default_transaction_read_only = on"),
        "SELECT current_setting('default_transaction_read_only')",
        "off",
    ),
    "a temporary table": (
        sql("CREATE TEMP TABLE note AS SELECT * FROM shop.note"),
        "SELECT to_regclass('pg_temp.note')",
        None,
    ),
    "an advisory lock": (
        sql("SELECT pg_advisory_lock(77)"),
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77",
        0,
    ),
    "LISTEN": (sql("LISTEN gossip"), "SELECT count(*) FROM pg_listening_channels()", 0),
    "PREPARE": (sql("PREPARE spy AS SELECT 1"), "SELECT count(*) FROM pg_prepared_statements WHERE name = 'spy'", 0),
    "a cursor": (sql("DECLARE spy CURSOR WITH HOLD FOR SELECT 1"), "SELECT count(*) FROM pg_cursors WHERE name = 'spy'", 0),
}


@pytest.mark.parametrize("ending", [lambda act: act, fails, refused], ids=["success", "an exception", "a refused statement"])
@pytest.mark.parametrize("what", LEFT_BEHIND)
async def test_a_stranger_meets_nothing_of_a_job(
    shop: Session, app: AioQueue, pooled_dsn: str, what: str, ending: Callable[[Act], Act]
) -> None:
    act, query, clean = LEFT_BEHIND[what]
    error = await run(app, ending(act))
    assert (error is None) == (ending(act) is act)
    assert await ask_every_session(pooled_dsn, query) == [clean] * POOL_SIZE


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("SET app.tenant = '8'", "it changed the setting app.tenant"),
        ("SELECT set_config('app.tenant', '8', false)", "it changed the setting app.tenant"),
        ("SET row_security = off", "it switched row_security off"),
        ("COMMIT", "it ended the transaction"),
        ("ROLLBACK", "it ended"),
    ],
)
async def test_a_job_that_breaks_its_transaction_fails_and_no_stranger_has_its_tenant(
    shop: Session, app: AioQueue, pooled_dsn: str, statement: LiteralString, reason: str
) -> None:
    error = await run(app, sql("INSERT INTO shop.note (body) VALUES ('x')", statement))
    assert "broke its transaction: it ended" in str(error) or reason in str(error)
    tenants = "SELECT coalesce(current_setting('app.tenant', true), '')"
    assert await ask_every_session(pooled_dsn, tenants) == [""] * POOL_SIZE
    assert await ask_every_session(pooled_dsn, "SELECT count(*) FROM shop.note") == [0] * POOL_SIZE


async def test_a_client_keeps_what_the_pooler_keeps_for_it(app: AioQueue, pooled_dsn: str, shop: Session) -> None:
    # These stand on the sessions as other clients' values; RESET ALL would return to what each session was opened with.
    facts = []

    async def look(tx: JobTransaction) -> None:
        facts.append(await tx.fetch_value("SELECT 'ü' || current_setting('TimeZone') || current_setting('client_encoding')"))
        await tx.execute("SET TimeZone = 'Asia/Tokyo'")
        await tx.execute("SET client_encoding = 'LATIN1'")

    zone = "SELECT current_setting('TimeZone') || current_setting('client_encoding') || current_setting('application_name')"
    async with await AsyncConnection.connect(
        pooled_dsn, autocommit=True, prepare_threshold=None, application_name="other"
    ) as other:
        await other.execute("SET TimeZone = 'Europe/Berlin'")
        for _ in range(2 * POOL_SIZE):
            assert await run(app, look) is None
            async with every_session(pooled_dsn):
                pass
            row = await (await other.execute(zone)).fetchone()
            assert row == ("Europe/BerlinUTF8other",)
    assert len(set(facts)) == 1


async def test_a_job_meets_nothing_of_a_stranger(app: AioQueue, pooled_dsn: str, shop: Session) -> None:
    found: list[Any] = []

    async def look(tx: JobTransaction) -> None:
        found.append(
            (
                await tx.fetch_value("SELECT current_setting('search_path')"),
                await tx.fetch_value("SELECT to_regclass('pg_temp.note')"),
                await tx.fetch_value("SELECT current_setting('app.tenant')"),
                await tx.fetch_value("SELECT current_setting('transaction_isolation')"),
                await tx.fetch_value("SELECT current_setting('transaction_read_only')"),
                await tx.fetch_value("SELECT count(*) FROM shop.note"),
            )
        )

    for tenant in ("7", "8", "8"):
        await shop.conn.execute("INSERT INTO shop.note VALUES (%s, 'x')", [tenant])
    try:
        for dirt in (
            "SET search_path = nowhere",
            "SET app.tenant = '8'",
            "CREATE TEMP TABLE IF NOT EXISTS note (tenant text)",
            "SET default_transaction_isolation = 'serializable'",
            "SET default_transaction_read_only = on",
        ):
            await tell_every_session(pooled_dsn, dirt)
        for _ in range(2 * POOL_SIZE):
            assert await run(app, look, tenant="7") is None
    finally:
        for cure in ("RESET ALL", "DISCARD TEMP"):
            await tell_every_session(pooled_dsn, cure)
    assert set(found) == {('"$user", public', None, "7", "read committed", "off", 1)}


async def test_what_a_job_commits_by_itself_for_the_session_does_not_reach_the_next_job(
    app: AioQueue, pooled_dsn: str, shop: Session
) -> None:
    # The one thing that a stranger can meet: in that moment the session is the pooler's again, and nobody may follow it.
    assert "broke its transaction" in str(await run(app, sql("SET app.tenant = '8'", "SET search_path = shop", "COMMIT")))
    found: list[Any] = []

    async def look(tx: JobTransaction) -> None:
        found.append(await tx.fetch_value("SELECT current_setting('app.tenant') || current_setting('search_path')"))

    try:
        for _ in range(2 * POOL_SIZE):
            assert await run(app, look, tenant="7") is None
    finally:
        await tell_every_session(pooled_dsn, "RESET ALL")  # no job may have come by that session
    assert set(found) == {'7"$user", public'}


async def test_a_pooler_that_resets_after_each_transaction_keeps_even_that_from_strangers(
    shop: Session, worker_dsn: str, schema: str
) -> None:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(
        worker_dsn, default_pool_size=POOL_SIZE, server_reset_query_always=1, server_reset_query="DISCARD ALL"
    ) as pooler:
        dsn = pooler.dsn(worker_dsn)
        app = AioQueue(dsn, schema=schema, worker=WorkerSettings(poll=0.05, tick=0.05))
        await run(app, sql("SET app.tenant = '8'", "COMMIT"))
        tenants = "SELECT coalesce(current_setting('app.tenant', true), '')"
        assert await ask_every_session(dsn, tenants) == [""] * POOL_SIZE
