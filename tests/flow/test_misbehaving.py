"""Handlers that raise what nobody expects, that end in every way there is, that never end: the worker lives, no job is stuck."""

import json
import signal

import pytest

from tests.flow.processes import Flow
from tests.flow.tasks import ERRORS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("loop", ["--no-uvloop", "--uvloop"])
async def test_whatever_is_raised_also_in_threads_and_nested_tasks_fails_its_job_alone(flow: Flow, loop: str) -> None:
    worker = await flow.start(loop)
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
