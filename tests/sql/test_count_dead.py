"""count_dead: the jobs that ended as dead of late."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_counts_the_dead_of_the_last_week_up_to_the_cap(one: Session, boss: Session) -> None:
    assert await one.store.count_dead(one.conn, cap=3) == 0
    jobs = await one.enqueue(4)
    worker = await one.register()
    claimed = {job.job_id: job for job in await one.claim(worker)}
    await one.record(worker, *(entry(claimed[job_id], "error") for job_id in jobs))
    await one.cancel(await one.enqueue_one())
    assert await one.store.count_dead(one.conn, cap=10) == 4
    assert await one.store.count_dead(one.conn, cap=3) == 3
    await boss.rows("UPDATE aioqueue.outcome SET finished_at = finished_at - interval '8 days' WHERE job_id = %s", jobs[0])
    assert await one.store.count_dead(one.conn, cap=10) == 3
