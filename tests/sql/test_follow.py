"""follow: for everybody who watches in a process, at once: the state, the attempt, the progress, the end."""

import json
from uuid import uuid4

import pytest

from aioqueue.job import JobState
from tests.sql.engine import Session, entry, progress

pytestmark = pytest.mark.anyio


async def test_every_state_in_one_call(boss: Session, one: Session, guest: Session) -> None:
    ids = await one.enqueue(7, tenant="T")
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker, 6)}
    await one.record(
        worker,
        entry(jobs[ids[0]], r={"a": "ü"}),
        entry(jobs[ids[1]], "error", d=None, t="ValueError", m="broken"),
        entry(jobs[ids[2]], "cancelled", m="no more"),
        entry(jobs[ids[3]], "error", d=60, t="E", m="for now"),
    )
    await one.store.report(one.conn, json.dumps([progress(jobs[ids[4]], 0.25, m="1 of 4"), progress(jobs[ids[0]])]))
    asked = [(job_id, "T") for job_id in ids] + [(ids[0], "U"), (ids[4], "U"), (uuid4(), None), (ids[4], None)]
    found = await guest.store.follow(guest.conn, asked)
    assert [job.job_id for job in found] == [*ids, ids[4]]
    assert [job.stage for job in found] == [
        JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, JobState.SCHEDULED, JobState.RUNNING, JobState.RUNNING,
        JobState.READY, JobState.RUNNING,
    ]  # fmt: skip
    assert [job.attempt for job in found] == [1, 1, 1, 1, 1, 1, 0, 1]
    assert [job.progress and (job.progress.value, job.progress.message) for job in found] == [
        None, None, None, None, (0.25, "1 of 4"), None, None, (0.25, "1 of 4"),
    ]  # fmt: skip
    ends = await guest.store.read_outcomes(guest.conn, asked)
    assert [(a.state, a.result, a.message, a.error_type, a.error_message) for a in found] == [
        (b.state, b.result, b.message, b.error_type, b.error_message) for b in ends
    ]


async def test_a_job_that_waits_for_a_limit_is_ready(one: Session, guest: Session) -> None:
    await one.limit("T", 1)
    ids = await one.enqueue(2, tenant="T")
    await one.claim(await one.register())
    found = await guest.store.follow(guest.conn, [(job_id, "T") for job_id in ids])
    assert [job.stage for job in found] == [JobState.RUNNING, JobState.READY]
    assert len(await one.parked()) == 1


async def test_progress_is_that_of_this_very_claim(boss: Session, one: Session, guest: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.store.report(one.conn, json.dumps([progress(job, 0.75)]))
    await one.record(worker, entry(job, "error", d=0))
    ready = await guest.store.follow(guest.conn, [(job_id, None)])
    again = await one.claim_one(worker)
    (running,) = await guest.store.follow(guest.conn, [(job_id, None)])
    assert (again.attempt, running.attempt, running.progress, ready[0].progress) == (2, 2, None, None)
    status = await guest.store.job_status(guest.conn, job_id)
    assert status is not None
    assert status.progress is None
    # Another worker's, with equal counters: as after a failover.
    await boss.rows("UPDATE aioqueue.progress SET attempt = 2, worker = worker + 1")
    (running,) = await guest.store.follow(guest.conn, [(job_id, None)])
    assert running.progress is None
    await one.store.report(one.conn, json.dumps([progress(again, 0.25, 2)]))
    (running,) = await guest.store.follow(guest.conn, [(job_id, None)])
    status = await guest.store.job_status(guest.conn, job_id)
    assert status is not None
    assert running.progress == status.progress
    assert running.progress is not None
    assert (running.progress.value, running.progress.message) == (0.25, None)


async def test_nothing_asked_is_nothing_found(guest: Session) -> None:
    assert await guest.store.follow(guest.conn, []) == []
