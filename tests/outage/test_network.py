"""The network between worker and server: it swallows everything, resets what there is, ends sessions."""

import asyncio
import time

import pytest
from psycopg import AsyncConnection

from aioqueue.errors import ResultTimeout
from aioqueue.events import DatabaseLost, JobClaimed, JobRecorded, LeaseLost, ListenerConnected, WorkerStarted
from benchmarks.proxy import Proxy
from tests.outage.scene import make_scene
from tests.outage.server import OutageServer

pytestmark = pytest.mark.anyio


async def test_half_open_connections_are_noticed_and_replaced_and_wake_ups_are_heard_again(
    outage: OutageServer, proxy: Proxy, quick_probes: None
) -> None:
    scene = make_scene(outage, outage.tcp(port=proxy.port, connect_timeout="2"), poll=30.0)
    async with scene.working() as worker:
        jobs = [(await scene.hold.enqueue()).id]
        await scene.seen.wait(JobClaimed)
        proxy.mode = "swallow"
        await scene.until(lambda: bool(scene.cancelled))
        assert scene.cancelled[0][1] < scene.lease_end(worker)
        await scene.seen.wait(DatabaseLost, loop="listener")
        proxy.mode = "pass"
        await scene.seen.wait(ListenerConnected, 2)
        scene.gate.set()
        await scene.until_ended(1)
        # The poll is half a minute: whatever runs now was woken up.
        for number in range(2, 6):
            jobs.append((await scene.quick.enqueue(number)).id)
            await scene.until_ended(number)
        assert scene.losses()["listener"] == 1
    await scene.check(jobs)


async def test_waiters_have_their_results_after_an_outage_and_their_time_out_during_one(
    outage: OutageServer, proxy: Proxy, quick_probes: None
) -> None:
    waiting = make_scene(outage, outage.tcp(port=proxy.port, connect_timeout="2"))
    working = make_scene(outage)
    async with working.working(), waiting.app:
        late = await waiting.hold.enqueue()
        never = await waiting.hold.enqueue()
        result = asyncio.create_task(late.result(timeout=30))
        impatient = asyncio.create_task(never.result(timeout=1.0))
        await working.seen.wait(JobClaimed, 2)
        proxy.mode = "swallow"
        began = time.monotonic()
        with pytest.raises(ResultTimeout):
            await impatient
        assert time.monotonic() - began < 5.0
        working.gate.set()
        await working.until_ended(2)
        assert not result.done()
        proxy.mode = "pass"
        assert await result is None


async def test_a_stop_ends_in_time_while_the_network_swallows_everything(outage: OutageServer, proxy: Proxy) -> None:
    scene = make_scene(outage, outage.tcp(port=proxy.port))
    async with scene.working(grace=0.5):
        await scene.hold.enqueue()
        await scene.until(lambda: len(scene.starts) == 1)
        proxy.mode = "swallow"
        began = time.monotonic()
    assert time.monotonic() - began < 0.5 + 12.0


async def test_an_outcome_is_recorded_by_the_one_run_where_the_network_was_away_when_the_task_returned(
    outage: OutageServer, proxy: Proxy
) -> None:
    scene = make_scene(outage, outage.tcp(port=proxy.port), lease=15.0)
    async with scene.working():
        jobs = [(await scene.hold.enqueue()).id for _ in range(3)]
        await scene.until(lambda: len(scene.starts) == 3)
        proxy.mode = "refuse"
        proxy.cut()
        scene.gate.set()
        await scene.seen.wait(DatabaseLost, loop="recorder")
        proxy.mode = "pass"
        await scene.until_ended(3)
    assert sorted(scene.starts) == sorted((job, 1) for job in jobs)
    assert not scene.seen.all(LeaseLost)
    await scene.check(jobs)


async def test_the_late_outcome_of_a_job_that_another_worker_has_is_refused(outage: OutageServer, proxy: Proxy) -> None:
    lost = make_scene(outage, outage.tcp(port=proxy.port, connect_timeout="2"))
    other = make_scene(outage)
    other.gate.set()
    ignored = asyncio.Event()

    @lost.app.task(name="stubborn")
    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await ignored.wait()
        return 1

    @other.app.task(name="stubborn")
    async def again() -> int:
        return 2

    async with lost.working():
        job = await stubborn.enqueue()
        await lost.seen.wait(JobClaimed)
        proxy.mode = "refuse"
        proxy.cut()
        await lost.seen.wait(LeaseLost)
        async with other.working():
            await other.until_ended(1)
        ignored.set()
        proxy.mode = "pass"
        await lost.until(lambda: lost.late() == [job.id])
        assert await job.result(timeout=10) == 2
    assert await lost.ask("SELECT state, attempt FROM aioqueue.outcome") == [("succeeded", 2)]


async def test_a_success_whose_answer_was_lost_is_not_reported_as_lost(outage: OutageServer, proxy: Proxy) -> None:
    scene = make_scene(outage, outage.tcp(port=proxy.port), lease=15.0)
    async with scene.working():
        job = await scene.hold.enqueue()
        await scene.until(lambda: len(scene.starts) == 1)
        # The statement arrives, and waits; its answer does not.
        async with await AsyncConnection.connect(outage.dsn("superuser", "outage")) as blocker:
            await blocker.execute(f'LOCK TABLE "{outage.schema}".outcome IN SHARE MODE'.encode())
            scene.gate.set()
            await scene.until("count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%record%%'")
            proxy.mode = "swallow"
        await scene.until_ended(1)
        proxy.mode = "pass"
        proxy.cut()
        await scene.until(lambda: bool(scene.recoveries()["recorder"]))
    assert not scene.late()
    await scene.check([job.id])


async def test_a_commit_whose_answer_was_lost_is_read_back_and_no_second_run(outage: OutageServer, proxy: Proxy) -> None:
    scene = make_scene(outage, outage.tcp(port=proxy.port), lease=15.0)
    async with scene.working():
        async with await AsyncConnection.connect(outage.dsn("superuser", "outage")) as blocker:
            await blocker.execute(f'LOCK TABLE "{outage.schema}".outcome IN SHARE MODE'.encode())
            job = await scene.written.enqueue()
            await scene.until("count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%finish%%'")
            proxy.mode = "swallow"
        await scene.until_ended(1)
        proxy.mode = "pass"
        proxy.cut()
        await scene.seen.wait(JobRecorded, state="succeeded", job_id=job.id)
    await scene.check([job.id])
    assert await scene.ask("SELECT job_id FROM effects.effect") == [(job.id,)]


async def test_fifty_times_all_sessions_are_ended_and_all_come_back(outage: OutageServer) -> None:
    scene = make_scene(outage, lease=15.0)
    mine = "FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"
    jobs = []
    async with scene.working():
        await scene.until(f"count(*) >= 3 {mine}")
        for number in range(1, 51):
            outage.run(f"SELECT pg_terminate_backend(pid) {mine}")
            jobs.append((await scene.quick.enqueue(number)).id)
            jobs.append((await scene.written.enqueue()).id)
            await scene.until_ended(2 * number)
        assert (await scene.ask(f"SELECT count(*) {mine}"))[0][0] <= 4 + 2
        await scene.until(f"count(*) FILTER (WHERE query LIKE 'LISTEN%%' OR query LIKE 'SHOW%%') = 1 {mine}")
        assert not scene.seen.all(LeaseLost)
        assert len(scene.seen.all(WorkerStarted)) == 1
    await scene.check(jobs)
    assert sorted(await scene.ask("SELECT job_id FROM effects.effect")) == sorted((job,) for job in jobs[1::2])
