"""extra_policies: permissive policies that open a tenant table to a role, and those that open nothing."""

import pytest

from tests.doctor.conftest import Execute
from tests.sql.checks.conftest import Ask, MakeRole

pytestmark = pytest.mark.anyio
OWN = [("shop.orders", "own")]
WORKER = {"tables": ["shop.orders"], "policies": OWN, "roles": ["aioqueue_worker"]}
BY_SETTING = "(tenant_id::text = current_setting('app.tenant', true))"


async def test_each_command_and_what_it_allows(ask: Ask, shop: Execute) -> None:
    assert await ask("extra_policies", **WORKER) == []
    await shop(
        "CREATE POLICY a ON shop.orders USING (true)",
        "CREATE POLICY b ON shop.orders FOR SELECT USING (id < 10)",
        "CREATE POLICY c ON shop.orders FOR INSERT WITH CHECK (id > 10)",
        "CREATE POLICY d ON shop.orders FOR UPDATE USING (false) WITH CHECK (true)",
        'CREATE POLICY "it\'s open" ON shop.orders FOR DELETE TO aioqueue_client, aioqueue_worker USING (true)',
    )
    assert await ask("extra_policies", **WORKER) == [
        ("shop.orders", '"it\'s open"', "aioqueue_worker", "DELETE", "true"),
        ("shop.orders", "a", "aioqueue_worker", "ALL", "true"),
        ("shop.orders", "b", "aioqueue_worker", "SELECT", "(id < 10)"),
        ("shop.orders", "c", "aioqueue_worker", "INSERT", "(id > 10)"),
        ("shop.orders", "d", "aioqueue_worker", "UPDATE", "false"),
    ]


async def test_what_opens_nothing(ask: Ask, shop: Execute, boss: Execute) -> None:
    """Allows nothing, is restrictive, for others, on a table without row-level security, on no tenant table."""
    await shop(
        "CREATE POLICY a ON shop.orders USING (false)",
        "CREATE POLICY b ON shop.orders FOR INSERT WITH CHECK (false)",
        "CREATE POLICY c ON shop.orders AS RESTRICTIVE USING (true)",
        "CREATE POLICY d ON shop.orders TO aioqueue_client USING (true)",
        "CREATE POLICY e ON shop.colours USING (true)",
        "CREATE POLICY f ON shop.invoices USING (true)",
        "ALTER TABLE shop.invoices DISABLE ROW LEVEL SECURITY",
    )
    policies = [*OWN, ("shop.invoices", "own")]
    given = {"tables": ["shop.orders", "shop.invoices"], "policies": policies, "roles": ["aioqueue_worker", "postgres"]}
    assert await ask("extra_policies", **given) == []


async def test_a_group_s_policy_holds_for_those_who_inherit(ask: Ask, shop: Execute, boss: Execute, make_role: MakeRole) -> None:
    await make_role("a group")
    await make_role("heir", 'IN ROLE "a group"')
    await make_role("no_heir", 'NOINHERIT IN ROLE "a group"')
    await shop('CREATE POLICY theirs ON shop.orders TO "a group" USING (true)')
    given = {**WORKER, "roles": ["a group", "heir", "no_heir", "aioqueue_worker"]}
    assert [row[2] for row in await ask("extra_policies", **given)] == ["a group", "heir"]


@pytest.mark.parametrize(
    ("restrictive", "left"),
    [
        (f"AS RESTRICTIVE USING {BY_SETTING}", []),
        (f"AS RESTRICTIVE FOR SELECT USING {BY_SETTING}", ["all"]),
        (f"AS RESTRICTIVE TO aioqueue_client USING {BY_SETTING}", ["all", "some"]),
        (f"AS PERMISSIVE USING {BY_SETTING}", ["all", "some"]),
    ],
)
async def test_a_restrictive_policy_by_the_setting_narrows_the_same_commands(
    ask: Ask, shop: Execute, restrictive: str, left: list[str]
) -> None:
    await shop(
        'CREATE POLICY "all" ON shop.orders USING (true)',
        'CREATE POLICY "some" ON shop.orders FOR SELECT USING (true)',
        f"CREATE POLICY narrow ON shop.orders {restrictive}",
    )
    given = {**WORKER, "policies": [*OWN, ("shop.orders", "narrow")]}
    assert [row[1].strip('"') for row in await ask("extra_policies", **given)] == left
    assert [row[1].strip('"') for row in await ask("extra_policies", **WORKER) if row[1] != "narrow"] == ["all", "some"], (
        "one that does not go by the setting narrows nothing"
    )
