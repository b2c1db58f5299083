"""The server goes down, for a moment or for long, and comes back; or does not."""

import asyncio
import os
import time

import pytest

from aioqueue.events import JobClaimed, LeaseLost, WorkerStarted
from aioqueue.job import lane
from aioqueue.settings import PoolSettings
from benchmarks.proxy import Proxy
from tests.outage.scene import PATIENCE, make_scene
from tests.outage.server import OutageServer

pytestmark = pytest.mark.anyio


async def test_five_kills_of_the_server_under_load_lose_nothing_and_double_nothing(outage: OutageServer) -> None:
    # A busy machine takes seconds for a start, which an enqueue waits for.
    scene = make_scene(outage, lease=60.0, pool=PoolSettings(deadline=PATIENCE))
    jobs = []
    enough = asyncio.Event()

    async def enqueue() -> None:
        number = 0
        while not enough.is_set():
            number += 1
            task = scene.quick if number % 2 else scene.written
            jobs.append((await task.enqueue()).id)
            await asyncio.sleep(0.01)

    async with scene.working(concurrency=10):
        async with asyncio.TaskGroup() as group:
            group.create_task(enqueue())
            for _ in range(5):
                so_far = len(jobs)
                await scene.until(lambda n=so_far: len(jobs) > n + 20)  # type: ignore[misc]
                await asyncio.to_thread(outage.stop)
                await asyncio.to_thread(outage.start)
            enough.set()
        await scene.until_ended(len(jobs))
        assert len(scene.seen.all(WorkerStarted)) == 1
        assert max(scene.losses().values()) <= 10
    await scene.check(jobs)
    written = await scene.ask("SELECT count(*), count(DISTINCT job_id) FROM effects.effect")
    succeeded = await scene.ask(
        "SELECT count(*) FROM aioqueue.outcome o JOIN aioqueue.job j ON j.id = o.job_id WHERE j.task LIKE '%%written'"
    )
    assert written == [(succeeded[0][0], succeeded[0][0])]


async def test_an_outcome_waits_out_a_restart_of_the_server_within_the_lease(outage: OutageServer) -> None:
    scene = make_scene(outage, lease=20.0)
    async with scene.working():
        jobs = [(await scene.hold.enqueue()).id for _ in range(20)]
        await scene.until(lambda: len(scene.starts) == 20)
        await asyncio.to_thread(outage.stop)
        scene.gate.set()
        await scene.until(lambda: bool(scene.losses()["recorder"]))
        await asyncio.to_thread(outage.start)
        await scene.until_ended(20)
    assert sorted(scene.starts) == sorted((job, 1) for job in jobs)
    assert not scene.seen.all(LeaseLost)
    await scene.check(jobs)


async def test_jobs_enqueued_after_a_crash_that_kept_the_start_time_are_found_at_once(outage: OutageServer, proxy: Proxy) -> None:
    """One backend is killed: the server drops all its sessions and recovers, and was not started anew."""
    scene = make_scene(outage, outage.tcp(port=proxy.port), lease=20.0)
    async with scene.working() as worker:
        for _ in range(50):
            await scene.quick.enqueue()
        await scene.until_ended(50)
        assert worker._worker is not None
        floors = worker._worker._steps.claimer._floors
        await scene.until(lambda: floors[lane("default", 0)].value > 0)
        before = await scene.ask("SELECT pg_postmaster_start_time()")
        ((pid,),) = await scene.ask("SELECT pid FROM pg_stat_activity WHERE usename = 'aioqueue_worker' LIMIT 1")
        proxy.mode = "refuse"
        os.kill(pid, 9)
        await scene.until(lambda: bool(scene.losses()))
        await scene.until("true")
        # As if the crash had lost what no commit waited for.
        cell = lane("default", 0) & 1023
        await scene.ask(f"SELECT setval('aioqueue.v{cell}', 1, false)")
        proxy.mode = "pass"
        job = await scene.quick.enqueue()
        await job.result(timeout=15)
        assert await scene.ask("SELECT pg_postmaster_start_time()") == before


async def test_a_long_outage_costs_little_time_and_few_words(outage: OutageServer, caplog: pytest.LogCaptureFixture) -> None:
    scene = make_scene(outage)
    async with scene.working():
        await (await scene.quick.enqueue()).result(timeout=PATIENCE)
        await asyncio.to_thread(outage.stop)
        caplog.clear()
        events = len(scene.seen.events)
        began = time.process_time()
        await asyncio.sleep(12)
        assert time.process_time() - began < 3.0
        assert len(scene.seen.events) - events <= 8
        assert len(caplog.records) <= 8
        await asyncio.to_thread(outage.start)
        await (await scene.quick.enqueue()).result(timeout=PATIENCE)


async def test_a_worker_that_loses_its_server_for_longer_than_its_lease_goes_on_afterwards(outage: OutageServer) -> None:
    scene = make_scene(outage, lease=2.0)
    async with scene.working() as worker:
        jobs = [(await scene.hold.enqueue()).id for _ in range(5)]
        await scene.seen.wait(JobClaimed, 5)
        await scene.until(lambda: len(scene.starts) == 5)
        await asyncio.to_thread(outage.stop)
        await scene.until(lambda: len(scene.cancelled) == 5)
        assert max(at for _, at in scene.cancelled) < scene.lease_end(worker)
        assert any("lease" in problem for problem in worker.problems())
        scene.gate.set()
        await asyncio.to_thread(outage.start)
        await scene.until_ended(5)
        await scene.until(lambda: not worker.problems())
    await scene.check(jobs)
