"""cancel_job: what waits ends at once, what runs is asked to end, what has ended keeps its end; and every race."""

from typing import Any
from uuid import uuid4

import pytest

from tests.sql.engine import Session, blocked, changed, entry

pytestmark = pytest.mark.anyio


async def test_a_waiting_job_is_cancelled_at_once(one: Session) -> None:
    ready, later = await one.enqueue_one(), await one.enqueue_one(delay=60)
    for job_id in (ready, later):
        assert await one.cancel(job_id) == "cancelled"
        assert await one.places(job_id) == ["outcome"]
        assert await one.cancel(job_id) == "cancelled"
    assert await one.claim(await one.register()) == []


async def test_a_running_job_is_asked_once_and_its_worker_told(boss: Session, one: Session, guest: Session) -> None:
    await one.enqueue()
    worker, other = await one.register(), await one.register()
    job = await one.claim_one(worker)
    for _ in range(2):
        assert await guest.cancel(job.job_id) == "running"
    assert (await one.tick(other)).cancelled == []
    assert (await one.tick(worker)).cancelled == [job.job_id]
    assert (await one.tick(worker)).cancelled == [job.job_id], "until the job has ended"
    assert await one.record(worker, entry(job, "cancelled", m="stopped")) == {job.job_id: "cancelled"}
    assert (await one.tick(worker)).cancelled == []


@pytest.mark.parametrize("reason", ["succeeded", "error"])
async def test_a_job_that_has_ended_keeps_its_end(one: Session, reason: str) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), reason))
    expected = "succeeded" if reason == "succeeded" else "dead"
    assert await one.cancel(job_id) == expected
    assert await one.state(job_id) == expected


async def test_an_unknown_job_and_another_tenants_are_none(one: Session, guest: Session) -> None:
    job_id, free = await one.enqueue_one(tenant="A"), await one.enqueue_one()
    assert await guest.cancel(uuid4()) is None
    assert await guest.cancel(job_id, "B") is None
    assert await guest.cancel(free, "A") is None
    assert await one.state(job_id) == "ready"
    assert await guest.cancel(job_id, "A") == "cancelled"


async def test_it_stands_in_the_callers_transaction(one: Session, two: Session) -> None:
    job_id = await one.enqueue_one()
    await one.begin()
    assert await one.cancel(job_id) == "cancelled"
    own = await one.enqueue_one()
    assert await one.cancel(own) == "cancelled", "a job of the same transaction"
    await one.rollback()
    assert await two.state(job_id) == "ready"
    assert await two.cancel(own) is None


async def test_a_claim_passes_over_a_job_that_is_being_cancelled(one: Session, two: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await two.register()
    await one.begin()
    await one.cancel(job_id)
    assert await two.claim(worker) == []
    await one.commit()
    assert await two.claim(worker) == []
    assert await one.places(job_id) == ["outcome"]


@pytest.mark.parametrize(("end", "answer"), [("COMMIT", "running"), ("ROLLBACK", "cancelled")])
async def test_it_waits_for_a_claim_in_flight(boss: Session, one: Session, two: Session, end: str, answer: str) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    await one.begin()
    await one.claim_one(worker)
    async with blocked(boss, two, two.cancel(job_id), by=one) as found:
        await one.rows(end)
    assert found.result() == answer
    assert (await one.tick(worker)).cancelled == ([job_id] if answer == "running" else [])


@pytest.mark.parametrize(
    ("outcome", "answer"),
    [
        ({"reason": "succeeded"}, "succeeded"),
        ({"reason": "error", "d": None}, "dead"),
        ({"reason": "error", "d": 0}, "cancelled"),
        ({"reason": "error", "d": 60}, "cancelled"),
    ],
)
async def test_it_follows_a_job_that_its_worker_records_meanwhile(
    boss: Session, one: Session, two: Session, outcome: dict[str, Any], answer: str
) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.begin()
    await one.record(worker, entry(job, **outcome))
    async with blocked(boss, two, two.cancel(job.job_id), by=one) as found:
        await one.commit()
    assert found.result() == answer
    assert await one.places(job.job_id) == ["outcome"]


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_it_follows_a_job_that_is_promoted_meanwhile(boss: Session, one: Session, two: Session, end: str) -> None:
    async def scenario() -> str | None:
        job_id = await one.enqueue_one(delay=60)
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
        await one.begin()
        assert await one.store.promote(one.conn, limit=10) == 1
        async with blocked(boss, two, two.cancel(job_id), by=one) as found:
            await one.rows(end)
        assert await one.places(job_id) == ["outcome"]
        return found.result()

    assert await scenario() == "cancelled"


async def test_sabotaged_one_look_would_miss_a_job_that_moves(boss: Session, one: Session, two: Session) -> None:
    job_id = await one.enqueue_one(delay=60)
    await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
    await one.begin()
    await one.store.promote(one.conn, limit=10)
    async with changed(boss, "cancel_job", ("IN 1..10 LOOP", "IN 1..1 LOOP")):
        with pytest.raises(Exception, match="moves on"):
            async with blocked(boss, two, two.cancel(job_id), by=one):
                await one.commit()
    assert await one.state(job_id) == "ready"


async def test_a_cancel_meets_a_rescue(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await boss.end_lease(worker)
    await one.begin()
    await one.rescue()
    async with blocked(boss, two, two.cancel(job.job_id), by=one) as found:
        await one.commit()
    assert found.result() == "cancelled", "it was ready again by then"


async def test_a_job_asked_to_end_whose_worker_dies_is_cancelled_by_rescue(boss: Session, one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.cancel(job.job_id)
    await boss.end_lease(worker)
    await one.rescue()
    assert await one.state(job.job_id) == "cancelled"
    assert await one.attempts(job.job_id) == [(1, "worker lost", f"worker {worker} was lost while it ran attempt 1")]


async def test_of_two_cancels_both_are_answered(boss: Session, one: Session, two: Session) -> None:
    job_id = await one.enqueue_one()
    await one.begin()
    await one.cancel(job_id)
    async with blocked(boss, two, two.cancel(job_id), by=one) as found:
        await one.commit()
    assert found.result() == "cancelled"
    assert await boss.value("SELECT count(*) FROM aioqueue.outcome") == 1


async def test_a_parked_job_is_cancelled_and_its_status_was_ready(boss: Session, one: Session) -> None:
    await one.limit("T", 1)
    _, waiting, last = await one.enqueue(3, tenant="T")
    worker = await one.register()
    await one.claim(worker)
    status = await one.store.job_status(one.conn, waiting, tenant="T")
    assert status is not None and status.state == "ready"
    assert await one.cancel(waiting, tenant="U") is None
    assert await one.cancel(waiting, tenant="T") == "cancelled"
    assert await one.cancel(waiting) == "cancelled"
    assert (await boss.places(waiting), await boss.places(last)) == (["outcome"], ["parked"])
