"""step: 1000 / weight."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_by_weight(boss: Session, one: Session) -> None:
    for tenant, weight in {"a": 3, "b": 0.01, "c": 100, "d": 0.7}.items():
        await one.limit(tenant, None, weight=weight)
    assert [await boss.value("SELECT aioqueue.step(%s)", tenant) for tenant in "abcde"] == [333, 100_000, 10, 1_429, 1_000]
    assert await boss.value("SELECT aioqueue.step('')") == 1_000


async def test_a_weight_spreads_a_tenants_jobs(boss: Session, one: Session) -> None:
    """Three of one tenant for each of another, whether they come at once or one by one, ready or falling due."""
    await one.limit("a", None, weight=3)
    await one.enqueue(6, tenant="a")
    await one.enqueue(2, tenant="b")
    await one.enqueue_one(tenant="a")
    await one.enqueue(2, tenant="a", delay=0.001)
    while not await one.value("SELECT bool_and(run_at < clock_timestamp()) FROM aioqueue.scheduled"):
        pass
    await one.store.promote(one.conn, limit=10)
    rows = await boss.rows("SELECT tenant, vt FROM aioqueue.live ORDER BY vt, tenant")
    assert [vt for tenant, vt in rows if tenant == "a"] == [333 * n for n in range(1, 10)]
    assert "".join(tenant for tenant, _ in rows) == "aaabaaabaaa"
