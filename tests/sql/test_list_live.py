"""list_live: ready jobs as they will be claimed, running ones the longest first."""

import pytest

from tests.sql.engine import LANE, Session

pytestmark = pytest.mark.anyio


async def test_ready_ones_by_priority_and_position(one: Session) -> None:
    low, normal = await one.enqueue_one(priority=-1), await one.enqueue(2)
    high = await one.enqueue_one(priority=2, queue="q")
    page = await one.store.list_jobs(one.conn, state="ready", window=10, limit=10)
    assert [job["id"] for job in page.jobs] == [high, *normal, low]
    page = await one.store.list_jobs(one.conn, state="ready", window=10, limit=2)
    assert [job["id"] for job in page.jobs] == [high, normal[0]]
    page = await one.store.list_jobs(one.conn, state="ready", queue="q", window=10, limit=10)
    assert [job["id"] for job in page.jobs] == [high]
    page = await one.store.list_jobs(one.conn, state="ready", queue="nowhere", window=10, limit=10)
    assert (page.jobs, page.scanned) == ([], 0)


async def test_running_ones_by_their_start(one: Session) -> None:
    first, second, third = await one.enqueue(3)
    worker = await one.register()
    for _ in range(2):
        await one.claim_one(worker)
    page = await one.store.list_jobs(one.conn, state="running", window=10, limit=10)
    assert [(job["id"], job["worker"]) for job in page.jobs] == [(first, worker), (second, worker)]
    page = await one.store.list_jobs(one.conn, state="ready", window=10, limit=10)
    assert [job["id"] for job in page.jobs] == [third]


async def test_a_suspect_is_found_by_its_queue(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one()
    for _ in range(2):
        worker = await one.register()
        await one.claim(worker)
        await boss.end_lease(worker)
        assert await one.rescue() == (worker, 1)
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
        await one.store.promote(one.conn, limit=10)
        await one.rescue()
    assert await boss.value("SELECT lane FROM aioqueue.live") != LANE, "it is no suspect"
    page = await one.store.list_jobs(one.conn, state="ready", queue="default", window=10, limit=10)
    assert [job["id"] for job in page.jobs] == [job_id]


async def test_parked_jobs_are_ready_ones_behind_the_others(one: Session) -> None:
    await one.limit("T", 1)
    running, *parked = await one.enqueue(3, tenant="T")
    await one.claim(await one.register())
    ready = await one.enqueue_one(tenant="U")
    elsewhere = await one.enqueue_one(tenant="T", queue="q")
    page = await one.store.list_jobs(one.conn, state="ready", queue="default", window=100, limit=100)
    assert [job["id"] for job in page.jobs] == [ready, *parked]
    page = await one.store.list_jobs(one.conn, state="ready", tenant="T", window=100, limit=100)
    assert [job["id"] for job in page.jobs] == [elsewhere, *parked]
    page = await one.store.list_jobs(one.conn, state="running", window=100, limit=100)
    assert [job["id"] for job in page.jobs] == [running]
