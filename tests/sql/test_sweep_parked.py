"""sweep_parked: whatever could run and was left parked is made ready, by one process at a time."""

import pytest

from tests.sql.engine import Session, entry, limit_key

pytestmark = pytest.mark.anyio


async def test_what_an_end_without_its_unpark_has_left(one: Session) -> None:
    for tenant in "TU":
        await one.limit(tenant, 2)
        await one.enqueue(6, tenant=tenant)
    worker = await one.register()
    jobs = await one.claim(worker)
    assert await one.sweep() == 0, "all is full"
    await one.record(worker, *(entry(job) for job in jobs))
    assert await one.sweep() == 4, "as many as there is room for"
    assert await one.sweep(lifted=True) == 0
    assert len(await one.claim(worker)) == 4


async def test_what_a_cancelled_job_has_left(one: Session) -> None:
    key = await one.limit("T", 1)
    await one.enqueue(3, tenant="T")
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.claim(worker)
    await one.record(worker, entry(job))
    await one.unpark(key)
    (freed,) = [job_id for (job_id,) in await one.rows("SELECT job_id FROM aioqueue.live")]
    assert await one.cancel(freed) == "cancelled"
    assert await one.sweep() == 1
    assert len(await one.claim(worker)) == 1


async def test_of_a_lifted_limit_all_in_turns(one: Session) -> None:
    key = await one.limit("T", 1)
    await one.enqueue(30, tenant="T")
    worker = await one.register()
    await one.claim(worker, 30)
    await one.limit("T", None)
    moved = [await one.store.sweep_parked(one.conn, limit=12, keys=[key], lifted=True) for _ in range(4)]
    assert moved == [12, 12, 5, 0]
    assert len(await one.claim(worker, 100)) == 29


async def test_more_than_a_thousand_keys_are_all_swept_in_the_end(boss: Session, one: Session) -> None:
    """Each sweep begins at another key."""
    await boss.rows(
        "INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)"
        " SELECT hashint8extended(n, 0), n, gen_random_uuid(), 0, 0, '', 0, 0 FROM generate_series(1, 2500) n"
    )
    assert await one.store.sweep_parked(one.conn, limit=5000) == 1_000
    while await one.store.sweep_parked(one.conn, limit=5000):
        pass
    assert await one.parked() == []


async def test_one_at_a_time_but_for_given_keys(one: Session, two: Session) -> None:
    await one.limit("T", 1)
    await one.begin()
    await one.sweep()
    assert await two.sweep() == -1
    assert await two.sweep(keys=[limit_key("tenant", "T")]) == 0
    await one.commit()
    assert await two.sweep() == 0
