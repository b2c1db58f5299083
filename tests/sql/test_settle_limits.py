"""settle_limits: a limit that comes counts what runs already, and waits for the claims that did not see it."""

import pytest

from tests.sql.engine import LANE, Session, blocked, changed, limit_key

pytestmark = pytest.mark.anyio


async def settle(session: Session) -> None:
    await session.store.settle_limits(session.conn)


async def test_what_runs_counts_for_each_kind_of_limit(boss: Session, one: Session) -> None:
    both, by_tenant, by_task = (
        await one.enqueue_one(task="t", tenant="T", key="k"),
        await one.enqueue_one(task="u", tenant="T", key="k"),
        await one.enqueue_one(task="t"),
    )
    await one.enqueue_one(task="u")
    worker = await one.register()
    await one.claim(worker)
    await one.enqueue(3, task="t", tenant="T", key="k")
    tenant = await one.limit("T", 2)
    assert await one.held() == []
    await settle(one)
    await settle(one)
    assert sorted(await one.held()) == sorted([(tenant, both), (tenant, by_tenant)])
    task, _ = await one.limit_task("t", 9, per_key=9)
    key = limit_key("key", "t", "k")
    expected = [(tenant, both), (tenant, by_tenant), (task, both), (task, by_task), (key, both)]
    assert sorted(await one.held()) == sorted(expected), "a worker that registers limits settles them"
    assert await boss.rows("SELECT DISTINCT worker FROM aioqueue.held") == [(worker,)]
    assert not await boss.rows("SELECT FROM aioqueue.limits WHERE NOT settled")


async def test_it_waits_for_a_claim_in_flight_and_counts_what_that_took(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue(4, tenant="T")
    worker = await one.register()
    await one.begin()
    assert len(await one.claim(worker, 2)) == 2, "there is no limit yet"
    await two.limit("T", 2)
    async with blocked(boss, two, two.store.settle_limits(two.conn), by=one):
        await one.commit()
    assert len(await one.held()) == 2
    assert await one.claim(worker) == []


async def test_sabotaged_without_the_claims_lock_a_limit_is_broken(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue(4, tenant="T")
    worker = await one.register()
    async with changed(
        boss, "claim", ("PERFORM pg_advisory_xact_lock_shared(hashtextextended('aioqueue.settle_limits', 0));", "")
    ):
        await one.begin()
        await one.claim(worker, 2)
        await two.limit("T", 2)
        await settle(two)
        await one.commit()
    assert len(await one.claim(worker)) == 2, "four run"


async def test_a_pause_waits_for_claims_in_flight_although_no_limit_is_new(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue(4)
    worker = await one.register()
    await one.begin()
    await one.claim(worker, 2)
    await two.store.set_queue(two.conn, "default", paused=True)
    async with blocked(boss, two, two.store.settle_limits(two.conn), by=one):
        await one.commit()
    await one.begin()
    assert await one.claim(worker, lanes=[LANE]) == []
    await two.rows("SET lock_timeout = '1ms'")
    await two.store.settle_limits(two.conn, wait=False)
    await one.commit()


async def test_positions_are_drawn_under_the_keys_lock(boss: Session, one: Session, two: Session) -> None:
    """Otherwise a floor learned meanwhile could pass a row that is still to come."""
    await one.enqueue(2, tenant="T")
    worker = await one.register()
    await one.claim(worker, 1)
    key = await one.limit("T", 2)
    await boss.begin()
    await boss.rows("SELECT aioqueue.lock_keys(ARRAY[%s::bigint])", key)
    watcher = one
    async with blocked(watcher, two, two.store.settle_limits(two.conn), by=boss):
        await boss.commit()
    assert len(await one.held()) == 1
