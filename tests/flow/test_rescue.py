"""Rescue, whatever happens to rescuers, to the dead worker's row and to the server; and what running jobs are spared by it."""

import asyncio
import signal
from functools import partial

import pytest
from psycopg import AsyncConnection

from tests.flow.processes import Flow, reconnect
from tests.postgres import FAST, Server

pytestmark = pytest.mark.anyio


async def restart(server: Server, flow: Flow, owner: str) -> None:
    """Kill the server and start it again."""
    await asyncio.to_thread(server.cluster.stop, "immediate")
    await asyncio.to_thread(server.cluster.start, FAST)
    await flow.owner.conn.close()
    await reconnect(flow, owner)


async def test_a_dead_workers_row_that_is_deleted_first_hides_none_of_its_jobs(flow: Flow) -> None:
    first = await flow.start()
    jobs = await flow.enqueue("hold", 3)
    await flow.until_started(3)
    first.kill()
    await flow.owner.rows("DELETE FROM aioqueue.worker WHERE pid = %s RETURNING id", first.pid)
    await flow.start()
    await flow.until_started(6)
    flow.gate.open()
    await flow.until_ended(jobs)
    assert await flow.outcomes() == dict.fromkeys(jobs, ("succeeded", 2))


async def test_rescuers_killed_at_their_work_strand_nothing_and_rescue_no_job_twice(flow: Flow) -> None:
    number = 100
    first = await flow.start("-c", str(number))
    jobs = await flow.enqueue("hold", number)
    await flow.until("count(*) = %s FROM aioqueue.live WHERE worker IS NOT NULL", number, alive=first)
    (dead,) = (await flow.owner.rows("SELECT id FROM aioqueue.worker"))[0]
    first.kill()
    for _ in range(3):
        rescuers = [await flow.start("-c", "1", ready=False) for _ in range(2)]
        await flow.until(
            "(SELECT count(*) FROM aioqueue.live WHERE worker = %s) < %s"
            " OR EXISTS (SELECT FROM aioqueue.worker w JOIN aioqueue.live l ON l.worker = w.id WHERE NOT w.dead AND w.id <> %s)",
            dead, number, dead,
        )  # fmt: skip
        for rescuer in rescuers:
            rescuer.kill()
    flow.gate.open()
    await flow.start("-c", str(number))
    await flow.until_ended(jobs)
    outcomes = await flow.outcomes()
    assert {state for state, _ in outcomes.values()} == {"succeeded"}
    for job in jobs:
        attempts = [attempt for attempt, _, _ in await flow.owner.attempts(job)]
        assert attempts == list(range(1, outcomes[job][1])), "each lost attempt was rescued once"
    assert await flow.value("count(*) FROM aioqueue.live") == 0


async def test_a_server_that_is_killed_in_the_middle_of_a_rescue_strands_nothing(own_server: tuple[Server, Flow, str]) -> None:
    server, flow, owner = own_server
    first = await flow.start("-c", "100")
    jobs = await flow.enqueue("hold", 100)
    await flow.until("count(*) = 100 FROM aioqueue.live WHERE worker IS NOT NULL", alive=first)
    first.kill()
    others = [await flow.start("-c", "100", lease=6) for _ in range(2)]
    await flow.until("EXISTS (SELECT FROM aioqueue.attempt)")
    await restart(server, flow, owner)
    flow.gate.open()
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    assert all(other.process.poll() is None for other in others)


async def test_a_job_that_runs_while_the_server_restarts_stays_its_workers(own_server: tuple[Server, Flow, str]) -> None:
    server, flow, owner = own_server
    first = await flow.start(lease=10)
    (job,) = await flow.enqueue("hold")
    await flow.until_started(1)
    await flow.start(lease=10)
    await restart(server, flow, owner)
    restarted = await flow.value("clock_timestamp()")
    await flow.until("count(*) = 2 FROM aioqueue.worker WHERE beat_at > %s", restarted, alive=first)
    flow.gate.open()
    await flow.until_ended([job])
    assert set((await flow.starts())[job]) == {1}
    assert await flow.outcomes() == {job: ("succeeded", 1)}


async def test_outcomes_wait_while_the_database_can_only_be_read(own_server: tuple[Server, Flow, str]) -> None:
    _, flow, _ = own_server
    worker = await flow.start(lease=30)
    (job,) = await flow.enqueue("reader")
    await flow.until_started(1)
    dsn = flow.dsn.replace("aioqueue_worker", "postgres")
    async with await AsyncConnection.connect(dsn, autocommit=True) as boss:
        await boss.execute("ALTER ROLE aioqueue_worker SET default_transaction_read_only = on")
        await boss.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'aioqueue'")
        flow.gate.open()
        await worker.logged("the recorder cannot reach the database")
        assert await flow.owner.state(job) == "running"
        await boss.execute("ALTER ROLE aioqueue_worker RESET default_transaction_read_only")
    await flow.until_ended([job])
    assert await flow.outcomes() == {job: ("succeeded", 1)}
    assert worker.log.count("the recorder cannot reach the database") == 1


async def test_a_killed_workers_jobs_take_no_place_of_a_limit(flow: Flow) -> None:
    first = await flow.start()
    jobs = await flow.enqueue("one_at_a_time", 2)
    await flow.until_started(1)
    first.kill()
    await flow.start()
    await flow.until_started(2)
    flow.gate.open()
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    overlapping = (
        "count(*) FROM flow.note a JOIN flow.note b ON b.what = 'start' AND b.pid = a.pid AND b.job_id <> a.job_id"
        " AND b.at > a.at WHERE a.what = 'start' AND NOT EXISTS"
        " (SELECT FROM flow.note e WHERE e.what = 'end' AND e.job_id = a.job_id AND e.pid = a.pid AND e.at < b.at)"
    )
    assert await flow.value(overlapping) == 0


async def test_the_transaction_of_a_worker_frozen_past_its_lease_leaves_nothing(flow: Flow) -> None:
    worker = await flow.start()
    (job,) = await flow.enqueue("frozen")
    await flow.until_started(1)
    worker.signal(signal.SIGSTOP)
    await flow.start()
    await flow.until_started(2)
    flow.gate.open()
    await flow.until_ended([job])
    worker.signal(signal.SIGCONT)
    (after,) = await flow.enqueue("quick")
    await worker.logged("lost its lease")
    await flow.until_ended([after])
    assert (await flow.outcomes())[job] == ("succeeded", 2)
    assert await flow.value("count(*) FROM flow.counted") == 1
    assert await flow.value("NOT EXISTS (SELECT FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%')")


async def test_jobs_that_end_while_their_worker_is_declared_dead_have_one_end_each(flow: Flow) -> None:
    workers = [await flow.start("-c", "10", lease=3) for _ in range(2)]
    jobs = await flow.enqueue("weigh", 1500, payload='{"text": "x"}', max_attempts=1000)
    for part in range(1, 11):
        await flow.until("count(*) >= %s FROM aioqueue.outcome", part * 100)
        # At any moment of its work its lease has ended to the database, and somebody sees it; it goes on under a new identity.
        await flow.owner.rows("UPDATE aioqueue.worker SET lease_until = beat_at WHERE pid = %s", workers[part % 2].pid)
        await flow.owner.store.rescue(flow.owner.conn, worker=0, limit=1000)
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    left = "(SELECT count(*) FROM aioqueue.live) + (SELECT count(*) FROM aioqueue.scheduled)"
    assert await flow.value(f"(SELECT count(*) FROM aioqueue.outcome) = %s AND {left} = 0", len(jobs))
    assert await flow.value("EXISTS (SELECT FROM aioqueue.attempt WHERE reason = 'worker lost')"), "some were taken over"
    for job, (_, attempt) in (await flow.outcomes()).items():
        if attempt > 1:
            assert [number for number, _, _ in await flow.owner.attempts(job)] == list(range(1, attempt))
    assert all(worker.process.poll() is None for worker in workers)


@pytest.mark.slow
async def test_one_poison_job_among_500_is_dead_and_all_its_neighbours_succeed(flow: Flow) -> None:
    jobs = await flow.enqueue("nap", 250, payload='{"seconds": 2}', max_attempts=3)
    (poison,) = await flow.enqueue("bomb", max_attempts=3)
    jobs += await flow.enqueue("nap", 250, payload='{"seconds": 2}', max_attempts=3)
    async with flow.restarting(partial(flow.start, "-c", "50", lease=2, ready=False), 3):
        for number in (100, 200, 300, 400, 501):
            await flow.until("count(*) >= %s FROM aioqueue.outcome", number)
    outcomes = await flow.outcomes()
    assert outcomes.pop(poison) == ("dead", 3)
    assert await flow.reasons(poison) == ["worker lost"] * 3
    assert set(outcomes) == set(jobs)
    assert {state for state, _ in outcomes.values()} == {"succeeded"}
