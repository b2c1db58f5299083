"""count_tenants: the tenants with most ready jobs."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_most_first_within_the_cap(one: Session) -> None:
    await one.enqueue(3, tenant="a")
    await one.enqueue(2, tenant="b", queue="q")
    await one.enqueue(1, tenant="c")
    await one.enqueue(1)
    found = await one.store.count_tenants(one.conn, cap=100, limit=3)
    assert [(f["tenant"], f["ready"]) for f in found] == [("a", 3), ("b", 2), (None, 1)]
    await one.claim(await one.register(), 100)
    found = await one.store.count_tenants(one.conn, cap=1, limit=3)
    assert [(f["tenant"], f["ready"]) for f in found] == [("b", 1)], "what runs is not ready, and the cap is each lane's"


async def test_parked_jobs_are_ready(one: Session) -> None:
    await one.limit("a", 1)
    await one.enqueue(4, tenant="a")
    await one.claim(await one.register(), 3)
    found = await one.store.count_tenants(one.conn, cap=100, limit=3)
    assert [(f["tenant"], f["ready"]) for f in found] == [("a", 3)]
