"""Handlers that raise what nobody expects, that end in every way there is, that never end: the worker lives, no job is stuck."""

import json
import signal
import subprocess

import pytest

from tests.flow.processes import Flow
from tests.flow.tasks import ERRORS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("loop", ["--no-uvloop", "--uvloop"])
async def test_whatever_is_raised_also_in_threads_and_nested_tasks_fails_its_job_alone(flow: Flow, loop: str) -> None:
    worker = await flow.start(loop, lease=30)
    jobs = {}
    for error in ERRORS:
        for nested in (False, True):
            payload = json.dumps({"error": error, "nested": nested})
            jobs[error, nested] = (await flow.enqueue("raises", payload=payload, max_attempts=1))[0]
        jobs[error, None] = (await flow.enqueue("raises_in_thread", payload=json.dumps({"error": error}), max_attempts=1))[0]
    await flow.until_ended(list(jobs.values()))
    assert set((await flow.outcomes()).values()) == {("dead", 1)}
    for (error, _), job in jobs.items():
        ((reason, kind),) = await flow.owner.rows("SELECT reason, error_type FROM aioqueue.attempt WHERE job_id = %s", job)
        assert reason == "error"
        assert error in kind or "ExceptionGroup" in kind, kind
    (after,) = await flow.enqueue("quick")
    await flow.until_ended([after])
    assert (await flow.outcomes())[after] == ("succeeded", 1)
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_cancelled_timed_out_interrupted_and_cancelled_by_itself_are_four_ends(flow: Flow) -> None:
    worker = await flow.start()
    (cancelled,) = await flow.enqueue("for_ever")
    (limited,) = await flow.enqueue("limited", max_attempts=3)
    (itself,) = await flow.enqueue("cancels_itself", max_attempts=1)
    (interrupted,) = await flow.enqueue("for_ever")
    await flow.until_ended([limited, itself])
    await flow.until_started(6)
    await flow.command("job", "cancel", str(cancelled))
    await flow.until_ended([cancelled])
    worker.signal(signal.SIGINT)
    await worker.logged("SIGINT: claiming nothing more")
    worker.signal(signal.SIGINT)
    assert await worker.ended() == 0
    assert await flow.outcomes() == {cancelled: ("cancelled", 1), limited: ("dead", 3), itself: ("dead", 1)}
    assert await flow.owner.rows("SELECT attempt, spared, worker FROM aioqueue.live") == [(1, 1, None)]
    assert await flow.reasons(limited) == ["time limit"] * 3, "an attempt each, and not started again as if interrupted"
    assert [await flow.reasons(job) for job in (cancelled, itself, interrupted)] == [["cancelled"], ["error"], ["interrupted"]]
    kinds = await flow.owner.rows("SELECT DISTINCT error_type FROM aioqueue.attempt WHERE job_id = %s", limited)
    assert kinds == [("aioqueue.errors.TimeLimitExceeded",)]
    assert "Traceback" not in worker.log


async def test_a_handler_that_swallows_its_cancellation_holds_up_neither_the_stop_nor_its_job(flow: Flow) -> None:
    worker = await flow.start("--grace", "0")
    (job,) = await flow.enqueue("stubborn")
    await flow.until_started(1)
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 1
    assert await flow.owner.state(job) == "ready"
    assert await flow.reasons(job) == ["interrupted"]
    await flow.start()
    await flow.until_ended([job])
    assert await flow.outcomes() == {job: ("succeeded", 2)}


async def test_an_operators_cancel_frees_the_only_slot(flow: Flow) -> None:
    await flow.start("-c", "1")
    (stuck,) = await flow.enqueue("for_ever")
    await flow.until_started(1)
    (waits,) = await flow.enqueue("quick")
    assert str(stuck) in await flow.command("job", "list", "--state", "running")
    await flow.command("job", "cancel", str(stuck))
    await flow.until_ended([stuck, waits])
    assert await flow.outcomes() == {stuck: ("cancelled", 1), waits: ("succeeded", 1)}


async def test_a_time_out_is_a_failed_attempt_with_its_own_error_and_a_back_off(flow: Flow) -> None:
    await flow.start()
    (job,) = await flow.enqueue("limited_for_long", max_attempts=3)
    await flow.until("EXISTS (SELECT FROM aioqueue.attempt WHERE job_id = %s)", job)
    (failed,) = await flow.owner.rows("SELECT reason, error_type FROM aioqueue.attempt WHERE job_id = %s", job)
    assert failed == ("time limit", "aioqueue.errors.TimeLimitExceeded")
    assert await flow.owner.state(job) == "scheduled", "and not begun again at once"
    (dead,) = await flow.enqueue("limited", max_attempts=3)
    await flow.until_ended([dead])
    assert (await flow.outcomes())[dead] == ("dead", 3)
    assert (await flow.starts())[dead] == [1, 2, 3]


async def test_a_thread_that_goes_on_past_its_limit_is_said_to_and_ends_its_worker_in_order(flow: Flow) -> None:
    worker = await flow.start("-c", "3", lease=10)
    (neighbour,) = await flow.enqueue("hold")
    await flow.until_started(1)
    (job,) = await flow.enqueue("thread_limited", max_attempts=1)
    await flow.until_ended([job])
    assert await flow.reasons(job) == ["time limit"]
    await worker.logged("gave up on thread_limited")
    assert await flow.value("NOT EXISTS (SELECT FROM flow.note WHERE job_id = %s AND what = 'end')", job), "it runs on"
    (later,) = await flow.enqueue("quick")
    await worker.logged("claims nothing more")
    flow.gate.open()
    assert await worker.ended() == 1
    assert (await flow.outcomes())[neighbour] == ("succeeded", 1)
    assert await flow.owner.state(later) == "ready"
    await flow.start()
    await flow.until_ended([later])
    assert (await flow.outcomes())[job] == ("dead", 1), "its end was written once"


async def test_nothing_of_thousands_of_jobs_stays_in_memory(flow: Flow) -> None:
    worker = await flow.start("-c", "50", lease=30)

    async def megabytes(number: int) -> float:
        payload = '{"text": "%s"}' % ("x" * 50_000)
        jobs = await flow.enqueue("weigh", number, payload=payload)
        jobs += await flow.enqueue("raises_in_thread", number // 10, payload='{"error": "Unprintable"}', max_attempts=1)
        await flow.until_ended(jobs)
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(worker.pid)], capture_output=True, text=True, check=True)  # noqa: ASYNC221
        return int(shown.stdout) / 1024

    before = await megabytes(300)
    grown = await megabytes(1200) - before
    assert grown < 30, "sixty megabytes went through it"
