"""Workers that are killed, or kill themselves: every attempt is counted, every job goes on, neighbours live."""

import asyncio
import random
from functools import partial

import pytest

from tests.flow.processes import Flow

pytestmark = pytest.mark.anyio


async def test_jobs_of_a_killed_worker_run_again_exactly_once_more(flow: Flow) -> None:
    first = await flow.start()
    jobs = await flow.enqueue("hold", 6)
    await flow.until_started(6)
    first.kill()
    await flow.start()
    await flow.until_started(12)
    flow.gate.open()
    await flow.until_ended(jobs)
    assert await flow.starts() == {job: [1, 2] for job in jobs}
    assert await flow.outcomes() == dict.fromkeys(jobs, ("succeeded", 2))
    assert [await flow.reasons(job) for job in jobs] == [["worker lost"]] * 6
    await flow.until("NOT EXISTS (SELECT FROM aioqueue.worker WHERE pid = %s)", first.pid)


@pytest.mark.slow
async def test_with_the_defaults_a_crash_is_made_good_within_20_to_35_seconds(flow: Flow) -> None:
    other = await flow.start(lease=None)
    (longer,) = await flow.enqueue("hold")
    await flow.until_started(1)
    first = await flow.start("-q", "first", lease=None)
    jobs = [await flow.value("aioqueue.enqueue('hold', queue => 'first')") for _ in range(10)]
    await flow.until_started(11)
    third = await flow.start("-q", "first", "-c", "10", lease=None)
    first.kill()
    killed = await flow.value("clock_timestamp()")
    await flow.until_started(21)
    late = await flow.owner.rows(
        "SELECT extract(epoch FROM at - %s)::float FROM flow.note WHERE what = 'start' AND attempt = 2", killed
    )
    assert len(late) == 10
    assert all(19.5 <= seconds <= 35 for (seconds,) in late), late
    await flow.until("clock_timestamp() - at > interval '31 s' FROM flow.note WHERE job_id = %s", longer, alive=other)
    flow.gate.open()
    await flow.until_ended([longer, *jobs])
    assert (await flow.starts())[longer] == [1]
    assert (await flow.outcomes())[longer] == ("succeeded", 1)
    assert third.process.poll() is None


async def test_a_job_that_kills_its_workers_is_dead_after_its_last_attempt_and_neighbours_live(flow: Flow) -> None:
    neighbours = await flow.enqueue("quick", 10)
    (bomb,) = await flow.enqueue("bomb", max_attempts=3)
    neighbours += await flow.enqueue("quick", 10)
    async with flow.restarting(partial(flow.start, "-c", "5", ready=False)) as workers:
        await flow.until_ended([bomb])
        neighbours += await flow.enqueue("quick", 3)
        await flow.until_ended(neighbours)
    assert (await flow.starts())[bomb] == [1, 2, 3]
    outcomes = await flow.outcomes()
    assert outcomes[bomb] == ("dead", 3)
    assert await flow.reasons(bomb) == ["worker lost"] * 3
    assert all(outcomes[job][0] == "succeeded" for job in neighbours)
    # From its second loss on it is a suspect and runs alone: no neighbour is lost a third time.
    assert max(outcomes[job][1] for job in neighbours) <= 3
    assert len(flow.processes) == 4 and workers[0].process.poll() is None


async def test_a_transaction_and_its_success_are_one_whatever_is_killed_when(flow: Flow) -> None:
    jobs = await flow.enqueue("counted", 600, max_attempts=100)
    workers = [await flow.start("-c", "10") for _ in range(2)]
    for kill in range(12):
        done = await flow.value("count(*) FROM flow.counted")
        await flow.until("count(*) > %s OR (SELECT count(*) = %s FROM aioqueue.outcome) FROM flow.counted", done, len(jobs))
        await asyncio.sleep(random.random() * 0.05)  # any moment will do
        workers[kill % 2].kill()
        workers[kill % 2] = await flow.start("-c", "10", ready=False)
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    counted = await flow.owner.rows("SELECT job_id, count(*) FROM flow.counted GROUP BY job_id")
    assert dict(counted) == dict.fromkeys(jobs, 1)


@pytest.mark.once
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_session_and_its_job_s_success_are_one_whatever_is_killed_when(flow: Flow, driver: str) -> None:
    start = partial(flow.start, "-A", f"tests.flow.session_tasks:{driver}_app", "-c", "10")
    jobs = await flow.enqueue("stored", 200, max_attempts=100)
    workers = [await start() for _ in range(2)]
    for kill in range(4):
        done = await flow.value("count(*) FROM flow.counted")
        await flow.until("count(*) > %s OR (SELECT count(*) = %s FROM aioqueue.outcome) FROM flow.counted", done, len(jobs))
        await asyncio.sleep(random.random() * 0.05)  # any moment will do
        workers[kill % 2].kill()
        workers[kill % 2] = await start(ready=False)
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    counted = await flow.owner.rows("SELECT job_id, count(*) FROM flow.counted GROUP BY job_id")
    assert dict(counted) == dict.fromkeys(jobs, 1)
