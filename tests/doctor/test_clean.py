"""A database in which nothing is wrong: no finding, whoever looks; and what is shown all the same."""

import pytest

from tests.doctor.conftest import Examine, Execute, Start

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("role", ["worker", "owner", "superuser"])
async def test_nothing_is_found(look: Examine, role: str) -> None:
    report = await look(role)
    assert report.findings == ()
    assert not report.wrong
    assert report.unseen == ()
    assert report.facts["connections"]["limits"].keys() == {"the server"}
    assert report.facts["notify_seconds"] > 0


async def test_nothing_is_found_at_a_start(start: Start) -> None:
    assert await start() == []
    assert await start(strict=True) == []


async def test_tables_and_settings_that_have_nothing_to_do_with_tenants(look: Examine, shop: Execute) -> None:
    """No policy at all, another setting's policies, a view of no tenant table, a restrictive policy."""
    await shop(
        "CREATE TABLE shop.other (kind text)",
        "ALTER TABLE shop.other ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY all_of_it ON shop.other USING (kind = current_setting('app.tenant_kind', true))",
        "GRANT SELECT, TRUNCATE ON shop.other TO aioqueue_worker",
        "CREATE VIEW shop.names AS SELECT name FROM shop.colours",
        "GRANT SELECT ON shop.names TO aioqueue_worker",
        "CREATE POLICY positive ON shop.orders AS RESTRICTIVE USING (id > 0)",
        "CREATE POLICY nothing ON shop.orders USING (false)",
        "CREATE POLICY theirs ON shop.orders TO aioqueue_client USING (true)",
    )
    assert (await look()).findings == ()
