"""unpark_freed: what a rescue frees is followed up in its own transaction."""

import pytest

from tests.sql.engine import Session, blocked, limit_key

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("orphans", [False, True])
async def test_a_dead_workers_keys_are_free_and_as_many_jobs_are_ready(boss: Session, one: Session, orphans: bool) -> None:
    await one.limit_task("t", 3)
    key = await one.limit("T", 2)
    lost = await one.enqueue(4, task="t", tenant="T", max_attempts=1)
    dead, alive = await one.register(), await one.register()
    assert len(await one.claim(dead)) == 2
    if orphans:
        await boss.rows("DELETE FROM aioqueue.worker WHERE id = %s", dead)
        assert await one.store.rescue_orphans(one.conn, limit=10) == 2
    else:
        await boss.end_lease(dead)
        assert await one.rescue() == (dead, 2)
    assert (await one.held(), await one.parked()) == ([], [])
    assert {job.job_id for job in await one.claim(alive)} == set(lost[2:])
    assert sorted(k for k, _ in await one.held()) == sorted(2 * [key, limit_key("task", "t")])


async def test_it_waits_for_a_claim_that_saw_the_key_full(boss: Session, one: Session, two: Session) -> None:
    await one.limit("T", 1)
    await one.enqueue(2, tenant="T", max_attempts=1)
    dead, alive = await one.register(), await two.register()
    await one.claim(dead, 1)
    await two.begin()
    assert await two.claim(alive) == []
    await boss.end_lease(dead)
    watcher = boss
    async with blocked(watcher, one, one.rescue(), by=two) as waiting:
        await two.commit()
        assert await waiting == (dead, 1)
    assert len(await two.claim(alive)) == 1


async def test_none_is_none(boss: Session) -> None:
    await boss.rows("SELECT aioqueue.unpark_freed('{}', '{}', '{}')")
