"""record: a batch of any outcomes, each fenced by position, worker and attempt."""

import json
import secrets
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest

from aioqueue.claimed import Claimed
from tests.sql.engine import Session, changed, entry

pytestmark = pytest.mark.anyio


async def running(one: Session, number: int = 1, **options: object) -> tuple[int, list[Claimed]]:
    ids = await one.enqueue(number, **options)
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker, number)}
    return worker, [jobs[job_id] for job_id in ids]


async def test_a_batch_with_every_kind_of_outcome(boss: Session, one: Session) -> None:
    worker, jobs = await running(one, 9)
    states = await one.record(
        worker,
        entry(jobs[0], r={"sum": 3}),
        entry(jobs[1], "error", d=60, t="E", m="boom", b="trace"),
        entry(jobs[2], "error", d=0, t="E", m="at once"),
        entry(jobs[3], "error", d=None, t="E", m="for good"),
        entry(jobs[4], "cancelled", m="no more"),
        entry(jobs[5], "snoozed", d=5, s=True),
        entry(jobs[6], "interrupted", d=0, s=True),
        entry(jobs[7], "unknown task", d=1, s=True, u="t"),
        entry(jobs[8], r=None),
    )
    expected = [
        "succeeded", "scheduled", "ready", "dead", "cancelled", "scheduled", "ready", "scheduled", "succeeded",
    ]  # fmt: skip
    assert [states[job.job_id] for job in jobs] == expected
    assert [await one.state(job.job_id) for job in jobs] == expected
    for job in jobs:
        assert len(await one.places(job.job_id)) == 1
    facts = await boss.rows("SELECT id, spared, result, reason, error_type, error, unknown_task FROM aioqueue.jobs")
    seen = {row[0]: row[1:] for row in facts}
    assert seen[jobs[0].job_id] == (0, {"sum": 3}, None, None, None, None)
    assert seen[jobs[1].job_id] == (0, None, "error", "E", "boom", None)
    assert seen[jobs[3].job_id] == (0, None, "error", "E", "for good", None)
    assert seen[jobs[4].job_id] == (0, None, "cancelled", None, "no more", None)
    assert seen[jobs[5].job_id] == (1, None, "snoozed", None, None, None)
    assert seen[jobs[6].job_id] == (1, None, "interrupted", None, None, None)
    assert seen[jobs[7].job_id] == (1, None, "unknown task", None, None, "t")
    for job in (jobs[0], jobs[8]):
        assert await one.attempts(job.job_id) == []
    delays = await boss.rows(
        "SELECT s.run_at - a.finished_at FROM aioqueue.scheduled s JOIN aioqueue.attempt a USING (job_id) ORDER BY 1"
    )
    assert [delay.total_seconds() for (delay,) in delays] == [1, 5, 60]


async def test_an_empty_batch_and_one_of_strangers_change_nothing(one: Session) -> None:
    worker, (job,) = await running(one)
    assert await one.record(worker) == {}
    stranger = replace(job, job_id=UUID(int=5))
    assert await one.record(worker, entry(stranger), entry(stranger, "error", d=0)) == {}
    assert await one.places(job.job_id) == ["live"]


@pytest.mark.parametrize("part", ["l", "v", "a", "worker"])
@pytest.mark.parametrize("reason", ["succeeded", "error"])
async def test_each_part_of_the_fence_refuses(one: Session, part: str, reason: str) -> None:
    worker, (job,) = await running(one)
    wrong = entry(job, reason, d=0)
    if part != "worker":
        wrong[part] = getattr(job, {"l": "lane", "v": "vt", "a": "attempt"}[part]) + 1
    assert await one.record(worker + (part == "worker"), wrong) == {}
    assert await one.state(job.job_id) == "running"
    assert await one.attempts(job.job_id) == []


async def test_only_the_identity_tells_two_claims_with_equal_counters_apart(boss: Session, one: Session) -> None:
    """As after an asynchronous failover: the claim was lost, and another worker made the same one on the new primary."""
    _, (old,) = await running(one)
    other = secrets.randbits(62)
    await boss.rows("UPDATE aioqueue.live SET worker = %s", other)
    assert await one.record(old.worker, entry(old), entry(old, "error", d=0)) == {}
    fence = "l.worker = p_worker AND "
    async with changed(boss, "record", (fence, "")):
        assert await one.record(old.worker, entry(old)) == {old.job_id: "succeeded"}, "sabotaged: a zombie's end counts"


async def test_the_same_batch_again_changes_nothing(one: Session) -> None:
    worker, jobs = await running(one, 4)
    batch = [
        entry(jobs[0]),
        entry(jobs[1], "error", d=0),
        entry(jobs[2], "error", d=5),
        entry(jobs[3], "error", d=None),
    ]
    assert len(await one.record(worker, *batch)) == 4
    before = [(await one.places(job.job_id), await one.attempts(job.job_id)) for job in jobs]
    assert await one.record(worker, *batch) == {}
    assert [(await one.places(job.job_id), await one.attempts(job.job_id)) for job in jobs] == before


async def test_a_request_to_cancel_wins_over_every_outcome_but_success(boss: Session, one: Session) -> None:
    worker, jobs = await running(one, 4)
    for job in jobs:
        assert await one.cancel(job.job_id) == "running"
    states = await one.record(
        worker,
        entry(jobs[0]),
        entry(jobs[1], "error", d=0, m="boom"),
        entry(jobs[2], "snoozed", d=9, s=True),
        entry(jobs[3], "error", d=None, m="boom"),
    )
    assert [states[job.job_id] for job in jobs] == ["succeeded", "cancelled", "cancelled", "cancelled"]
    assert await boss.rows("SELECT job_id FROM aioqueue.cancel") == [(jobs[0].job_id,)], "the next tick removes it"
    await one.tick(worker)
    assert await boss.rows("SELECT 1 FROM aioqueue.cancel") == []


async def test_record_passes_over_a_job_being_cancelled_and_then_sees_its_request(one: Session, two: Session) -> None:
    worker, (job,) = await running(one)
    await two.begin()
    assert await two.cancel(job.job_id) == "running"
    assert await one.record(worker, entry(job, "error", d=0)) == {job.job_id: "locked"}
    await two.commit()
    assert await one.record(worker, entry(job, "error", d=0)) == {job.job_id: "cancelled"}
    assert await one.places(job.job_id) == ["outcome"]


async def test_a_locked_job_keeps_no_other_success_waiting_and_is_not_lost(one: Session, two: Session) -> None:
    worker, jobs = await running(one, 3)
    await two.begin()
    await two.cancel(jobs[1].job_id)
    states = await one.record(worker, *map(entry, jobs))
    assert [states[job.job_id] for job in jobs] == ["succeeded", "locked", "succeeded"]
    await two.commit()
    assert await one.record(worker, *map(entry, jobs)) == {jobs[1].job_id: "succeeded"}


async def test_record_after_rescue_finds_nothing(boss: Session, one: Session, two: Session) -> None:
    worker, jobs = await running(one, 2)
    await boss.end_lease(worker)
    await two.begin()
    assert await two.rescue() == (worker, 2)
    batch = [entry(jobs[0]), entry(jobs[1], "error", d=None)]
    assert set((await one.record(worker, *batch)).values()) == {"locked"}
    await two.commit()
    assert await one.record(worker, *batch) == {}
    assert [await one.state(job.job_id) for job in jobs] == ["ready", "ready"]


async def test_rescue_passes_over_a_row_that_is_being_recorded(boss: Session, one: Session, two: Session) -> None:
    worker, (job,) = await running(one)
    await boss.end_lease(worker)
    await one.begin()
    await one.record(worker, entry(job))
    assert await two.rescue() == (worker, 0)
    await one.rollback()
    assert await two.rescue() == (worker, 1), "the worker stayed on the list, since its job was still there"
    assert await one.places(job.job_id) == ["live"]


async def test_what_is_refused_for_its_content_leaves_the_batch_undone(boss: Session, one: Session) -> None:
    """The caller halves such a batch until the culprit stands alone; nothing of it may have been written."""
    worker, jobs = await running(one, 3)
    with pytest.raises(psycopg.DataError):
        await one.store.record(
            one.conn,
            worker=worker,
            outcomes=[
                json.dumps(each) for each in (entry(jobs[0]), entry(jobs[1], r="a\0b"), entry(jobs[2], "error", d=0, m="x\0y"))
            ],
        )
    assert [await one.state(job.job_id) for job in jobs] == ["running"] * 3
    with pytest.raises(psycopg.DataError):
        await one.record(worker, entry(jobs[0]), entry(jobs[1], "error", d=1e300))
    assert [await one.state(job.job_id) for job in jobs] == ["running"] * 3
    assert len(await one.record(worker, *map(entry, jobs))) == 3


async def test_a_large_mixed_batch_leaves_every_job_in_one_place(boss: Session, one: Session) -> None:
    worker, jobs = await running(one, 300)
    kinds: list[dict[str, Any]] = [
        {"reason": "succeeded"},
        {"reason": "error", "d": 0},
        {"reason": "error", "d": 3},
        {"reason": "error", "d": None},
        {"reason": "cancelled"},
        {"reason": "interrupted", "d": 0, "s": True},
    ]
    batch = [entry(job, **kinds[i % len(kinds)]) for i, job in enumerate(jobs)]
    secrets.SystemRandom().shuffle(batch)
    assert len(await one.record(worker, *batch)) == 300
    assert await boss.rows("SELECT state, count(*) FROM aioqueue.jobs GROUP BY 1 ORDER BY 1") == [
        ("cancelled", 50),
        ("dead", 50),
        ("ready", 100),
        ("scheduled", 50),
        ("succeeded", 50),
    ]
    assert (
        await boss.rows(
            "SELECT job_id FROM (SELECT job_id FROM aioqueue.live UNION ALL SELECT job_id FROM aioqueue.scheduled"
            " UNION ALL SELECT job_id FROM aioqueue.outcome) x GROUP BY 1 HAVING count(*) > 1"
        )
        == []
    )


async def test_what_is_ready_again_lies_above_the_lanes_virtual_time(boss: Session, one: Session) -> None:
    worker, (job,) = await running(one)
    await boss.publish(70_000)
    await one.record(worker, entry(job, "error", d=0))
    again = await one.claim_one(worker)
    assert (again.vt, again.attempt) == (71_000, 2)


async def test_a_job_handed_back_again_and_again_waits_longer_each_time(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(max_attempts=1)
    worker = await one.register()
    waits = []
    for _ in range(30):
        job = await one.claim_one(worker)
        state = (await one.record(worker, entry(job, "interrupted", d=0, s=True)))[job_id]
        if state == "ready":
            waits.append(0.0)
            continue
        waits.append(
            await boss.value(
                "SELECT extract(epoch FROM s.run_at - a.finished_at)::float"
                " FROM aioqueue.scheduled s JOIN aioqueue.attempt a USING (job_id)"
                " ORDER BY a.attempt DESC LIMIT 1"
            )
        )
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = clock_timestamp()")
        await one.store.promote(one.conn, limit=10)
    assert waits == [0.0] * 20 + [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


async def test_successes_in_arrays_are_one_answer_while_all_are_recorded(boss: Session, one: Session) -> None:
    worker, jobs = await running(one, 3)
    record = one.store.record
    assert await record(one.conn, worker=worker, succeeded=jobs[:2], results=["3", '{"a": [1, null]}']) is None
    assert await boss.rows("SELECT result FROM aioqueue.outcome ORDER BY result") == [(3,), ({"a": [1, None]},)]
    assert await record(one.conn, worker=worker, succeeded=jobs[:2], results=["1", "1"]) == {}, "not ours any more"
    found = await record(one.conn, worker=worker, succeeded=jobs, results=["1", "1", "1"])
    assert found == {jobs[2].job_id: "succeeded"}, "one by one where some are not ours"


async def test_successes_in_arrays_beside_other_outcomes_and_locked_rows(boss: Session, one: Session) -> None:
    worker, jobs = await running(one, 4)
    await boss.begin()
    await boss.rows("SELECT FROM aioqueue.live WHERE job_id = %s FOR UPDATE", jobs[1].job_id)
    other = [json.dumps(entry(jobs[2], "error", d=0)), json.dumps(entry(jobs[3], r=7))]
    found = await one.store.record(one.conn, worker=worker, outcomes=other, succeeded=jobs[:2], results=["1", "2"])
    await boss.rollback()
    states = ["succeeded", "locked", "ready", "succeeded"]
    assert found == {job.job_id: state for job, state in zip(jobs, states, strict=True)}
    assert await one.state(jobs[1].job_id) == "running"
