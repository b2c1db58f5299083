"""tenant_policies: which policies read the tenant setting, themselves or by a function; not those on the queue's own tables."""

import pytest

from tests.doctor.conftest import Execute
from tests.postgres import Database
from tests.sql.checks.conftest import Ask
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, for what is made in the queue's schema."""
    return own_database


async def found(ask: Ask, superuser: Session, **facts: object) -> list[tuple[str, str]]:
    """Table and policy of each row."""
    rows = await ask("tenant_policies", **facts)
    assert [table for _, table in rows] == sorted(table for _, table in rows)
    name = "SELECT polrelid::regclass::text, polname::text FROM pg_policy WHERE oid = %s AND polrelid = %s"
    return sorted([(await superuser.rows(name, policy, table))[0] for policy, table in rows])


SHOPS = [("shop.invoices", "own"), ("shop.orders", "own")]


async def test_each_way_to_read_it(ask: Ask, shop: Execute, superuser: Session) -> None:
    """In USING or WITH CHECK, in a function of any body; a policy that does both is one row."""
    await shop(
        "CREATE FUNCTION shop.by_body() RETURNS text LANGUAGE sql STABLE RETURN current_setting('App.Tenant', true)",
        "CREATE FUNCTION shop.by_text() RETURNS text LANGUAGE plpgsql STABLE AS"
        " $$ BEGIN RETURN current_setting('app.TENANT', true); END $$",
        'CREATE TABLE shop."Odd ""Table" (t text)',
        'CREATE POLICY "its own" ON shop."Odd ""Table" FOR INSERT WITH CHECK (t = current_setting(\'APP.tenant\'))',
        "CREATE POLICY by_body ON shop.colours USING (name = shop.by_body())",
        "CREATE POLICY by_text ON shop.colours USING (true) WITH CHECK (name = shop.by_text())",
        "CREATE POLICY twice ON shop.colours USING (name = shop.by_text() OR name = current_setting('app.tenant'))",
    )
    assert await found(ask, superuser) == [
        ('shop."Odd ""Table"', "its own"),
        *[("shop.colours", name) for name in ("by_body", "by_text", "twice")],
        *SHOPS,
    ]
    assert await found(ask, superuser, setting="APP.Tenant") == await found(ask, superuser)


async def test_what_does_not_read_it(ask: Ask, shop: Execute, superuser: Session) -> None:
    """Other settings, and such whose names contain its name; a function that no policy calls; a policy without any."""
    await shop(
        "CREATE FUNCTION shop.not_called() RETURNS text LANGUAGE sql STABLE RETURN current_setting('app.tenant', true)",
        "CREATE FUNCTION shop.other() RETURNS text LANGUAGE sql STABLE RETURN current_setting('app.tenant_kind', true)",
        "CREATE POLICY longer ON shop.colours USING (name = current_setting('app.tenant_kind'))",
        "CREATE POLICY longer_too ON shop.colours USING (name = current_setting('my.app.tenant'))",
        "CREATE POLICY by_function ON shop.colours USING (name = shop.other())",
        "CREATE POLICY everything ON shop.colours USING (true)",
    )
    assert await found(ask, superuser) == SHOPS
    assert await found(ask, superuser, setting="app.tenant_kind") == [("shop.colours", "by_function"), ("shop.colours", "longer")]
    assert await found(ask, superuser, setting="app.customer") == []


async def test_the_queue_s_own_tables_are_left_out_and_no_others(ask: Ask, shop: Execute, superuser: Session) -> None:
    """Not a table of the user's in the queue's schema, nor one that is called as one of the queue's."""
    condition = "USING (tenant = current_setting('app.tenant', true))"
    await shop("CREATE TABLE shop.job (tenant text)", f"CREATE POLICY own ON shop.job {condition}")
    await superuser.rows("CREATE TABLE aioqueue.mine (tenant text)")
    await superuser.rows(f"CREATE POLICY own ON aioqueue.mine {condition}")
    await superuser.rows(f"CREATE POLICY own ON aioqueue.job {condition}")
    mine = await superuser.value("SELECT 'aioqueue.mine'::regclass::text")
    assert await found(ask, superuser) == sorted([*SHOPS, ("shop.job", "own"), (mine, "own")])
