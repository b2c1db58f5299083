"""count_lanes: ready and running jobs of each queue and priority, and the oldest."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_counts_up_to_the_cap(one: Session) -> None:
    await one.enqueue(5)
    await one.enqueue(2, queue="q", priority=1)
    await one.enqueue(1, delay=60)
    await one.claim(await one.register(), 2)
    seen = [
        (found["queue"], found["priority"], found["ready"], found["running"], found["more"])
        for found in await one.store.count_lanes(one.conn, cap=4)
    ]
    assert seen == [("q", 1, 2, 0, False), ("default", 0, 2, 2, True)]


async def test_how_long_the_oldest_has_been_ready(boss: Session, one: Session) -> None:
    old, handed_back = await one.enqueue(2)
    worker = await one.register()
    for job in await one.claim(worker):
        if job.job_id == handed_back:
            await one.record(worker, entry(job, "error", d=0))
    # A day since it was enqueued, but a moment since its attempt failed; the other one runs.
    await boss.rows("UPDATE aioqueue.job SET created_at = created_at - interval '1 day'")
    (found,) = await one.store.count_lanes(one.conn, cap=10)
    assert 0 <= found["oldest_ready_seconds"] < 3600
    waiting = await one.enqueue_one()
    await boss.rows("UPDATE aioqueue.job SET created_at = created_at - interval '1 day' WHERE id = %s", waiting)
    (found,) = await one.store.count_lanes(one.conn, cap=10)
    assert found["oldest_ready_seconds"] >= 86_400
    await boss.rows("UPDATE aioqueue.job SET run_at = created_at + interval '1 day' WHERE id = %s", waiting)
    (found,) = await one.store.count_lanes(one.conn, cap=10)
    assert found["oldest_ready_seconds"] < 3600
    assert (found["ready"], found["running"]) == (2, 1) and old != waiting


async def test_nothing_is_due(one: Session) -> None:
    await one.enqueue(1, delay=60)
    assert await one.store.count_lanes(one.conn, cap=10) == []
