"""tenant_tables: where row-level security is off, does not hold for the owner, or a TRUNCATE goes past it."""

import pytest

from tests.doctor.conftest import Execute
from tests.sql.checks.conftest import Ask, MakeRole, Rows

pytestmark = pytest.mark.anyio
WORKER, OWNER = "aioqueue_worker", "aioqueue_owner"


async def of_orders(ask: Ask, *roles: str) -> Rows:
    return await ask("tenant_tables", tables=["shop.orders"], roles=list(roles or [WORKER]))


async def test_a_row_for_each_table_and_role_where_it_is_off(ask: Ask, shop: Execute) -> None:
    assert await ask("tenant_tables", tables=["shop.invoices", "shop.orders"], roles=[WORKER, "aioqueue_client"]) == []
    await shop('ALTER TABLE shop.orders RENAME TO "Odd ""Orders"', 'ALTER TABLE shop."Odd ""Orders" DISABLE ROW LEVEL SECURITY')
    odd = 'shop."Odd ""Orders"'
    given = {"tables": ["shop.invoices", odd, "shop.colours"], "roles": [WORKER, "aioqueue_client", "postgres"]}
    assert await ask("tenant_tables", **given) == [
        (table, OWNER, role, False, False, None) for table in (odd, "shop.colours") for role in ("aioqueue_client", WORKER)
    ]
    assert await ask("tenant_tables", tables=[], roles=[WORKER]) == []


async def test_the_owner_and_its_members_are_free_where_it_is_not_forced(
    ask: Ask, shop: Execute, boss: Execute, make_role: MakeRole
) -> None:
    """Also one who does not inherit: SET ROLE gives it. All of them may TRUNCATE, as the owner's own right."""
    await make_role("Shop keeper")
    await make_role("member", 'IN ROLE "Shop keeper"')
    await make_role("no_heir", 'NOINHERIT IN ROLE "Shop keeper"')
    roles = ["Shop keeper", "member", "no_heir", WORKER]
    await boss(
        'ALTER TABLE shop.orders OWNER TO "Shop keeper"',
        "CREATE TABLE shop.never_granted (id int)",
        'ALTER TABLE shop.never_granted OWNER TO "Shop keeper"',
        "ALTER TABLE shop.never_granted ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    )
    truncates = ['"Shop keeper"']
    assert await of_orders(ask, *roles) == [
        ("shop.orders", "Shop keeper", "Shop keeper", True, False, truncates),
        ("shop.orders", "Shop keeper", "member", True, False, truncates),
    ]
    assert await ask("tenant_tables", tables=["shop.never_granted"], roles=["member", "no_heir"]) == [
        ("shop.never_granted", "Shop keeper", "member", True, False, truncates)
    ]
    await boss('REVOKE TRUNCATE ON shop.orders FROM "Shop keeper"', "ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY")
    assert await of_orders(ask, *roles) == [
        ("shop.orders", "Shop keeper", role, True, True, None) for role in ("Shop keeper", "member", "no_heir")
    ]


async def test_by_whose_right_it_may_truncate(ask: Ask, shop: Execute, make_role: MakeRole) -> None:
    """Its own, everybody's, a group's that it inherits from; each once."""
    await make_role("a group", f"ROLE {WORKER}")
    await make_role("no_heirs")
    await make_role("no_heir", "NOINHERIT IN ROLE no_heirs")
    await shop('GRANT TRUNCATE ON shop.orders TO "a group", no_heirs', "GRANT TRUNCATE ON shop.invoices TO PUBLIC")
    assert await of_orders(ask, WORKER, "no_heir", "aioqueue_client") == [
        ("shop.orders", OWNER, WORKER, True, False, ['"a group"'])
    ]
    await shop(f"GRANT TRUNCATE ON shop.orders TO PUBLIC, {WORKER}")
    assert await of_orders(ask, WORKER, "aioqueue_client") == [
        ("shop.orders", OWNER, "aioqueue_client", True, False, ["PUBLIC"]),
        ("shop.orders", OWNER, WORKER, True, False, ['"a group"', "PUBLIC", WORKER]),
    ]
