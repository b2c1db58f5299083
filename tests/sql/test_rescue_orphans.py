"""rescue_orphans: running rows whose worker has no row."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_jobs_of_a_worker_without_a_row_are_rescued(boss: Session, one: Session) -> None:
    await one.enqueue(5)
    gone, there = await one.register(), await one.register()
    lost = await one.claim(gone, 3)
    kept = await one.claim(there, 1)
    await boss.rows("DELETE FROM aioqueue.worker WHERE id = %s", gone)
    assert await one.rescue() is None
    assert await one.store.rescue_orphans(one.conn, limit=2) == 2
    assert await one.store.rescue_orphans(one.conn, limit=2) == 1
    assert await one.store.rescue_orphans(one.conn, limit=2) == 0
    assert {await one.state(job.job_id) for job in lost} == {"ready"}
    assert await one.state(kept[0].job_id) == "running"
    assert await one.record(gone, *(entry(job) for job in lost)) == {}


async def test_one_at_a_time(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue(2)
    worker = await one.register()
    await one.claim(worker)
    await boss.rows("DELETE FROM aioqueue.worker")
    await one.begin()
    assert await one.store.rescue_orphans(one.conn, limit=1) == 1
    assert await two.store.rescue_orphans(two.conn, limit=1) == 0
    await one.commit()
    assert await two.store.rescue_orphans(two.conn, limit=1) == 1


async def test_a_claim_of_a_worker_that_registers_meanwhile_is_no_orphan(one: Session, two: Session) -> None:
    await one.enqueue()
    await one.begin()
    worker = await one.register()
    await one.claim(worker)
    assert await two.store.rescue_orphans(two.conn, limit=1) == 0
    await one.commit()
    assert await two.store.rescue_orphans(two.conn, limit=1) == 0


async def test_a_job_being_recorded_is_passed_over(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await boss.rows("DELETE FROM aioqueue.worker")
    await one.begin()
    await one.record(worker, entry(job))
    assert await two.store.rescue_orphans(two.conn, limit=1) == 0
    await one.commit()
    assert await two.store.rescue_orphans(two.conn, limit=1) == 0
    assert await one.places(job.job_id) == ["outcome"]
