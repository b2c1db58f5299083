"""promote: scheduled → ready, when due, oldest first, at new positions, one promoter at a time."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, Session, blocked

pytestmark = pytest.mark.anyio
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


async def make_due(boss: Session, *jobs: UUID, at: datetime = LONG_AGO) -> None:
    """Let the jobs be due, each a second after the one before."""
    for i, job_id in enumerate(jobs):
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = %s WHERE job_id = %s", at + timedelta(seconds=i), job_id)


async def test_what_is_due_is_promoted_and_nothing_else(boss: Session, one: Session) -> None:
    due = await one.enqueue(3, delay=60, tenant="T", queue="q", priority=1)
    later = await one.enqueue_one(delay=60)
    await make_due(boss, *due)
    assert await one.store.promote(one.conn, limit=10) == 3
    assert await one.store.promote(one.conn, limit=10) == 0
    assert [await one.state(job_id) for job_id in (*due, later)] == ["ready"] * 3 + ["scheduled"]
    jobs = await one.claim(await one.register(), lanes=[lane("q", 1)])
    assert {(job.tenant, job.attempt, job.spared) for job in jobs} == {("T", 1, 0)}


async def test_attempt_and_spared_are_kept(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(delay=60)
    await boss.rows("UPDATE aioqueue.scheduled SET attempt = 7, spared = 3, run_at = '2020-01-01Z'")
    await one.store.promote(one.conn, limit=10)
    job = await one.claim_one(await one.register())
    assert (job.job_id, job.attempt, job.spared) == (job_id, 8, 3)


async def test_the_limit_takes_the_oldest_and_a_tenants_jobs_keep_their_order(boss: Session, one: Session) -> None:
    oldest_first: list[UUID] = []
    for second in range(20):
        at = LONG_AGO - timedelta(seconds=second)
        oldest_first[:0] = await one.enqueue(delay=60)
        await make_due(boss, oldest_first[0], at=at)
    assert await one.store.promote(one.conn, limit=8) == 8
    assert await one.store.promote(one.conn, limit=100) == 12
    worker = await one.register()
    assert [(await one.claim_one(worker)).job_id for _ in oldest_first] == oldest_first


async def test_nothing_below_the_floor_is_looked_at(boss: Session, one: Session) -> None:
    jobs = await one.enqueue(2, delay=60)
    await make_due(boss, *jobs)
    assert await one.store.promote(one.conn, due_from=LONG_AGO + timedelta(seconds=1), limit=10) == 1
    assert [await one.state(job_id) for job_id in jobs] == ["scheduled", "ready"]


async def test_two_promoters_at_once(boss: Session, one: Session, two: Session) -> None:
    await make_due(boss, *await one.enqueue(4, delay=60))
    await one.begin()
    assert await one.store.promote(one.conn, limit=2) == 2
    assert await two.store.promote(two.conn, limit=2) == -1, "the other is at it"
    await one.rollback()
    assert await two.store.promote(two.conn, limit=10) == 4


async def test_a_job_that_is_being_cancelled_is_passed_over(boss: Session, one: Session, two: Session) -> None:
    jobs = await one.enqueue(2, delay=60)
    await make_due(boss, *jobs)
    await two.begin()
    await two.cancel(jobs[0])
    assert await one.store.promote(one.conn, limit=10) == 1
    await two.rollback()
    assert await one.store.promote(one.conn, limit=10) == 1


async def test_a_registering_worker_waits_for_a_promotion_and_finds_the_job_gone(
    boss: Session, one: Session, two: Session
) -> None:
    job_id = await one.enqueue_one(delay=60)
    await boss.rows("UPDATE aioqueue.scheduled SET unknown_task = 't', run_at = '2020-01-01Z'")
    task: dict[str, object] = {"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}
    await one.begin()
    assert await one.store.promote(one.conn, limit=10) == 1
    async with blocked(boss, two, two.register(tasks=[task]), by=one):
        await one.commit()
    assert await one.places(job_id) == ["live"]


async def test_a_promotion_passes_over_what_a_worker_is_registering_for(boss: Session, one: Session, two: Session) -> None:
    job_id = await one.enqueue_one(delay=60)
    await boss.rows("UPDATE aioqueue.scheduled SET unknown_task = 't', run_at = '2020-01-01Z'")
    await two.begin()
    await two.register(tasks=[{"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}])
    assert await one.store.promote(one.conn, limit=10) == 0
    await two.commit()
    assert await one.places(job_id) == ["scheduled"]
    assert await one.store.promote(one.conn, limit=10) == 1


async def test_a_big_tenants_jobs_come_in_no_burst(boss: Session, one: Session) -> None:
    await one.enqueue(2_000, delay=60, tenant="big")
    await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
    assert await one.store.promote(one.conn, limit=1_000) == 1_000
    await boss.publish(10_000)
    newcomer = await one.enqueue_one(tenant="small")
    assert await one.store.promote(one.conn, limit=1_000) == 1_000
    ahead = await boss.value(
        "SELECT count(*) FROM aioqueue.live l, aioqueue.live me WHERE me.job_id = %s AND l.vt < me.vt", newcomer
    )
    assert ahead <= 12
    assert await boss.value("SELECT count(DISTINCT vt) FROM aioqueue.live WHERE tenant = 'big'") == 2_000


async def test_retried_jobs_of_one_batch_come_in_no_burst(boss: Session, one: Session) -> None:
    await one.enqueue(100, tenant="big")
    worker = await one.register()
    jobs = await one.claim(worker, 100)
    await boss.publish(max(job.vt for job in jobs))
    await one.record(worker, *({"j": str(j.job_id), "l": j.lane, "v": j.vt, "a": j.attempt, "o": "error", "d": 0} for j in jobs))
    newcomer = await one.enqueue_one(tenant="small")
    first = await one.claim(worker, 2)
    assert newcomer in {job.job_id for job in first}


async def test_what_is_promoted_lies_above_the_virtual_time_of_a_lane_that_moved_on(boss: Session, one: Session) -> None:
    await make_due(boss, *await one.enqueue(3, delay=60))
    await boss.publish(5_000_000)
    await one.store.promote(one.conn, limit=10)
    assert await boss.value("SELECT min(vt) FROM aioqueue.live WHERE lane = %s", LANE) == 5_001_000


async def test_a_hundred_promotions_at_once_lose_and_double_nothing(
    boss: Session, one: Session, two: Session, three: Session
) -> None:
    jobs = await one.enqueue(300, delay=60)
    await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")

    async def promote(session: Session) -> int:
        return sum([max(0, await session.store.promote(session.conn, limit=10)) for _ in range(33)])

    done = sum(await asyncio.gather(*map(promote, (one, two, three))))
    while (more := await one.store.promote(one.conn, limit=100)) > 0:
        done += more
    assert done == len(jobs)
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == len(jobs)
