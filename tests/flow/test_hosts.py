"""Applications with a worker or with waiters, as processes (tests/flow/host.py): cancelled, left, started again, Ctrl-C."""

import signal

import pytest

from tests.flow.processes import Flow, Process
from tests.kit import until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

LEFT = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aioqueue' AND pid <> pg_backend_pid()"


def host(flow: Flow, scene: str, *, lease: float = 10, poll: float | None = None) -> Process:
    return flow.run("-m", "tests.flow.host", scene, lease=lease, poll=poll)


async def ended_well(process: Process) -> None:
    assert await process.ended() == 0, process.log
    assert "Traceback" not in process.log
    assert "never" not in process.log, "no coroutine that was never awaited, no exception never retrieved"


async def test_a_host_that_is_cancelled_while_jobs_run_records_their_outcomes(flow: Flow) -> None:
    process = host(flow, "cancelled")
    await process.logged("serves")
    jobs = await flow.enqueue("hold", 5)
    await flow.until_started(5)
    process.signal(signal.SIGTERM)
    await process.logged("is cancelled")
    flow.gate.open()
    await process.logged("the group has ended")
    await ended_well(process)
    assert await flow.outcomes() == dict.fromkeys(jobs, ("succeeded", 1))


async def test_a_lifespan_that_is_left_hands_its_jobs_back_and_starts_no_worker_twice(flow: Flow) -> None:
    process = host(flow, "lifespan")
    await process.logged("serves")
    assert "refused: " in process.log and "started already" in process.log
    jobs = await flow.enqueue("hold", 3)
    await flow.until_started(3)
    process.signal(signal.SIGTERM)
    await process.logged("the lifespan has ended")
    await ended_well(process)
    rows = await flow.owner.rows("SELECT job_id, attempt, spared, worker FROM aioqueue.live")
    assert sorted(rows) == sorted((job, 1, 1, None) for job in jobs)
    assert await flow.value("count(*) FROM aioqueue.worker") == 0


async def test_twenty_starts_and_stops_of_an_idle_worker_each_end_and_leave_nothing(flow: Flow, superuser: Session) -> None:
    process = host(flow, "restarts")
    await ended_well(process)
    assert "0 tasks are left" in process.log
    assert await flow.value("count(*) FROM aioqueue.worker") == 0
    await until(superuser, f"SELECT ({LEFT}) = 0")


async def test_a_subscription_is_added_while_others_wait_and_ctrl_c_ends_twenty_waiters_without_an_exception(
    flow: Flow, superuser: Session
) -> None:
    # No poll is near: what comes was notified.
    process = host(flow, "waits", poll=3600)
    await process.logged("waits")
    other = await flow.start("-c", "30")
    await flow.until_started(20)
    await process.logged("has 3 and 5")
    assert await superuser.value(LEFT + " AND query LIKE 'LISTEN%%'") == 2, "one in each process"
    process.signal(signal.SIGINT)
    await ended_well(process)
    assert other.process.poll() is None
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}


async def test_windows_own_event_loop_is_refused_in_one_line(flow: Flow) -> None:
    process = host(flow, "windows")
    await ended_well(process)
    said = process.log.splitlines()
    assert len(said) == 2
    assert said[0].startswith("refused: ") and "SelectorEventLoop" in said[0]
