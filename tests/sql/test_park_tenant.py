"""park_tenant and the sweep after it give a tenant's waiting jobs positions by its new weight, in their order."""

from itertools import pairwise

import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, Session, blocked

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("weight", [4.0, 0.5])
async def test_new_positions_in_the_same_order(boss: Session, one: Session, weight: float) -> None:
    other = await one.enqueue(2, tenant="U")
    ids = await one.enqueue(5, tenant="T")
    high = await one.enqueue(2, tenant="T", priority=1)
    worker = await one.register()
    running = [job.job_id for job in await one.claim(worker, 2)]
    key = await one.limit("T", None, weight=weight)
    moved: list[int] = []
    after: tuple[int | None, int | None] = (None, None)
    for _ in range(3):
        number, after = await one.store.park_tenant(one.conn, "T", limit=4, after=after)
        moved.append(number)
    assert sum(moved) == 7 - len(set(running) & set(ids)) and moved[-1] == 0
    assert await one.sweep(keys=[key]) == sum(moved)
    rows = await boss.rows(
        "SELECT job_id, vt FROM aioqueue.live WHERE lane = %s AND worker IS NULL AND tenant = 'T' ORDER BY vt", LANE
    )
    assert [job_id for job_id, _ in rows] == [job_id for job_id in ids if job_id not in running]
    assert {b - a for (_, a), (_, b) in pairwise(rows)} == {round(1000 / weight)}
    assert [job.job_id for job in sorted(await one.claim(worker, lanes=[lane("default", 1)]), key=lambda job: job.vt)] == high
    assert set(running) | set(other) | set(ids) == {*running, *(job.job_id for job in await one.claim(worker, 100))}


async def test_what_somebody_claims_meanwhile_is_left_to_him(one: Session, two: Session) -> None:
    await one.enqueue(3, tenant="T")
    worker = await one.register()
    await one.begin()
    assert len(await one.claim(worker, 2)) == 2
    await two.rows("SET lock_timeout = '1ms'")
    assert (await two.store.park_tenant(two.conn, "T", limit=10))[0] == 1
    await one.commit()


async def test_it_waits_for_the_key(boss: Session, one: Session, two: Session) -> None:
    await one.limit("T", 1)
    await one.enqueue(3, tenant="T")
    worker = await one.register()
    await one.begin()
    await one.claim(worker)
    async with blocked(boss, two, two.store.park_tenant(two.conn, "T", limit=10), by=one) as waiting:
        await one.commit()
        assert (await waiting)[0] == 0, "they are parked already"


async def test_it_goes_on_from_where_it_was(one: Session) -> None:
    ids = await one.enqueue(4, tenant="T")
    assert await one.store.park_tenant(one.conn, "T", limit=2) == (2, (LANE, 2_000))
    assert await one.store.park_tenant(one.conn, "T", limit=2, after=(LANE, 4_000)) == (1, (LANE, 4_000))
    assert [job_id for _, job_id in await one.parked()] == [ids[0], ids[1], ids[3]]
