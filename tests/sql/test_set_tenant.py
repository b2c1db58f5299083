"""set_tenant: weight, limit and pause, each changed or kept; nothing is left of a tenant that is as all others."""

import psycopg
import pytest

from tests.sql.engine import Session, limit_key

pytestmark = pytest.mark.anyio
STANDS = (
    "SELECT coalesce(t.name, l.name), t.weight, l.max_running, l.paused FROM aioqueue.tenant t"
    " FULL JOIN (SELECT * FROM aioqueue.limits WHERE kind = 'tenant') l ON l.name = t.name"
)


async def test_what_is_kept_stays(one: Session) -> None:
    key = limit_key("tenant", "T")
    changes = one.store.set_tenant
    await changes(one.conn, "other", weight=9, max_running=99, paused=True)

    async def stands() -> list[tuple[object, ...]]:
        found = await one.rows(STANDS)
        assert ("other", 9, 99, True) in found
        return [row for row in found if row[0] != "other"]

    assert await changes(one.conn, "T", weight=3, keep=["max_running", "paused"]) == (True, key)
    assert await stands() == [("T", 3, None, None)]
    assert await changes(one.conn, "T", max_running=7, keep=["weight", "paused"]) == (False, key)
    assert await changes(one.conn, "T", paused=True, keep=["weight", "max_running"]) == (False, key)
    assert await stands() == [("T", 3, 7, True)]
    assert await changes(one.conn, "T", weight=3, max_running=8, keep=["paused"]) == (False, key)
    assert await stands() == [("T", 3, 8, True)]
    assert await changes(one.conn, "T") == (True, key)
    assert await stands() == []


@pytest.mark.parametrize(
    "values",
    [
        "'', 1, 1, false",
        "NULL, 1, 1, false",
        "'T', 0, 1, false",
        "'T', 101, 1, false",
        "'T', 'NaN', 1, false",
        "'T', 1, 0, false",
    ],
)
async def test_what_cannot_be_is_refused(one: Session, values: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await one.rows(f"SELECT aioqueue.set_tenant({values})")
    assert await one.rows(STANDS) == []


async def test_a_change_under_a_snapshot_of_its_own_is_refused_rather_than_built_on_old_values(
    one: Session, two: Session
) -> None:
    await one.begin("REPEATABLE READ")
    await one.rows("SELECT 1")
    await two.limit("T", 5)
    with pytest.raises(psycopg.errors.SerializationFailure):
        await one.store.set_tenant(one.conn, "T", paused=True, keep=["weight", "max_running"])
    await one.rollback()
