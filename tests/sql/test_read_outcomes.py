"""read_outcomes: for every waiter of a process at once."""

from uuid import uuid4

import pytest

from aioqueue.job import JobState
from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_ended_running_unknown_and_forbidden_jobs_in_one_call(one: Session, guest: Session) -> None:
    ids = await one.enqueue(5, tenant="T")
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker, 4)}
    await one.record(
        worker,
        entry(jobs[ids[0]], r={"a": [1, "ü"]}),
        entry(jobs[ids[1]], "error", d=None, t="ValueError", m="broken"),
        entry(jobs[ids[2]], "cancelled", m="no more"),
        entry(jobs[ids[3]], "error", d=60, t="E", m="for now"),
    )
    asked = [(job_id, "T") for job_id in ids] + [(ids[0], "U"), (uuid4(), None), (ids[0], None)]
    found = await guest.store.read_outcomes(guest.conn, asked)
    assert [job.job_id for job in found] == [*ids, ids[0]]
    assert [job.state for job in found] == [JobState.SUCCEEDED, JobState.DEAD, JobState.CANCELLED, None, None, JobState.SUCCEEDED]
    assert found[0].result == '{"a": [1, "ü"]}'
    assert found[0].attempt == 1
    assert (found[1].error_type, found[1].error_message, found[1].result) == ("ValueError", "broken", None)
    assert found[2].message == "no more"


async def test_a_result_of_null_and_none_differ_from_no_result(one: Session) -> None:
    ids = await one.enqueue(2)
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker)}
    await one.open_job(jobs[ids[0]])
    await one.finish(jobs[ids[0]], "null")
    await one.commit()
    await one.record(worker, entry(jobs[ids[1]], r=0))
    found = await one.store.read_outcomes(one.conn, [(job_id, None) for job_id in ids])
    assert [job.result for job in found] == ["null", "0"]


async def test_nothing_asked_is_nothing_found(guest: Session) -> None:
    assert await guest.store.read_outcomes(guest.conn, []) == []
