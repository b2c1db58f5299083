"""Leases: long jobs keep theirs, frozen workers lose it and what they do then changes nothing, blocked loops end once."""

import signal

import pytest

from tests.flow.processes import Flow

pytestmark = pytest.mark.anyio


async def test_two_workers_share_the_work(flow: Flow) -> None:
    workers = [await flow.start("-c", "2") for _ in range(2)]
    jobs = await flow.enqueue("hold", 4)
    await flow.until_started(4)
    rows = await flow.owner.rows("SELECT pid, count(*) FROM flow.note GROUP BY pid")
    assert dict(rows) == {worker.pid: 2 for worker in workers}
    flow.gate.open()
    await flow.until_ended(jobs)


async def test_a_job_of_several_leases_runs_once(flow: Flow) -> None:
    first = await flow.start(lease=1)
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    await flow.start(lease=1)
    await flow.until(
        "EXISTS (SELECT FROM aioqueue.worker w, flow.note n WHERE w.pid = %s AND w.beat_at > n.at + interval '4 s')", first.pid
    )
    flow.gate.open()
    await flow.until_ended([job])
    assert await flow.starts() == {job: [1]}
    assert await flow.outcomes() == {job: ("succeeded", 1)}


async def test_a_worker_that_was_frozen_past_its_lease_changes_nothing_and_goes_on_under_another_identity(flow: Flow) -> None:
    frozen = await flow.start()
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    await flow.start("-c", "1")
    frozen.signal(signal.SIGSTOP)
    await flow.until_started(2)
    before = await flow.value("array_agg(id) FROM aioqueue.worker WHERE pid = %s", frozen.pid)
    frozen.signal(signal.SIGCONT)
    await flow.until(
        "EXISTS (SELECT FROM aioqueue.worker WHERE pid = %s AND NOT dead AND id <> ALL (coalesce(%s::bigint[], '{}')))",
        frozen.pid, before, alive=frozen,
    )  # fmt: skip
    # The other one is full: this is for the worker that was frozen.
    (next_job,) = await flow.enqueue("quick")
    await flow.until_ended([next_job])
    assert await flow.value("pid FROM flow.note WHERE job_id = %s", next_job) == frozen.pid
    flow.gate.open()
    await flow.until_ended([job])
    assert await flow.starts() == {job: [1, 2], next_job: [1]}
    assert (await flow.outcomes())[job] == ("succeeded", 2)
    ends = await flow.owner.rows("SELECT attempt FROM flow.note WHERE job_id = %s AND what = 'end'", job)
    assert ends == [(2,)], "the first run was cancelled"


async def test_a_loop_that_is_blocked_for_several_leases_keeps_its_jobs(flow: Flow) -> None:
    # One that looks for the dead, and has no room for more.
    await flow.start("-c", "1", lease=1)
    jobs = await flow.enqueue("hold")
    await flow.until_started(1)
    blocked = await flow.start("-c", "2", lease=1)
    jobs += await flow.enqueue("hold")
    await flow.until_started(2)
    jobs += await flow.enqueue("block", payload='{"seconds": 4}')
    # What `health` and `status` say of it.
    said = "%the event loop is blocked at %/tests/flow/tasks.py:% in block%"
    await flow.until("EXISTS (SELECT FROM aioqueue.worker WHERE pid = %s AND problems::text LIKE %s)", blocked.pid, said)
    await flow.until("EXISTS (SELECT FROM flow.note WHERE job_id = %s AND what = 'end')", jobs[-1], alive=blocked)
    flow.gate.open()
    await flow.until_ended(jobs)
    assert await flow.outcomes() == dict.fromkeys(jobs, ("succeeded", 1))
    assert await flow.starts() == {job: [1] for job in jobs}


async def test_a_worker_with_free_slots_never_takes_a_job_again_that_it_runs_itself(flow: Flow) -> None:
    worker = await flow.start("-c", "10", lease=1)
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    others = []
    for lease in range(1, 4):
        await flow.until(
            "EXISTS (SELECT FROM aioqueue.worker w, flow.note n WHERE n.job_id = %s AND w.beat_at > n.at + %s * interval '1 s')",
            job, lease, alive=worker,
        )  # fmt: skip
        others += await flow.enqueue("quick")  # it looks for work, and finds some
        await flow.until_ended(others)
    flow.gate.open()
    await flow.until_ended([job])
    assert await flow.starts() == {started: [1] for started in (job, *others)}
    assert await flow.outcomes() == dict.fromkeys([job, *others], ("succeeded", 1))
