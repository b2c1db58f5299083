"""beat: a living worker stays alive; a dead or unknown one is told so. Races with rescue: test_rescue.py."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_it_renews_the_lease_by_the_databases_clock(boss: Session, one: Session) -> None:
    worker = await one.register(lease=1)
    before = await boss.value("SELECT lease_until FROM aioqueue.worker")
    assert await one.store.beat(one.conn, worker=worker, lease=300, running=7)
    (row,) = await boss.rows(
        "SELECT lease_until > %s, running, lease_until - beat_at BETWEEN '299 s' AND '301 s' FROM aioqueue.worker", before
    )
    assert row == (True, 7, True)


async def test_a_late_beat_counts_as_long_as_nobody_said_dead(boss: Session, one: Session) -> None:
    worker = await one.register()
    await boss.end_lease(worker)
    assert await one.store.beat(one.conn, worker=worker, lease=30, running=0)
    assert await one.rescue() is None


async def test_a_dead_and_an_unknown_worker_are_refused(one: Session) -> None:
    worker = await one.register()
    await one.store.resign(one.conn, worker=worker)
    assert not await one.store.beat(one.conn, worker=worker, lease=30, running=0)
    assert not await one.store.beat(one.conn, worker=5, lease=30, running=0)
