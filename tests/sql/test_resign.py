"""resign: a worker that stops is dead at once and what it left is rescued."""

import pytest

from tests.sql.engine import Session, blocked, entry

pytestmark = pytest.mark.anyio


async def test_what_it_left_is_rescued_at_once(one: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    await one.claim_one(worker)
    await one.store.resign(one.conn, worker=worker)
    assert await one.rescue() == (worker, 1)
    assert await one.state(job_id) == "ready"


async def test_one_that_is_unknown_or_resigned_is_left_alone(boss: Session, one: Session) -> None:
    worker, other = await one.register(), await one.register()
    for _ in range(2):
        await one.store.resign(one.conn, worker=worker)
    await one.store.resign(one.conn, worker=3)
    assert await boss.rows("SELECT id FROM aioqueue.worker WHERE NOT dead") == [(other,)]


async def test_one_that_leaves_nothing_running_leaves_no_row(boss: Session, one: Session) -> None:
    worker, job_id = await one.register(), await one.enqueue_one()
    job = await one.claim_one(worker)
    await one.store.cancel_job(one.conn, job_id)
    await one.record(worker, entry(job, r=1))
    await one.store.resign(one.conn, worker=worker)
    assert await boss.rows("SELECT id FROM aioqueue.worker") == []
    assert await boss.rows("SELECT job_id FROM aioqueue.cancel") == []


async def test_a_claim_in_flight_is_waited_for_and_keeps_the_row(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    await one.begin()
    await one.claim_one(worker)
    async with blocked(boss, two, two.store.resign(two.conn, worker=worker), by=one):
        await one.commit()
    assert await boss.rows("SELECT id, dead FROM aioqueue.worker") == [(worker, True)]
    assert await two.rescue() == (worker, 1)
