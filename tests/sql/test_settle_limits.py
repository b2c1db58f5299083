"""settle_limits: a limit that comes counts what runs already, and waits for the claims that did not see it."""

import pytest

from tests.sql.engine import Session, blocked, changed, entry, limit_key

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


async def test_of_a_limit_that_came_after_the_wait_nothing_is_settled(boss: Session, one: Session) -> None:
    """Nor of one that was changed since: claims that did not see it may be in flight."""
    await one.limit("T", 1)
    await one.limit("V", 1)
    seen = await one.store.wait_for_claims(one.conn)
    await one.limit("U", 1)
    await one.limit("V", None)
    await one.limit("V", 1)
    await one.rows("SELECT aioqueue.settle_limits(%s::text::jsonb, true)", seen)
    rows = "SELECT name, settled FROM aioqueue.limits ORDER BY name"
    assert await boss.rows(rows) == [("T", True), ("U", False), ("V", False)]
    await settle(one)
    assert {settled for _, settled in await boss.rows(rows)} == {True}


async def test_a_limit_that_comes_meanwhile_is_left_to_the_next(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue_one(tenant="T")
    await one.enqueue_one(tenant="U")
    worker = await one.register()
    await one.claim(worker)
    key = await one.limit("T", 1)
    await boss.begin()
    await boss.rows("SELECT aioqueue.lock_keys(ARRAY[%s::bigint])", key)
    async with blocked(one, two, settle(two), by=boss):
        other = await one.limit("U", 1)
        await boss.commit()
    assert [k for k, _ in await one.held()] == [key]
    await settle(one)
    assert sorted(k for k, _ in await one.held()) == sorted([key, other])
    await one.enqueue(2, tenant="U")
    assert await one.claim(worker) == []


async def test_claims_go_on_while_it_waits_for_the_keys(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue_one(tenant="T")
    worker = await one.register()
    await one.claim(worker)
    key = await one.limit("T", 1)
    other = await one.enqueue_one(tenant="U")
    await boss.begin()
    await boss.rows("SELECT aioqueue.lock_keys(ARRAY[%s::bigint])", key)
    async with blocked(one, two, settle(two), by=boss):
        await one.rows("SET lock_timeout = '5s'")
        assert [job.job_id for job in await one.claim(worker)] == [other]
        await boss.commit()


async def test_a_limit_that_somebody_is_changing_is_not_waited_for_by_a_sweep(boss: Session, one: Session, two: Session) -> None:
    await one.limit("T", 1)
    await two.begin()
    await two.limit("T", 2)
    await one.rows("SET lock_timeout = '1ms'")
    await one.store.settle_limits(one.conn, wait=False)
    await two.commit()
    assert await boss.rows("SELECT settled FROM aioqueue.limits") == [(False,)]


async def test_a_job_that_ends_while_it_waits_holds_nothing(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue_one(tenant="T")
    worker = await one.register()
    job = await one.claim_one(worker)
    key = await one.limit("T", 1)
    await boss.begin()
    await boss.rows("SELECT aioqueue.lock_keys(ARRAY[%s::bigint])", key)
    async with blocked(one, two, settle(two), by=boss):
        await one.record(worker, entry(job))
        await boss.commit()
    assert await one.held() == []


@pytest.mark.parametrize("how", ["sweep", "resign"])
async def test_what_an_end_that_was_not_committed_yet_has_left_goes(boss: Session, one: Session, two: Session, how: str) -> None:
    await one.enqueue_one(tenant="T")
    worker = await one.register()
    job = await one.claim_one(worker)
    key = await one.limit("T", 1)
    await two.begin()
    await two.record(worker, entry(job))
    await settle(one)
    await two.commit()
    assert await one.held() == [(key, job.job_id)]
    await one.enqueue(2, tenant="T")
    alive = await one.register()
    assert await one.claim(alive) == []
    if how == "sweep":
        assert await one.sweep() == 1
        assert await one.sweep() == 1, "still nobody has it"
    else:
        await one.rows("SELECT aioqueue.resign(%s)", worker)
    assert await one.held() == []
    await one.sweep()
    assert len(await one.claim(alive)) == 1 == len(await one.held())
    assert await one.sweep() == 0, "the row of a job that runs stays"
    assert len(await one.held()) == 1


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
