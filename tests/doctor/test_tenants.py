"""Each fault that keeps tenants from being kept apart, made on its own: that finding, and no other, for worker and owner."""

import pytest

from aioqueue.finding import Severity
from tests.doctor.conftest import Examine, Execute, Start, codes
from tests.postgres import Database

pytestmark = pytest.mark.anyio

FAULTS = {
    "bypassrls": ("role-bypasses-rls", ["ALTER ROLE aioqueue_worker BYPASSRLS"], ["ALTER ROLE aioqueue_worker NOBYPASSRLS"]),
    "superuser": ("role-bypasses-rls", ["ALTER ROLE aioqueue_worker SUPERUSER"], ["ALTER ROLE aioqueue_worker NOSUPERUSER"]),
    "member of one": (
        "role-bypasses-rls",
        ["CREATE ROLE mighty BYPASSRLS", "GRANT mighty TO aioqueue_worker"],
        ["DROP ROLE mighty"],
    ),
    "row-level security off": ("rls-off", ["ALTER TABLE shop.orders DISABLE ROW LEVEL SECURITY"], []),
    "the owner": (
        "owner-without-force",
        [
            "ALTER TABLE shop.orders OWNER TO aioqueue_worker",
            "REVOKE TRUNCATE ON shop.orders FROM aioqueue_worker",
            "ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY",
        ],
        [],
    ),
    "member of the owner": (
        "owner-without-force",
        [
            "CREATE ROLE shopkeeper",
            "GRANT shopkeeper TO aioqueue_worker",
            "ALTER TABLE shop.orders OWNER TO shopkeeper",
            "REVOKE TRUNCATE ON shop.orders FROM shopkeeper",
            "ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY",
        ],
        ["DROP OWNED BY shopkeeper", "DROP ROLE shopkeeper"],
    ),
    "truncate": ("truncate-granted", ["GRANT TRUNCATE ON shop.orders TO aioqueue_worker"], []),
    "truncate by everybody": ("truncate-granted", ["GRANT TRUNCATE ON shop.orders TO PUBLIC"], []),
    "a partition": ("partition-without-policy", ["GRANT SELECT ON shop.invoices_1 TO aioqueue_worker"], []),
    "a column of a partition": ("partition-without-policy", ["GRANT SELECT (id) ON shop.invoices_1 TO aioqueue_worker"], []),
    "a partition with an open policy": (
        "partition-without-policy",
        [
            "ALTER TABLE shop.invoices_1 ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY everything ON shop.invoices_1 USING (true)",
            "GRANT SELECT ON shop.invoices_1 TO aioqueue_worker",
        ],
        [],
    ),
    "a parent": (
        "partition-without-policy",
        ["CREATE TABLE shop.papers (id int, tenant_id int)", "ALTER TABLE shop.orders INHERIT shop.papers",
         "GRANT SELECT ON shop.papers TO aioqueue_worker"],
        [],
    ),
    "a view": (
        "view-without-invoker",
        ["ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY", "CREATE VIEW shop.seen AS SELECT * FROM shop.orders",
         "GRANT SELECT ON shop.seen TO aioqueue_worker"],
        [],
    ),
    "a view of a view": (
        "view-without-invoker",
        ["ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY",
         "CREATE VIEW shop.inner_one WITH (security_invoker = on) AS SELECT * FROM shop.orders",
         "CREATE VIEW shop.seen AS SELECT * FROM shop.inner_one", "GRANT SELECT ON shop.seen TO aioqueue_worker"],
        [],
    ),
    "a superuser's view": (
        "view-without-invoker",
        ["CREATE VIEW shop.seen AS SELECT * FROM shop.orders", "ALTER VIEW shop.seen OWNER TO postgres",
         "GRANT SELECT ON shop.seen TO aioqueue_worker"],
        [],
    ),
    "a view of a partition": (
        "view-without-invoker",
        ["CREATE VIEW shop.seen AS SELECT * FROM shop.invoices_1", "GRANT SELECT ON shop.seen TO aioqueue_worker"],
        [],
    ),
    "a materialized view": (
        "materialized-view",
        ["ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY", "CREATE MATERIALIZED VIEW shop.kept AS SELECT * FROM shop.orders",
         "GRANT SELECT ON shop.kept TO aioqueue_worker"],
        [],
    ),
    "a default of the role": (
        "tenant-default",
        ["ALTER ROLE aioqueue_worker SET app.tenant = '7'"],
        ["ALTER ROLE aioqueue_worker RESET app.tenant"],
    ),
    "a default of every role": ("tenant-default", ["ALTER ROLE ALL SET app.tenant = '7'"], ["ALTER ROLE ALL RESET app.tenant"]),
    "an open policy": ("policy-opens-table", ["CREATE POLICY everything ON shop.orders USING (true)"], []),
    "an open policy to write": ("policy-opens-table", ["CREATE POLICY more ON shop.orders FOR INSERT WITH CHECK (true)"], []),
    "a policy for some rows": ("policy-opens-table", ["CREATE POLICY old ON shop.orders FOR SELECT USING (id < 10)"], []),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_found_and_no_other_and_its_fix_mends_it(
    look: Examine, start: Start, shop: Execute, boss: Execute, fault: str
) -> None:
    """As the worker, as the owner, at a worker's start; then the first command of the fix, as it is printed."""
    code, commands, undo = FAULTS[fault]
    try:
        await boss(*commands)
        report = await look("worker")
        assert report.wrong
        assert codes(report) == codes(await look("owner")) == codes(await start()) == [code]
        if fault != "a partition with an open policy":  # there the command is one of two
            await boss(report.findings[0].fix.partition(";")[0])
            assert codes(await look("worker")) == []
    finally:
        await boss(*undo)


async def test_a_default_of_the_database(look: Examine, boss: Execute, database: Database, shop: Execute) -> None:
    name = database.name
    await boss(f"ALTER DATABASE {name} SET app.tenant = '7'")
    (finding,) = (await look()).findings
    assert (finding.code, finding.fix) == ("tenant-default", f"ALTER DATABASE {name} RESET app.tenant;")
    await boss(f"ALTER DATABASE {name} SET app.tenant = ''")
    assert codes(await look()) == [], "none is no tenant"


async def test_a_default_that_comes_with_the_connection(look: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c app.tenant=7")
    (finding,) = (await look()).findings
    assert (finding.code, "PGOPTIONS" in finding.fix) == ("tenant-default", True)


async def test_a_view_over_a_forced_table_is_advice(look: Examine, start: Start, shop: Execute) -> None:
    """Its owner is held to the policies: nothing leaks as long as they are forced."""
    await shop("CREATE VIEW shop.seen AS SELECT * FROM shop.orders", "GRANT SELECT ON shop.seen TO aioqueue_worker")
    report = await look()
    assert [(f.code, f.severity) for f in report.findings] == [("view-without-invoker", Severity.ADVICE)]
    assert not report.wrong
    assert await start() == []


async def test_another_setting(look: Examine, shop: Execute) -> None:
    await shop("ALTER TABLE shop.orders DISABLE ROW LEVEL SECURITY")
    assert codes(await look(setting="app.customer")) == [], "no table goes by it"
    await shop("CREATE POLICY theirs ON shop.colours USING (name = current_setting('app.customer'))")
    assert codes(await look(setting="App.Customer")) == ["rls-off"]


async def test_the_role_that_jobs_take_on_is_the_one_looked_at(look: Examine, shop: Execute, boss: Execute) -> None:
    await boss("CREATE ROLE clerk", "GRANT TRUNCATE ON shop.orders TO clerk", "ALTER ROLE aioqueue_worker BYPASSRLS")
    try:
        (finding,) = (await look(taken="clerk")).findings
        assert "role clerk may TRUNCATE" in finding.what
    finally:
        await boss("ALTER ROLE aioqueue_worker NOBYPASSRLS", "DROP OWNED BY clerk", "DROP ROLE clerk")


async def test_without_a_tenant_table_the_role_is_advice_unless_strict(
    look: Examine, start: Start, shop: Execute, boss: Execute
) -> None:
    await shop("DROP TABLE shop.invoices, shop.orders CASCADE")
    await boss("ALTER ROLE aioqueue_worker BYPASSRLS")
    try:
        report = await look()
        assert (codes(report), report.wrong, await start()) == (["role-bypasses-rls"], False, [])
        assert (await look(strict=True)).wrong
        assert codes(await start(strict=True)) == ["role-bypasses-rls"]
    finally:
        await boss("ALTER ROLE aioqueue_worker NOBYPASSRLS")


async def test_what_the_owner_sees_is_every_role_that_may_run_jobs(look: Examine, shop: Execute, boss: Execute) -> None:
    """By a group, too; not a client, and not the owner itself."""
    await boss(
        "CREATE ROLE night_shift LOGIN",
        "GRANT aioqueue_worker TO night_shift",
        "GRANT TRUNCATE ON shop.orders TO night_shift, aioqueue_client",
    )
    try:
        (finding,) = (await look("owner")).findings
        assert "night_shift" in finding.what
        assert codes(await look("worker")) == []
    finally:
        await boss("DROP OWNED BY night_shift", "DROP ROLE night_shift")


async def test_many_of_one_kind_are_counted(look: Examine, shop: Execute) -> None:
    for number in range(25):
        await shop(
            f"CREATE TABLE shop.t{number} (t text)",
            f"CREATE POLICY p ON shop.t{number} USING (t = current_setting('app.tenant'))",
        )
    report = await look()
    assert codes(report) == ["rls-off"] * 20
    assert report.findings[-1].what.endswith("(and 5 more)")


async def test_names_that_need_quotes(look: Examine, shop: Execute, boss: Execute) -> None:
    await shop(
        'CREATE TABLE shop."Odd ""Table" (t text)',
        'ALTER TABLE shop."Odd ""Table" ENABLE ROW LEVEL SECURITY',
        'CREATE POLICY own ON shop."Odd ""Table" USING (t = current_setting(\'app.tenant\'))',
        'CREATE POLICY "it\'s open" ON shop."Odd ""Table" USING (true)',
    )
    (finding,) = (await look()).findings
    await boss(finding.fix.partition(";")[0])
    assert codes(await look()) == []
