"""list_tenants: the tenants that are not as all others."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_weight_limit_pause_and_what_runs_and_waits(one: Session) -> None:
    assert await one.store.list_tenants(one.conn, cap=10, limit=10) == []
    await one.limit("c", 1, weight=2)
    await one.limit("a", None, weight=0.5)
    await one.limit("b", None, paused=True)
    await one.limit_task("c", 9)
    for tenant in "abc":
        await one.enqueue(3, tenant=tenant)
    await one.claim(await one.register(), 20)
    rows = [tuple(row.values()) for row in await one.store.list_tenants(one.conn, cap=10, limit=10)]
    assert rows == [("a", 0.5, None, False, None, 0), ("b", 1, None, True, 0, 3), ("c", 2, 1, False, 1, 2)]
    capped = await one.store.list_tenants(one.conn, cap=1, limit=2)
    assert [(row["tenant"], row["parked"]) for row in capped] == [("a", 0), ("b", 1)]
