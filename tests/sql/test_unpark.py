"""unpark: after the end of jobs, as many of each key; nothing is missed that a claim parks meanwhile."""

import pytest

from tests.sql.engine import Session, blocked, changed, entry, limit_key

pytestmark = pytest.mark.anyio


async def test_one_for_each_that_has_ended(one: Session) -> None:
    keys = [await one.limit(tenant, 2) for tenant in "TU"]
    for tenant in "TU":
        await one.enqueue(5, tenant=tenant)
    worker = await one.register()
    jobs = await one.claim(worker)
    await one.record(worker, *(entry(job) for job in jobs if job.tenant == "T"), entry(jobs[-1], "error", d=3600))
    ended = {limit_key("tenant", "T"): 2, limit_key("tenant", "U"): 1}
    moved, firsts = await one.store.unpark(one.conn, ended)
    assert moved == 3 and set(firsts) == set(keys)
    assert sorted(key for key, _ in await one.parked()) == sorted([keys[0]] + 2 * [keys[1]])
    assert len(await one.claim(worker)) == 3


async def test_it_waits_for_a_claim_that_saw_the_key_full(boss: Session, one: Session, two: Session) -> None:
    """The claim counts before the end is committed and parks after: nobody else would ever look for what it parked."""
    key = await one.limit("T", 1)
    await one.enqueue(2, tenant="T")
    a, b = await one.register(), await two.register()
    job = await one.claim_one(a)
    await two.begin()
    assert await two.claim(b) == [], "parks the other one, and is not committed"
    assert await one.record(a, entry(job)) == {job.job_id: "succeeded"}
    async with blocked(boss, one, one.unpark(key), by=two) as waiting:
        await two.commit()
        assert await waiting == 1
    assert len(await two.claim(b)) == 1


async def test_sabotaged_without_the_lock_the_job_stays_parked(boss: Session, one: Session, two: Session) -> None:
    key = await one.limit("T", 1)
    await one.enqueue(2, tenant="T")
    a, b = await one.register(), await two.register()
    job = await one.claim_one(a)
    async with changed(boss, "unpark", ("PERFORM aioqueue.lock_keys(p_keys);", "")):
        await two.begin()
        await two.claim(b)
        await one.record(a, entry(job))
        assert await one.unpark(key) == 0
        await two.commit()
    assert (len(await one.parked()), await one.held()) == (1, [])


async def test_keys_that_nobody_waits_for_are_no_error(one: Session) -> None:
    assert await one.store.unpark(one.conn, {1: 5, -7: 1}) == (0, {})
    assert await one.store.unpark(one.conn, {}) == (0, {})


async def test_floors_are_used(one: Session) -> None:
    key = await one.limit("T", 1)
    await one.enqueue(3, tenant="T")
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.claim(worker)
    await one.record(worker, entry(job))
    wrong = f'{{"{key}": 1000000}}'
    assert (await one.store.unpark(one.conn, {key: 1}, parked=wrong))[0] == 0
    moved, firsts = await one.store.unpark(one.conn, {key: 1}, held="{}")
    assert moved == 1
    assert (await one.store.unpark(one.conn, {key: 1}, parked=f'{{"{key}": {firsts[key]}}}'))[0] == 1
