"""views: which views read a tenant table as somebody else than who asks, as whom, and whether policies hold for that one."""

import pytest

from tests.doctor.conftest import Execute
from tests.sql.checks.conftest import Ask, MakeRole, Rows

pytestmark = pytest.mark.anyio
WORKER, OWNER = "aioqueue_worker", "aioqueue_owner"
ORDERS = "shop.orders"


async def over(ask: Ask, *related: str, roles: tuple[str, ...] = (WORKER,)) -> Rows:
    return await ask("views", related=related or [ORDERS], roles=list(roles))


def seen(
    view: str, *, owner: str = OWNER, opened: str | None = None, table: str = ORDERS, materialized: bool = False
) -> tuple[object, ...]:
    """What the worker's role is told of a view."""
    return (view, materialized, WORKER, WORKER, owner, opened is not None, opened, table)


@pytest.mark.parametrize(
    ("change", "owner", "is_open"),
    [
        ("SELECT 1", OWNER, False),
        (f"ALTER TABLE {ORDERS} NO FORCE ROW LEVEL SECURITY", OWNER, True),
        (f"ALTER TABLE {ORDERS} DISABLE ROW LEVEL SECURITY", OWNER, True),
        ("ALTER VIEW shop.v OWNER TO bypasses", "bypasses", True),
        ("ALTER VIEW shop.v OWNER TO mighty", "mighty", True),
        ("ALTER VIEW shop.v OWNER TO plain; ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY", "plain", False),
        ("ALTER VIEW shop.v OWNER TO heir; ALTER TABLE shop.orders NO FORCE ROW LEVEL SECURITY", "heir", True),
    ],
)
async def test_as_whom_it_reads_and_whether_policies_hold_for_that_one(
    ask: Ask, shop: Execute, boss: Execute, make_role: MakeRole, change: str, owner: str, is_open: bool
) -> None:
    await make_role("bypasses", "BYPASSRLS")
    await make_role("mighty", "SUPERUSER NOBYPASSRLS")
    await make_role("plain")
    await make_role("heir", f"IN ROLE {OWNER}")
    await shop("CREATE VIEW shop.v AS SELECT * FROM shop.orders", f"GRANT SELECT ON shop.v TO {WORKER}")
    await boss(*change.split(";"))
    assert await over(ask) == [seen("shop.v", owner=owner, opened=ORDERS if is_open else None)]


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("security_invoker", False),
        ("security_invoker = on", False),
        ("security_invoker = off", True),
        ("security_barrier = on", True),
    ],
)
async def test_one_that_reads_as_who_asks(ask: Ask, shop: Execute, option: str, found: bool) -> None:
    await shop(f"CREATE VIEW shop.v WITH ({option}) AS SELECT * FROM shop.orders", f"GRANT SELECT ON shop.v TO {WORKER}")
    assert await over(ask) == ([seen("shop.v")] if found else [])


@pytest.mark.parametrize(
    "right", ["SELECT", "INSERT", "UPDATE", "DELETE", "SELECT (id)", "INSERT (id)", "UPDATE (id)", "TRUNCATE"]
)
async def test_each_right_to_use_it(ask: Ask, shop: Execute, right: str) -> None:
    await shop("CREATE VIEW shop.v AS SELECT * FROM shop.orders")
    assert await over(ask) == []
    await shop(f"GRANT {right} ON shop.v TO {WORKER}")
    assert await over(ask) == ([] if right == "TRUNCATE" else [seen("shop.v")]), "a view cannot be truncated"
    assert await over(ask, roles=("aioqueue_client", "postgres")) == []
    await shop(f"REVOKE USAGE ON SCHEMA shop FROM {WORKER}")
    assert await over(ask) == []


async def test_views_of_views_and_what_keeps_rows(ask: Ask, shop: Execute, boss: Execute, make_role: MakeRole) -> None:
    """Of the innermost that is no invoker's is the reader; all that a view reads counts."""
    await make_role("Odd one")
    await boss(f"GRANT ALL ON SCHEMA shop TO {OWNER}", 'GRANT USAGE ON SCHEMA shop TO "Odd one"')
    await shop(
        "ALTER TABLE shop.invoices NO FORCE ROW LEVEL SECURITY",
        "CREATE VIEW shop.a_of_invoker WITH (security_invoker) AS SELECT * FROM shop.orders",
        "CREATE VIEW shop.b AS SELECT * FROM shop.a_of_invoker",
        "CREATE VIEW shop.c WITH (security_invoker) AS SELECT * FROM shop.b",
        'CREATE VIEW shop."D ""odd" AS SELECT o.id FROM shop.c o, shop.invoices, shop.invoices_1',
        "CREATE MATERIALIZED VIEW shop.e AS SELECT * FROM shop.b",
        "CREATE VIEW shop.f AS SELECT * FROM shop.e",
        "CREATE VIEW shop.g AS SELECT * FROM shop.colours",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA shop TO {WORKER}",
    )
    await boss('ALTER VIEW shop."D ""odd" OWNER TO "Odd one"', 'ALTER VIEW shop.a_of_invoker OWNER TO "Odd one"')
    odd = 'shop."D ""odd"'
    assert sorted(await over(ask, ORDERS, "shop.invoices", "shop.invoices_1")) == sorted(
        [
            seen("shop.b"),
            seen(odd, owner=OWNER),
            seen(odd, owner="Odd one", opened="shop.invoices_1", table="shop.invoices"),
            seen("shop.e", materialized=True),
            seen("shop.f"),
        ]
    )
    await boss('GRANT SELECT ON shop.b TO "Odd one"')
    assert await over(ask, roles=("Odd one",)) == [
        (odd, False, "Odd one", '"Odd one"', OWNER, False, None, ORDERS),
        ("shop.b", False, "Odd one", '"Odd one"', OWNER, False, None, ORDERS),
    ]
