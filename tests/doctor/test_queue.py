"""Faults about the queue's own tables: policies, connections, vacuum, jobs that nobody runs, the schema's version."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from psycopg import AsyncConnection, sql

from aioqueue.doctor import id_times, vacuum
from aioqueue.doctor.examine import examine
from aioqueue.finding import Finding, Severity
from aioqueue.sql import migrations, tables
from aioqueue.store import Store
from tests.doctor.conftest import Examine, Execute, Start, codes, examination
from tests.doctor.conftest import connection as connect
from tests.kit import until_true
from tests.postgres import Database
from tests.sql.engine import Session, entry
from tests.sql.ranges import id_of

pytestmark = pytest.mark.anyio
Quote = Callable[[str], str]


@pytest.fixture
def own(schema: str) -> Quote:
    """A function that quotes a table of the queue's."""
    return lambda table: sql.Identifier(schema, table).as_string(None)


async def test_the_list_of_own_tables_is_that_of_the_schema(owner: AsyncConnection, schema: str) -> None:
    cursor = await owner.execute(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relkind IN ('r', 'p')",
        [schema],
    )
    found = {name for (name,) in await cursor.fetchall()}
    assert {name for name in found if not name.startswith(("job_", "outcome_", "attempt_"))} <= tables()
    assert migrations()
    assert {"job", "live", "worker", "schema_version"} <= tables() & found


@pytest.mark.parametrize("role", ["worker", "owner"])
async def test_a_policy_on_a_table_of_the_queue(look: Examine, start: Start, shop: Execute, own: Quote, role: str) -> None:
    """With the tenant setting in it, too: it makes no tenant table of the queue's."""
    await shop(
        f"CREATE POLICY tenants_only ON {own('job')} USING (tenant = current_setting('app.tenant'))",
        f"ALTER TABLE {own('job')} ENABLE ROW LEVEL SECURITY",
    )
    try:
        report = await look(role)
        (finding,) = report.findings
        assert (finding.code, finding.severity, report.wrong) == ("policy-on-queue", Severity.ERROR, True)
        assert "policy tenants_only" in finding.what and "table job" in finding.what
        assert codes(await start()) == ["policy-on-queue"]
        await shop(finding.fix)
        assert codes(await look(role)) == []
    finally:
        await shop(f"DROP POLICY IF EXISTS tenants_only ON {own('job')}", f"ALTER TABLE {own('job')} DISABLE ROW LEVEL SECURITY")


async def test_row_level_security_without_a_policy_on_a_partition(look: Examine, shop: Execute, own: Quote) -> None:
    await shop(f"ALTER TABLE {own('outcome_default')} ENABLE ROW LEVEL SECURITY")
    (finding,) = (await look()).findings
    assert finding.code == "policy-on-queue"
    assert "outcome_default" in finding.what
    await shop(finding.fix)
    assert codes(await look()) == []


async def test_other_tables_in_the_queues_schema_are_tenant_tables(look: Examine, shop: Execute, schema: str, own: Quote) -> None:
    """Whoever keeps the queue among tables of its own may have policies on those."""
    await shop(
        f"CREATE TABLE {own('customers')} (t text)",
        f"CREATE POLICY p ON {own('customers')} USING (t = current_setting('app.tenant'))",
    )
    try:
        assert codes(await look()) == ["rls-off"]
    finally:
        await shop(f"DROP TABLE {own('customers')}")


# -- connections ----------------------------------------------------------------------------------------------------------


async def register(database: Database, schema: str, number: int, connections: int | None) -> None:
    async with connect(database.dsn("worker")) as conn:
        for identity in range(number):
            await Store(schema).register_worker(
                conn, worker=identity + 1, host="h", pid=1, version="0", queues=["default"], concurrency=1, lease=60, tasks=[],
                connections=connections,
            )  # fmt: skip


async def test_workers_that_need_more_than_the_server_has(
    look: Examine, database: Database, schema: str, owner: AsyncConnection
) -> None:
    """Thirty workers with three each fit 197; with seven each they do not."""
    await register(database, schema, 30, 3)
    report = await look()
    assert codes(report) == []
    assert report.facts["connections"]["need"] == 90
    assert report.facts["connections"]["limits"] == {"the server": 197}
    await owner.execute(sql.SQL("UPDATE {} SET connections = 7").format(sql.Identifier(schema, "worker")))
    for role in ("worker", "owner"):
        (finding,) = (await look(role)).findings
        assert (finding.code, finding.severity) == ("connection-budget", Severity.ERROR)
        assert "need up to 210 connections" in finding.what and "allows 197" in finding.what
    await owner.execute(sql.SQL("UPDATE {} SET lease_until = '2020-01-01Z'").format(sql.Identifier(schema, "worker")))
    assert codes(await look()) == [], "the dead need none"


async def test_workers_that_fit_only_without_the_others(look: Examine, database: Database, schema: str) -> None:
    await register(database, schema, 1, 196)
    async with connect(database.dsn("owner")), connect(database.dsn("client")):
        (finding,) = (await look()).findings
    assert (finding.code, finding.severity) == ("connection-budget", Severity.WARNING)


async def test_a_worker_that_does_not_say_what_it_takes(look: Examine, database: Database, schema: str) -> None:
    await register(database, schema, 2, None)
    assert (await look()).facts["connections"]["need"] == 12


@pytest.mark.parametrize(
    ("limit", "name", "reset"),
    [
        (
            "ALTER ROLE aioqueue_worker CONNECTION LIMIT 20",
            "role aioqueue_worker",
            "ALTER ROLE aioqueue_worker CONNECTION LIMIT -1",
        ),
        ("ALTER DATABASE {} CONNECTION LIMIT 20", "database {}", "ALTER DATABASE {} CONNECTION LIMIT -1"),
    ],
)
async def test_the_limits_of_role_and_database(
    look: Examine, boss: Execute, database: Database, schema: str, limit: str, name: str, reset: str
) -> None:
    await register(database, schema, 3, 7)
    await boss(limit.format(database.name))
    try:
        (finding,) = (await look()).findings
        assert finding.code == "connection-budget"
        assert f"{name.format(database.name)} allows 20" in finding.what
    finally:
        await boss(reset.format(database.name))
    assert codes(await look()) == []


# -- vacuum ---------------------------------------------------------------------------------------------------------------


async def test_autovacuum_off_for_a_table(look: Examine, shop: Execute, own: Quote) -> None:
    await shop(f"ALTER TABLE {own('live')} SET (autovacuum_enabled = off)")
    (finding,) = (await look()).findings
    assert (finding.code, ".live" in finding.what) == ("autovacuum-off", True)
    await shop(finding.fix)
    assert codes(await look()) == []


async def reloaded(database: Database, schema: str, enough: Callable[[list[Finding]], bool]) -> None:
    """Wait until the server has read its configuration anew."""
    async with examination(database, schema, "superuser") as made:

        async def read() -> bool:
            return enough(await vacuum.look(made))

        await until_true(read)


@pytest.mark.parametrize("setting", ["autovacuum", "track_counts"])
async def test_autovacuum_off_on_the_server(look: Examine, boss: Execute, setting: str, database: Database, schema: str) -> None:
    await boss(f"ALTER SYSTEM SET {setting} = off", "SELECT pg_reload_conf()")
    try:
        await reloaded(database, schema, bool)
        (finding,) = (await look()).findings
        assert (finding.code, "this server" in finding.what) == ("autovacuum-off", True)
    finally:
        await boss(f"ALTER SYSTEM RESET {setting}", "SELECT pg_reload_conf()")
        await reloaded(database, schema, lambda found: not found)


# -- ids and the DEFAULT partitions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["worker", "owner"])
async def test_ids_of_a_clock_that_is_ahead(look: Examine, boss: Execute, owner: AsyncConnection, schema: str, role: str) -> None:
    session = Session(owner, Store(schema))
    tomorrow = datetime.now(UTC) + timedelta(hours=12)
    await session.enqueue(id=id_of(tomorrow))
    assert codes(await look(role)) == [], "its range is made already"
    for days in (100, 300):
        await session.enqueue(id=id_of(datetime.now(UTC) + timedelta(days=days, minutes=1)))
    (finding,) = (await look(role)).findings
    assert (finding.code, finding.severity) == ("ids-of-the-future", Severity.WARNING)
    assert "2 jobs" in finding.what and "300 days ahead" in finding.what
    await session.rows("DELETE FROM aioqueue.job")
    assert codes(await look(role)) == []


async def test_a_default_partition_that_is_too_large_for_ranges_to_be_made(
    look: Examine, shop: Execute, own: Quote, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = await look()
    assert codes(report) == []
    monkeypatch.setattr(id_times, "LIMIT", report.facts["default_partition_bytes"] - 1)
    report = await look()
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.wrong) == ("default-partition-large", Severity.ADVICE, False)


# -- jobs that nobody runs ------------------------------------------------------------------------------------------------


@pytest.fixture
async def one(worker_conn: AsyncConnection, schema: str) -> Session:
    return Session(worker_conn, Store(schema))


@pytest.fixture
async def chief(owner: AsyncConnection, schema: str) -> Session:
    return Session(owner, Store(schema))


async def test_a_queue_that_nobody_serves(look: Examine, one: Session, chief: Session) -> None:
    await one.register()
    await one.enqueue(2, queue="left alone")
    await one.enqueue(1, queue="left alone", priority=1)
    await one.enqueue(1)
    assert codes(await look()) == [], "for a minute nobody minds"
    await chief.rows("UPDATE aioqueue.job SET created_at = created_at - interval '90 s'")
    await one.enqueue(1, queue="a:b")
    await chief.rows("UPDATE aioqueue.job SET created_at = created_at - interval '90 s' WHERE queue = 'a:b'")
    colon, finding = sorted((await look()).findings, key=lambda found: found.what)
    assert colon.fix.endswith("-q a:b:1"), "a colon needs a weight behind it"
    assert finding.code == "queue-unserved"
    assert "'left alone'" in finding.what and finding.fix.endswith("-q 'left alone'")


async def test_a_task_that_nobody_knows(look: Examine, one: Session) -> None:
    await one.enqueue(1, task="nobody")
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), "unknown task", d=60, s=True, u="nobody"))
    (finding,) = (await look()).findings
    assert (finding.code, "task 'nobody': 1 jobs" in finding.what) == ("task-unknown", True)


async def test_a_dead_worker_whose_jobs_nobody_takes(look: Examine, one: Session, chief: Session) -> None:
    await one.enqueue(1)
    worker = await one.register()
    await one.claim_one(worker)
    assert codes(await look()) == []
    await chief.end_lease(worker)
    (finding,) = (await look()).findings
    assert (finding.code, "host:1 is dead and still holds 1 jobs" in finding.what) == ("dead-worker-holds-jobs", True)


# -- the schema -----------------------------------------------------------------------------------------------------------


async def test_a_schema_that_does_not_fit(look: Examine, shop: Execute, own: Quote, boss: Execute) -> None:
    """All that does not need it is looked at nevertheless."""
    await boss(f"UPDATE {own('schema_version')} SET serves = 1000, version = version + 1000")
    try:
        await shop("GRANT TRUNCATE ON shop.orders TO aioqueue_worker")
        assert codes(await look("worker")) == ["schema-version", "truncate-granted"]
        (finding, _) = (await look("worker")).findings
        assert "install a newer aioqueue-pg" in finding.fix
    finally:
        await boss(f"UPDATE {own('schema_version')} SET serves = 1, version = version - 1000")


async def test_no_schema_at_all(shop: Execute, database: Database) -> None:
    async with examination(database, "elsewhere", "worker") as made:
        (finding,) = (await examine(made)).findings
    assert (finding.code, "python -m aioqueue migrate --schema elsewhere" in finding.fix) == ("schema-version", True)
