"""rescue: the jobs of one dead worker, as long as it has any; then its row goes."""

import asyncio

import pytest

from aioqueue.job import SUSPECT, lane
from tests.sql.engine import LANE, Session, blocked, changed, entry

pytestmark = pytest.mark.anyio


async def test_the_living_are_left_alone(one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    await one.claim(worker)
    assert await one.rescue() is None


async def test_it_says_which_jobs_it_has_moved(boss: Session, one: Session) -> None:
    await one.enqueue(3)
    worker = await one.register()
    jobs = [job.job_id for job in await one.claim(worker, 2)]
    await boss.end_lease(worker)
    found = await one.store.rescue(one.conn, worker=0, limit=100)
    assert found is not None and found[:2] == (worker, 2) and sorted(found[2]) == sorted(jobs)


async def test_the_first_loss_is_ready_at_once_at_a_new_position(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(tenant="T")
    worker, other = await one.register(), await one.register()
    job = await one.claim_one(worker)
    await boss.publish(job.vt)
    await boss.end_lease(worker)
    assert await one.rescue(other) == (worker, 1)
    again = await one.claim_one(other)
    assert (again.job_id, again.attempt, again.spared, again.tenant) == (job_id, 2, 0, "T")
    assert again.vt > job.vt
    assert await one.attempts(job_id) == [(1, "worker lost", f"worker {worker} was lost while it ran attempt 1")]


async def test_a_worker_does_not_rescue_from_itself(boss: Session, one: Session) -> None:
    worker = await one.register()
    await boss.end_lease(worker)
    assert await one.rescue(worker) is None
    assert await one.rescue(0) == (worker, 0)


async def test_later_losses_wait_in_the_suspect_lane_and_the_last_attempt_is_dead(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(max_attempts=3)
    states, lanes = [], []
    for _ in range(3):
        worker = await one.register()
        await one.store.promote(one.conn, limit=10)
        lanes.append((await one.claim_one(worker, lanes=(LANE, lane("default", SUSPECT)))).lane)
        await boss.end_lease(worker)
        await one.rescue()
        states.append(await one.state(job_id))
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
    assert states == ["ready", "scheduled", "dead"]
    assert lanes == [LANE, LANE, lane("default", SUSPECT)]
    assert [row[:2] for row in await one.attempts(job_id)] == [(n, "worker lost") for n in (1, 2, 3)]
    assert await one.places(job_id) == ["outcome"]


async def test_spared_attempts_are_not_held_against_the_job(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(max_attempts=1)
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), "interrupted", d=0, s=True))
    assert await one.state(job_id) == "ready"
    await one.claim_one(worker)
    await boss.end_lease(worker)
    await one.rescue()
    assert await one.state(job_id) == "dead"


async def test_a_dead_worker_stays_on_the_list_until_a_pass_finds_nothing(boss: Session, one: Session) -> None:
    async def scenario() -> list[tuple[int, int] | None]:
        await one.enqueue(5)
        worker = await one.register()
        await one.claim(worker)
        await boss.end_lease(worker)
        passes = [await one.rescue(limit=2) for _ in range(5)]
        running = await boss.value("SELECT count(*) FROM aioqueue.jobs WHERE state = 'running'")
        await boss.rows("TRUNCATE aioqueue.live, aioqueue.worker")
        return [found and (running, found[1]) for found in passes]

    assert await scenario() == [(0, 2), (0, 2), (0, 1), (0, 0), None]
    early = ("IF moved = 0 AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.worker = w) THEN", "IF true THEN")
    async with changed(boss, "rescue", early):
        assert await scenario() == [(3, 2), None, None, None, None], "sabotaged: three run for ever"


async def test_a_dead_worker_that_beats_again_stays_dead(boss: Session, one: Session) -> None:
    await one.enqueue(2)
    worker = await one.register()
    await one.claim(worker)
    await boss.end_lease(worker)
    assert await one.rescue(limit=1) == (worker, 1)
    assert not await one.store.beat(one.conn, worker=worker, lease=60, running=2)
    assert await one.rescue(limit=1) == (worker, 1)


async def test_one_dead_workers_locked_job_holds_up_no_others(boss: Session, one: Session, two: Session) -> None:
    """A zombie's transaction that hangs before its COMMIT, or a client's cancel in a long transaction."""
    await one.enqueue(4)
    workers = sorted([await one.register(), await one.register()])
    stuck = await one.claim_one(workers[0])
    await one.claim(workers[1], 3)
    await boss.end_lease(*workers)
    await two.begin()
    await two.cancel(stuck.job_id)
    moved = [found[1] for _ in range(100) if (found := await one.rescue(limit=1))]
    assert sum(moved) == 3
    await two.commit()
    while await one.rescue() is not None:
        pass
    assert await one.state(stuck.job_id) == "cancelled"


async def test_two_rescues_at_once_share_the_dead_and_rescue_each_job_once(boss: Session, one: Session, two: Session) -> None:
    jobs = await one.enqueue(4)
    workers = {await one.register(), await one.register()}
    for worker in workers:
        await one.claim(worker, 2)
    await boss.end_lease(*workers)
    await one.begin()
    first = await one.rescue()
    second = await two.rescue()
    assert first is not None and second is not None
    assert {first, second} == {(worker, 2) for worker in workers}
    assert await two.rescue() == (second[0], 0)
    assert await two.rescue() is None, "the other pass holds the row of its worker"
    await one.commit()
    for job_id in jobs:
        assert len(await one.attempts(job_id)) == 1
        assert await one.places(job_id) == ["live"]


async def test_a_rescue_that_rolls_back_leaves_everything_to_the_next(boss: Session, one: Session, two: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    await one.claim(worker)
    await boss.end_lease(worker)
    await one.begin()
    assert await one.rescue() == (worker, 1)
    await one.rollback()
    assert await two.rescue() == (worker, 1)
    assert len(await one.attempts(job_id)) == 1


async def test_rescue_passes_over_a_worker_whose_beat_is_in_flight(boss: Session, one: Session, two: Session) -> None:
    worker = await one.register()
    await boss.end_lease(worker)
    await one.begin()
    assert await one.store.beat(one.conn, worker=worker, lease=60, running=0)
    assert await two.rescue() is None
    await one.commit()
    assert await two.rescue() is None


async def test_a_beat_waits_for_rescue_and_is_refused(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    await one.claim(worker)
    await boss.end_lease(worker)
    await two.begin()
    await two.rescue()
    beat = one.store.beat(one.conn, worker=worker, lease=60, running=0)
    async with blocked(boss, one, beat, by=two) as answer:
        await two.commit()
    assert answer.result() is False


async def test_a_request_to_cancel_goes_with_its_worker(boss: Session, one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.cancel(job.job_id)
    await one.record(worker, entry(job))
    await boss.end_lease(worker)
    assert await one.rescue() == (worker, 0)
    assert await boss.rows("SELECT 1 FROM aioqueue.cancel") == []


async def test_finish_against_rescue_a_hundred_times_never_two_ends_and_never_none(
    boss: Session, one: Session, two: Session
) -> None:
    jobs = await one.enqueue(100)
    for _ in jobs:
        worker = await one.register()
        job = await one.claim_one(worker)
        await boss.end_lease(worker)
        recorded, rescued = await asyncio.gather(one.record(worker, entry(job)), two.rescue())
        assert rescued is not None
        written = recorded.get(job.job_id) == "succeeded"  # or "locked": the rescue had its row
        assert not (written and rescued[1])
        while await two.rescue() is not None:
            pass
        assert len(await one.places(job.job_id)) == 1
        if await one.state(job.job_id) == "ready":
            await one.cancel(job.job_id)
