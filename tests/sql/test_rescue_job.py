"""rescue_job: ready after the first loss, back-off and the suspect lane from the second on, dead after the last attempt."""

import json

import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, Session, progress

pytestmark = pytest.mark.anyio
CALL = "SELECT aioqueue.rescue_job(l) FROM aioqueue.live l"


async def test_losses_lead_to_the_suspect_lane_and_to_death(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(max_attempts=4)
    worker = await one.register()
    suspects = lane("default", 9)
    seen = []
    for _ in range(4):
        (job,) = await one.claim(worker, 1, lanes=[LANE, suspects])
        state = await boss.value(CALL)
        seen.append((job.lane, state))
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
        await one.store.promote(one.conn, limit=1)
    assert seen == [(LANE, "ready"), (LANE, "scheduled"), (suspects, "scheduled"), (suspects, "dead")]
    assert [row[1] for row in await boss.attempts(job_id)] == ["worker lost"] * 4


async def test_the_back_off_is_jittered_and_bounded(boss: Session, one: Session) -> None:
    await one.enqueue(40, max_attempts=100)
    worker = await one.register()
    for _ in range(3):
        await one.claim(worker, 100, lanes=[LANE, lane("default", 9)])
        await boss.rows(CALL)
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
        while await one.store.promote(one.conn, limit=100):
            pass
    await one.claim(worker, 100, lanes=[LANE, lane("default", 9)])
    await boss.rows(CALL)
    waits = [
        float(wait)
        for (wait,) in await boss.rows(
            "SELECT extract(epoch FROM s.run_at - a.finished_at) FROM aioqueue.scheduled s"
            " JOIN aioqueue.attempt a ON a.job_id = s.job_id AND a.attempt = 4"
        )
    ]
    assert len(waits) == 40
    assert 0 < min(waits) < max(waits) <= 8
    assert len(set(waits)) > 30


async def test_what_the_lost_worker_has_reported_goes(boss: Session, one: Session) -> None:
    lost, other = await one.enqueue(2)
    jobs = await one.claim(await one.register())
    await one.store.report(one.conn, json.dumps([progress(job) for job in jobs]))
    await boss.rows(f"{CALL} WHERE l.job_id = %s", lost)
    assert await boss.rows("SELECT job_id FROM aioqueue.progress") == [(other,)]
