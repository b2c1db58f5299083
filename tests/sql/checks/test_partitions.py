"""partitions: what holds a tenant table's rows and can be used past its policies; by whom."""

import pytest

from tests.doctor.conftest import Execute
from tests.sql.checks.conftest import Ask, MakeRole, Rows

pytestmark = pytest.mark.anyio
WORKER = "aioqueue_worker"


async def of_a_partition(ask: Ask, *roles: str) -> Rows:
    """What is found of shop.invoices and its partition."""
    related = ["shop.invoices", "shop.invoices_1"]
    return await ask("partitions", tables=["shop.invoices"], related=related, roles=list(roles or [WORKER]))


FOUND = [("shop.invoices_1", WORKER, WORKER, "shop.invoices")]


@pytest.mark.parametrize(
    "right", ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "SELECT (id)", "INSERT (id)", "UPDATE (tenant_id)"]
)
async def test_each_right_to_use_it(ask: Ask, shop: Execute, right: str) -> None:
    assert await of_a_partition(ask) == []
    await shop(f"GRANT {right} ON shop.invoices_1 TO {WORKER}")
    assert await of_a_partition(ask) == FOUND
    assert await of_a_partition(ask, "aioqueue_client", "postgres") == []
    await shop(f"REVOKE USAGE ON SCHEMA shop FROM {WORKER}")
    assert await of_a_partition(ask) == [], "it does not come there"


@pytest.mark.parametrize(
    ("policy", "opens"),
    [
        (None, False),
        ("USING (true)", True),
        ("FOR INSERT WITH CHECK (true)", True),
        (f"TO {WORKER} USING (true)", True),
        ("TO aioqueue_client USING (true)", False),
        ("AS RESTRICTIVE USING (true)", False),
    ],
)
async def test_row_level_security_of_its_own(ask: Ask, shop: Execute, policy: str | None, opens: bool) -> None:
    """Without a policy that lets the role in, no row is seen."""
    await shop(f"GRANT SELECT ON shop.invoices_1 TO {WORKER}", "ALTER TABLE shop.invoices_1 ENABLE ROW LEVEL SECURITY")
    if policy is not None:
        await shop(f"CREATE POLICY p ON shop.invoices_1 {policy}")
    assert await of_a_partition(ask) == (FOUND if opens else [])


async def test_one_that_is_a_tenant_table_itself_and_what_is_above(ask: Ask, shop: Execute, make_role: MakeRole) -> None:
    """Names as they are and as they are written; a group's rights are those of who inherits them."""
    await make_role('Odd "one')
    await make_role("heir", 'IN ROLE "Odd ""one"')
    await make_role("no_heir", 'NOINHERIT IN ROLE "Odd ""one"')
    await shop(
        'CREATE TABLE shop."Odd ""Papers" (id int, tenant_id int)',
        'ALTER TABLE shop.orders INHERIT shop."Odd ""Papers"',
        'GRANT USAGE ON SCHEMA shop TO "Odd ""one"',
        'GRANT SELECT ON shop."Odd ""Papers", shop.orders TO "Odd ""one"',
    )
    papers = 'shop."Odd ""Papers"'
    related = ["shop.orders", papers]
    roles = [WORKER, 'Odd "one', "heir", "no_heir"]
    assert sorted(await ask("partitions", tables=["shop.orders"], related=related, roles=roles)) == [
        (papers, 'Odd "one', '"Odd ""one"', None),
        (papers, "heir", "heir", None),
    ]
    assert await ask("partitions", tables=related, related=related, roles=roles) == []
    assert await ask("partitions", tables=[], related=[], roles=roles) == []
