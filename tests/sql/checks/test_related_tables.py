"""related_tables: all relations by which a tenant table's rows can be reached: up to what it is a part of, then all below."""

import pytest

from tests.doctor.conftest import Execute
from tests.sql.checks.conftest import Ask
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

TREES = (
    "CREATE TABLE shop.root (id int, day int) PARTITION BY RANGE (id)",
    "CREATE TABLE shop.branch PARTITION OF shop.root FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (day)",
    'CREATE TABLE shop."Odd ""Leaf" PARTITION OF shop.branch DEFAULT',
    "CREATE TABLE shop.other_branch PARTITION OF shop.root DEFAULT",
    "CREATE TABLE shop.mother (id int)",
    "CREATE TABLE shop.father (id int)",
    "CREATE TABLE shop.child () INHERITS (shop.mother, shop.father)",
    "CREATE TABLE shop.grandchild () INHERITS (shop.child)",
    "CREATE TABLE shop.sister () INHERITS (shop.father)",
    "CREATE TABLE shop.alone (id int)",
    "CREATE VIEW shop.seen AS SELECT * FROM shop.alone",
    "CREATE INDEX ON shop.root (id)",
)
TREE = {"shop.root", "shop.branch", 'shop."Odd ""Leaf"', "shop.other_branch"}
FAMILY = {"shop.mother", "shop.father", "shop.child", "shop.grandchild", "shop.sister"}


@pytest.mark.parametrize(
    ("tables", "related"),
    [
        (['shop."Odd ""Leaf"'], TREE),
        (["shop.root"], TREE),
        (["shop.child"], FAMILY),
        (["shop.grandchild"], FAMILY),
        (["shop.mother"], FAMILY - {"shop.father", "shop.sister"}),
        (["shop.alone"], {"shop.alone"}),
        (["shop.other_branch", "shop.sister"], TREE | FAMILY - {"shop.mother"}),
        ([], set()),
    ],
)
async def test_what_is_above_and_all_below(
    ask: Ask, shop: Execute, superuser: Session, tables: list[str], related: set[str]
) -> None:
    """Below what was given or is above it: of a mother's child, no other parent."""
    await shop(*TREES)
    found = [number for (number,) in await ask("related_tables", tables=tables)]
    assert found == sorted(set(found))
    assert {await superuser.value("SELECT %s::bigint::regclass::text", number) for number in found} == related
