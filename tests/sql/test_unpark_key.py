"""unpark_key: as many as there is room for, oldest first, in front of the tenant's others; all of them once there is no limit."""

import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, NO_XID, Session, changed, limit_key

pytestmark = pytest.mark.anyio
CALL = "SELECT moved, first FROM aioqueue.unpark_key(%s, %s, 0, %s, %s)"


async def park(session: Session, number: int, most: int = 1, **options: str) -> tuple[int, int]:
    """Jobs of tenant T, of which all but `most` are parked; the worker that has those, and the key."""
    key = await session.limit("T", most)
    await session.enqueue(number, tenant="T", **options)
    worker = await session.register()
    assert len(await session.claim(worker, number)) == most
    return worker, key


async def test_never_more_than_there_is_room_for(boss: Session, one: Session) -> None:
    worker, key = await park(one, 8, 3)
    assert (await boss.rows(CALL, key, 5, 0, 100))[0][0] == 0, "it is full"
    await one.limit("T", 5)
    waiting = [job_id for _, job_id in await one.parked()]
    assert (await boss.rows(CALL, key, None, 0, 100))[0][0] == 2
    assert (await boss.rows(CALL, key, 1, 0, 100))[0][0] == 1, "as many as wanted, where there is room: the claim is exact"
    assert [job_id for _, job_id in await one.parked()] == waiting[3:]
    assert len(await one.claim(worker)) == 2
    assert (len(await one.held()), len(await one.parked())) == (5, 3)


async def test_in_front_of_the_tenants_others_and_behind_one_of_each_tenant(boss: Session, one: Session) -> None:
    _, key = await park(one, 3)
    await boss.publish(50_000)
    await one.enqueue(5, tenant="T")
    await one.limit("T", 3)
    parked = [job_id for _, job_id in await one.parked()]
    await boss.rows(CALL, key, None, 0, 100)
    rows = await boss.rows("SELECT job_id, vt FROM aioqueue.live WHERE worker IS NULL AND vt > 50000 ORDER BY vt, job_id")
    assert sorted(vt for _, vt in rows) == [51_000, 51_000, 52_000, 52_000, 53_000, 54_000, 55_000]
    assert {vt for job_id, vt in rows if job_id in parked} == {51_000, 52_000}


async def test_by_weight_and_in_each_lane(boss: Session, one: Session) -> None:
    await one.limit("T", 1, weight=2)
    await one.enqueue(3, tenant="T")
    await one.enqueue(3, tenant="T", priority=2)
    worker = await one.register()
    await one.claim(worker, lanes=[lane("default", 2), LANE])
    await one.limit("T", 20, weight=2)
    await boss.rows(CALL, limit_key("tenant", "T"), None, 0, 100)
    rows = await boss.rows("SELECT lane, vt FROM aioqueue.live WHERE worker IS NULL ORDER BY lane = %s, vt", LANE)
    assert rows == [(lane("default", 2), 500), (lane("default", 2), 1000), (LANE, 500), (LANE, 1000), (LANE, 1500)]


async def test_without_a_limit_they_go_behind_and_in_no_burst(boss: Session, one: Session) -> None:
    _, key = await park(one, 6)
    await one.enqueue_one(tenant="T")
    await one.limit("T", None)
    for _ in range(3):
        assert (await boss.rows(CALL, key, None, 0, 2))[0][0] in (1, 2)
    assert await one.parked() == []
    tags = [vt for (vt,) in await boss.rows("SELECT vt FROM aioqueue.live WHERE worker IS NULL ORDER BY vt")]
    assert len(tags) == 6 == len(set(tags)), "one step apart each, also those of different calls"


async def test_jobs_of_lanes_of_which_nothing_is_claimed_do_not_count(boss: Session, one: Session) -> None:
    other = lane("other", 0)
    key = await one.limit("T", 1)
    worker = await one.register()
    for number, queue in ((1, "default"), (3, "other"), (1, "default"), (1, "other"), (4, "default")):
        await one.enqueue(number, tenant="T", queue=queue)
        await one.claim(worker, lanes=[LANE, other])
    await one.limit("T", 2)
    waiting = [job_id for _, job_id in await one.parked()]
    call = "SELECT moved FROM aioqueue.unpark_key(%s, %s, 0, 0, %s, %s, %s::bigint[])"
    assert await boss.value(call, key, 0, 2, [other], None) == 2, "no more than allowed"
    assert await boss.value(call, key, 1, 100, [other], None) == 3, "the other, the one that counts, and the one behind it"
    assert [job_id for _, job_id in await one.parked()] == waiting[5:]
    assert await boss.value(call, key, None, 100, [], [LANE]) == 1
    assert await boss.value(call, key, None, 2, [], [other]) == 2, "nobody serves it"
    assert await boss.value(call, key, None, 100, [other], [LANE]) == 1


async def test_unpark_passes_over_a_paused_queue(boss: Session, one: Session) -> None:
    await one.limit("T", 1)
    await one.enqueue(3, tenant="T", queue="other")
    await one.enqueue(2, tenant="T")
    worker = await one.register()
    (job,) = await one.claim(worker, lanes=[lane("other", 0), LANE])
    await one.store.set_queue(one.conn, "other", paused=True)
    await one.rows("SELECT aioqueue.resign(%s)", worker)
    assert await one.rescue() is not None
    worker = await one.register()
    assert len(await one.claim(worker)) == 1, "rescue too"
    assert job.queue == "other" and len(await one.parked()) == 1


async def test_first_is_where_the_next_look_begins(boss: Session, one: Session) -> None:
    _, key = await park(one, 4)
    positions = [pos for (pos,) in await one.rows("SELECT pos FROM aioqueue.parked ORDER BY pos")]
    assert await boss.rows(CALL, key, 1, 0, 100) == [(0, positions[0])]
    await one.limit("T", 10)
    assert await boss.rows(CALL, key, 1, positions[0], 100) == [(1, positions[1])]
    assert await boss.rows(CALL, key, 1, positions[1], 100) == [(1, positions[2])]
    assert await boss.rows(CALL, key, 5, positions[2], 100) == [(1, positions[2] + 1)]
    assert await boss.rows(CALL, key, 5, positions[2] + 1, 100) == [(0, positions[2] + 1)]
    await one.limit("T", 1)
    await one.enqueue_one(tenant="T", priority=2)
    await one.claim(await one.register())
    assert min(await one.rows("SELECT pos FROM aioqueue.parked")) > (positions[2],), "what is parked later stands behind that"


async def test_a_job_that_somebody_cancels_is_passed_over(boss: Session, one: Session, two: Session) -> None:
    _, key = await park(one, 3)
    first, second = [job_id for _, job_id in await one.parked()]
    await one.limit("T", 10)
    await two.begin()
    assert await two.cancel(first) == "cancelled"
    await boss.rows("SET lock_timeout = '1ms'")
    assert (await boss.rows(CALL, key, 1, 0, 100))[0][0] == 1
    await two.rollback()
    assert [job_id for _, job_id in await one.parked()] == [first]
    assert await one.state(second) == "ready"


async def test_xid_first_then_virtual_time(boss: Session, one: Session) -> None:
    """As every row that enters live: otherwise a floor could pass it (test_tick.py)."""
    _, key = await park(one, 3)
    await one.limit("T", 10)
    async with changed(boss, "virtual_time", *NO_XID):
        assert (await boss.rows(CALL, key, 1, 0, 100))[0][0] == 1
