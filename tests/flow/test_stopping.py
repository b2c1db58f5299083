"""Signals: the first drains, with the lease kept up to the end; the second hands back, spared."""

import signal

import pytest

from tests.flow.processes import Flow
from tests.kit import until_true

pytestmark = pytest.mark.anyio


async def test_sigterm_claims_nothing_more_and_lets_jobs_end(flow: Flow) -> None:
    worker = await flow.start()
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    worker.signal(signal.SIGTERM)
    await worker.logged("SIGTERM")
    (later,) = await flow.enqueue("quick")
    flow.gate.open()
    assert await worker.ended() == 0
    assert await flow.outcomes() == {job: ("succeeded", 1)}
    assert await flow.owner.state(later) == "ready"
    assert await flow.value("NOT EXISTS (SELECT FROM aioqueue.worker WHERE NOT dead)")


async def test_during_a_drain_of_several_leases_nobody_takes_the_job(flow: Flow) -> None:
    worker = await flow.start(lease=1)
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    other = await flow.start(lease=1)
    worker.signal(signal.SIGTERM)
    await worker.logged("SIGTERM")
    signalled = await flow.value("clock_timestamp()")
    await flow.until(
        "EXISTS (SELECT FROM aioqueue.worker WHERE pid = %s AND beat_at > %s + interval '3.5 s')", worker.pid, signalled
    )
    flow.gate.open()
    assert await worker.ended() == 0
    assert await flow.starts() == {job: [1]}
    assert await flow.outcomes() == {job: ("succeeded", 1)}
    assert other.process.poll() is None


async def test_a_second_sigterm_hands_back_what_runs_spared(flow: Flow) -> None:
    worker = await flow.start()
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    worker.signal(signal.SIGTERM)
    await worker.logged("SIGTERM: claiming nothing more")
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert await flow.owner.rows("SELECT attempt, spared, worker FROM aioqueue.live WHERE job_id = %s", job) == [(1, 1, None)]
    assert await flow.reasons(job) == ["interrupted"]
    flow.gate.open()
    await flow.start()
    await flow.until_ended([job])
    assert await flow.outcomes() == {job: ("succeeded", 2)}


async def test_a_cancel_reaches_a_job_while_its_worker_drains(flow: Flow) -> None:
    worker = await flow.start()
    (job,) = await flow.enqueue("for_ever")
    await flow.until_started(1)
    worker.signal(signal.SIGTERM)
    await worker.logged("SIGTERM: claiming nothing more")
    await flow.command("job", "cancel", str(job))
    assert await worker.ended() == 0
    assert await flow.outcomes() == {job: ("cancelled", 1)}


async def test_a_third_sigterm_exits_at_once_and_the_lease_decides(flow: Flow) -> None:
    worker = await flow.start(lease=6)
    (job,) = await flow.enqueue("block", payload='{"seconds": 600}')
    await flow.until_started(1)

    # The blocked loop cannot say that it has seen one; equal signals that come together count as one.
    def ended() -> bool:
        worker.signal(signal.SIGTERM)
        return worker.process.poll() is not None

    await until_true(ended)
    assert worker.process.returncode == 1
    assert await flow.owner.state(job) == "running"
    await flow.owner.rows("UPDATE aioqueue.job SET payload = '{\"seconds\": 0}' WHERE id = %s", job)
    await flow.start()
    await flow.until_ended([job])
    assert await flow.outcomes() == {job: ("succeeded", 2)}


async def test_a_worker_that_drains_ends_by_itself_once_nothing_is_ready(flow: Flow) -> None:
    jobs = await flow.enqueue("quick", 20)
    worker = await flow.start("--drain", "-c", "3", ready=False)
    assert await worker.ended() == 0
    assert await flow.outcomes() == dict.fromkeys(jobs, ("succeeded", 1))
