"""claim_limited: what fits all its limits runs, what does not is parked, and never is more than the limit running."""

import asyncio
import json
import random

import pytest

from aioqueue.job import lane
from aioqueue.store import LOWEST_ID, LaneScan
from tests.sql.conftest import Connect
from tests.sql.engine import LANE, Session, blocked, changed, entry, limit_key

pytestmark = pytest.mark.anyio
LANES = [LANE, lane("default", 1), lane("other", 0)]


async def test_the_tenants_others_are_parked_in_order_and_not_counted(boss: Session, one: Session) -> None:
    ids = await one.enqueue(5, tenant="T")
    other = await one.enqueue_one(tenant="U")
    key = await one.limit("T", 2)
    worker = await one.register()
    claims = await one.claims(worker)
    assert {job.job_id for job in claims.jobs} == {*ids[:2], other}
    assert {job.job_id: list(job.keys or ()) for job in claims.jobs} == {ids[0]: [key], ids[1]: [key], other: []}
    assert await one.held() == [(key, ids[0]), (key, ids[1])]
    assert await one.parked() == [(key, job_id) for job_id in ids[2:]]
    assert claims.parked == {LANE: (3, 5_000)} and not claims.more and not claims.passed
    for job_id in ids[2:]:
        status = await one.store.job_status(one.conn, job_id)
        assert status is not None and (status.state, status.attempt, status.spared) == ("ready", 0, 0)
        assert await boss.places(job_id) == ["parked"]
    assert await one.claim(worker) == []


async def test_all_keys_of_a_job_or_none(one: Session) -> None:
    """Parked under the first that is full: its own key's, the task's, the tenant's."""
    task, _ = await one.limit_task("t", 3, per_key=1)
    tenant = await one.limit("T", 2)
    a, b = limit_key("key", "t", "a"), limit_key("key", "t", "b")
    names = {"runs with a": "a", "a is full": "a", "runs with b": "b", "the tenant is full": "c"}
    ids = {name: await one.enqueue_one(task="t", tenant="T", key=key) for name, key in names.items()}
    worker = await one.register()
    claims = await one.claims(worker)
    assert {job.job_id: set(job.keys or ()) for job in claims.jobs} == {
        ids["runs with a"]: {a, task, tenant}, ids["runs with b"]: {b, task, tenant},
    }  # fmt: skip
    assert dict(await one.parked()) == {a: ids["a is full"], tenant: ids["the tenant is full"]}
    assert claims.passed == {task: 2, tenant: 1, limit_key("key", "t", "c"): 1}, "there would have been room"
    elsewhere = await one.enqueue_one(task="t", tenant="U")
    last = await one.enqueue_one(task="t", tenant="V")
    assert [job.job_id for job in await one.claim(worker)] == [elsewhere]
    assert dict(await one.parked())[task] == last, "the task is full"


async def test_without_a_key_a_limit_per_key_is_none(one: Session) -> None:
    await one.limit_task("t", per_key=1)
    await one.enqueue(3, task="t")
    worker = await one.register()
    assert [list(job.keys or ()) for job in await one.claim(worker)] == [[], [], []]


async def test_a_paused_tenants_jobs_are_parked_and_what_runs_goes_on(one: Session) -> None:
    await one.enqueue(2, tenant="T")
    worker = await one.register()
    (job,) = await one.claim(worker, 1)
    key = await one.limit("T", None, paused=True)
    claims = await one.claims(worker)
    assert claims.jobs == [] and [k for k, _ in await one.parked()] == [key]
    assert await one.record(worker, entry(job)) == {job.job_id: "succeeded"}
    assert await one.unpark(key) == 0


async def test_a_second_claim_waits_for_the_keys_and_sees_what_the_first_took(boss: Session, one: Session, two: Session) -> None:
    await one.limit("T", 3)
    await one.enqueue(6, tenant="T")
    a, b = await one.register(), await two.register()
    await one.begin()
    assert len(await one.claim(a, 2)) == 2
    async with blocked(boss, two, two.claim(b, 4), by=one) as waiting:
        await one.commit()
        assert len(await waiting) == 1
    assert (len(await one.held()), len(await one.parked())) == (3, 3)


async def test_sabotaged_without_locks_two_claims_break_the_limit(boss: Session, one: Session, two: Session) -> None:
    await one.limit("T", 3)
    await one.enqueue(6, tenant="T")
    a, b = await one.register(), await two.register()
    async with changed(boss, "claim_limited", ("busy := aioqueue.lock_keys(f_keys, pass = 1);", "busy := '{}';")):
        await one.begin()
        await one.claim(a, 2)
        assert len(await two.claim(b, 4)) == 3
        await one.commit()
    assert len(await one.held()) == 5


async def test_a_claim_that_rolls_back_leaves_no_trace(one: Session) -> None:
    await one.limit("T", 1)
    await one.enqueue(3, tenant="T")
    worker = await one.register()
    await one.begin()
    await one.claim(worker)
    await one.rollback()
    assert (await one.held(), await one.parked()) == ([], [])
    assert len(await one.claim(worker)) == 1


async def test_behind_those_of_a_full_tenant_others_are_found_in_one_claim(one: Session) -> None:
    await one.limit("T", 1)
    await one.enqueue(700, tenant="T")
    others = [await one.enqueue_one(tenant=f"U{n}", priority=-1) for n in range(5)]
    worker = await one.register()
    scans = [LaneScan(number, (0, LOWEST_ID), 4, group) for group, number in enumerate((LANE, lane("default", -1)))]
    claims = await one.store.claim(one.conn, worker=worker, lanes=scans, limit=4)
    assert [job.tenant for job in claims.jobs].count("T") == 1
    assert {job.job_id for job in claims.jobs if job.tenant != "T"} <= set(others) and len(claims.jobs) == 4
    assert claims.parked[LANE] == (699, 700_000), "the lane of the higher priority is done with"


async def test_no_more_than_about_a_thousand_are_parked_at_once(one: Session) -> None:
    await one.limit("T", 1)
    await one.enqueue(2_500, tenant="T")
    worker = await one.register()
    parked = []
    for _ in range(10):
        claims = await one.claims(worker)
        parked.append(sum(number for number, _ in claims.parked.values()))
        if not claims.more:
            break
    assert sum(parked) == 2_499 and len(parked) == 3 and max(parked) <= 1_250


async def test_a_key_that_comes_up_later_is_not_waited_for(boss: Session, one: Session) -> None:
    """Keys are waited for in one call; a second one could deadlock. Its jobs stay, and the answer says that there is more."""
    first = await one.limit("T", 1)
    name, second = "", first
    while second & 255 == first & 255:
        name += "U"
        second = await one.limit(name, 1)
    ids = await one.enqueue(3, tenant="T")
    late = await one.enqueue_one(tenant=name, delay=0.001)
    worker = await one.register()
    while not await one.value("SELECT bool_and(run_at < clock_timestamp()) FROM aioqueue.scheduled"):
        pass
    await boss.publish(10_000)
    await one.store.promote(one.conn, limit=1)
    await boss.begin()
    await boss.rows("SELECT aioqueue.lock_keys(ARRAY[%s::bigint])", second)
    claims = await one.claims(worker, 3)
    await boss.rollback()
    assert [job.job_id for job in claims.jobs] == ids[:1] and len(await one.parked()) == 2
    assert claims.more and await one.state(late) == "ready"
    again = await one.claims(worker, 3)
    assert [job.job_id for job in again.jobs] == [late] and not again.more


async def test_who_has_no_limit_is_claimed_as_if_there_were_none(boss: Session, one: Session) -> None:
    """The same jobs, lane by lane, share by share."""
    chance = random.Random(7)
    worker = await one.register()
    for _ in range(120):
        await one.enqueue_one(
            tenant=f"T{chance.randrange(4)}", queue=chance.choice(["default", "other"]), priority=chance.choice([0, 0, 1])
        )
    for limit in (1, 7, 40, 200):
        scans = [
            LaneScan(n, (chance.randrange(9_000), LOWEST_ID), chance.randrange(1, 30), group)
            for n, group in zip(LANES, (0, 1, 1), strict=True)
        ]
        found = []
        for most in (None, 1):
            await boss.limit("nobody", most)
            await one.begin()
            claims = await one.store.claim(one.conn, worker=worker, lanes=scans, limit=limit)
            found.append({job.fence for job in claims.jobs})
            assert claims.parked == {} and not claims.more
            await one.rollback()
        assert found[0] == found[1] != set()


async def test_a_floor_says_where_held_rows_begin_and_is_used(one: Session) -> None:
    key = await one.limit("T", 2)
    await one.enqueue(8, tenant="T")
    worker = await one.register()
    floors = []
    for _ in range(3):
        claims = await one.claims(worker, 1)
        floors.append(claims.key_floors.get(key, 0))
        await one.record(worker, *(entry(job) for job in claims.jobs))
    assert floors == sorted(floors) and len(set(floors)) == 3, "each begins behind what has ended"
    await one.claim(worker, 2)
    first = (await one.claims(worker, 2)).key_floors[key]
    rows = await one.rows("SELECT min(pos) FROM aioqueue.held WHERE key = %s", key)
    assert rows == [(first,)]
    assert (await one.claims(worker, 2, key_floors=json.dumps({key: first}))).jobs == []
    await one.enqueue(2, tenant="T")
    wrong = json.dumps({key: first + 1_000})
    assert (await one.claims(worker, 2, key_floors=wrong)).jobs != [], "a floor that is wrong counts too few"


async def test_opposite_keys_never_deadlock(connect: Connect, one: Session) -> None:
    """Six claimers of jobs with two keys each, in any pairs; a deadlock would be an error, a wait for ever a time-out."""
    await one.limit_task("t", per_key=2)
    for n in range(6):
        await one.limit(f"T{n}", 2)
    chance = random.Random(3)
    sessions = [await connect("worker") for _ in range(6)]
    for _ in range(150):
        await one.enqueue_one(task="t", tenant=f"T{chance.randrange(6)}", key=f"k{chance.randrange(6)}")

    async def work(session: Session) -> None:
        worker = await session.register()
        while await session.value("SELECT count(*) FROM aioqueue.outcome") < 150:
            jobs = await session.claim(worker, 5)
            await session.record_all(worker, *(entry(job) for job in jobs))
            keys = [key for job in jobs for key in job.keys or ()]
            if keys:
                await session.unpark(*keys)
            else:
                await session.sweep()

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(session) for session in sessions))
    assert (await one.held(), await one.parked()) == ([], [])
