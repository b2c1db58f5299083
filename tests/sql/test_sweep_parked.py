"""sweep_parked: whatever could run and was left parked is made ready, by one process at a time."""

import json

import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, Session, entry, limit_key

pytestmark = pytest.mark.anyio
OTHER = lane("other", 0)


async def test_what_an_end_without_its_unpark_has_left(one: Session) -> None:
    for tenant in "TU":
        await one.limit(tenant, 2)
        await one.enqueue(6, tenant=tenant)
    worker = await one.register()
    jobs = await one.claim(worker)
    assert await one.sweep() == 0, "all is full"
    await one.record(worker, *(entry(job) for job in jobs))
    assert await one.sweep() == 4, "as many as there is room for"
    assert await one.sweep(again=True) == 0
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
    moved = [(await one.store.sweep_parked(one.conn, limit=12, keys=[key], again=True))[0] for _ in range(4)]
    assert moved == [12, 12, 5, 0]
    assert len(await one.claim(worker, 100)) == 29


async def test_fifty_keys_at_a_time_in_a_range(boss: Session, one: Session) -> None:
    await boss.rows(
        "INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)"
        " SELECT hashint8extended(n, 0), n, gen_random_uuid(), 0, 0, '', 0, 0 FROM generate_series(1, 120) n"
    )
    keys = [key for key, _ in await one.parked()]
    for first, number in ((10, 50), (60, 50), (110, 5)):
        moved = await one.store.sweep_parked(one.conn, limit=500, after=keys[first - 1], upto=keys[114])
        assert moved == (number, keys[first + number - 1])
    assert await one.store.sweep_parked(one.conn, limit=500, after=keys[114], upto=keys[114]) == (0, None)
    assert [key for key, _ in await one.parked()] == keys[:10] + keys[115:]


@pytest.mark.parametrize("paused", [True, False])
async def test_jobs_of_a_queue_of_which_nothing_is_started_do_not_stand_before_the_others(
    boss: Session, one: Session, paused: bool
) -> None:
    """It is paused, or no worker serves it; the other jobs of the same key stand behind them."""
    await one.limit("T", 1)
    await one.enqueue(30, tenant="T", queue="other")
    waiting = await one.enqueue(5, tenant="T")
    worker = await one.register()
    job = await one.claim_one(worker, lanes=[OTHER])
    await one.claim(worker, lanes=[OTHER, LANE])
    await one.claim(worker, lanes=[OTHER, LANE], limit=50)
    assert len(await one.parked()) == 34
    if paused:
        await one.rows("SELECT aioqueue.register_worker(3, 'h', 1, '', '{other}', 1, 60, '[]')")
        await one.store.set_queue(one.conn, "other", paused=True)
    await one.record(worker, entry(job))
    assert (await one.store.sweep_parked(one.conn, limit=12))[0] == 12
    assert (await one.store.sweep_parked(one.conn, limit=12, again=True))[0] == 12
    assert (await one.store.sweep_parked(one.conn, limit=12, again=True))[0] == 5, "none but those"
    assert [job_id for _, job_id in await one.parked()] == waiting
    assert await one.sweep() == 1
    assert [job.job_id for job in await one.claim(worker)] == waiting[:1]


async def test_no_more_of_them_are_looked_at_than_are_made_ready(boss: Session, one: Session) -> None:
    key = await one.limit("T", 1)
    await boss.rows(
        "INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)"
        " SELECT %s, nextval('aioqueue.pos'), gen_random_uuid(), %s, %s, 'T', 0, 0 FROM generate_series(1, 10000)",
        key, key, OTHER,
    )  # fmt: skip
    await one.register()
    moved, _ = await one.store.sweep_parked(one.conn, limit=1000)
    first = await boss.value("SELECT min(pos) FROM aioqueue.parked")
    assert (moved, first) == (1000, 1001)


async def test_a_floor_says_where_to_begin(boss: Session, one: Session) -> None:
    key = await one.limit("T", 1)
    await one.enqueue(3, tenant="T")
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.claim(worker)
    await one.record(worker, entry(job))
    second = await one.value("SELECT max(pos) FROM aioqueue.parked")
    (_, last) = (await one.parked())[-1]
    assert await one.sweep(parked=json.dumps({key: second})) == 1
    assert await one.state(last) == "ready" and len(await one.parked()) == 1
    assert [job.job_id for job in await one.claim(worker)] == [last]
    assert await one.sweep(held=json.dumps({key: 10_000})) == 1, "a floor that is wrong counts too few"


async def test_one_at_a_time_but_for_given_keys(one: Session, two: Session) -> None:
    await one.limit("T", 1)
    await one.begin()
    await one.sweep()
    assert await two.sweep() == -1
    assert await two.sweep(keys=[limit_key("tenant", "T")]) == 0
    await one.commit()
    assert await two.sweep() == 0
