"""A server that hangs: it keeps its connections and answers nothing."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psycopg
import pytest

from aioqueue import AioQueue, JobContext, renew
from aioqueue.cli import options
from aioqueue.cli.failure import Common
from aioqueue.clock import clock
from aioqueue.events import JobClaimed, JobRecorded, LeaseLost, LoopBlocked, WorkerStarted
from benchmarks.proxy import Proxy
from tests.outage.scene import LEASE, make_scene
from tests.outage.server import OutageServer

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def test_jobs_are_cancelled_before_the_lease_ends_and_run_again_when_the_server_goes_on(outage: OutageServer) -> None:
    scene = make_scene(outage)
    async with scene.working() as worker:
        jobs = [(await scene.hold.enqueue()).id for _ in range(5)]
        await scene.seen.wait(JobClaimed, 5)
        await scene.until(lambda: len(scene.starts) == 5)
        with outage.held():
            await scene.until(lambda: len(scene.cancelled) == 5)
            assert max(at for _, at in scene.cancelled) < scene.lease_end(worker)
            # Two leases in all: by now everybody else may have taken the jobs over.
            await asyncio.sleep(LEASE)
            assert len(scene.starts) == 5
        scene.gate.set()
        await scene.until_ended(5)
        assert len(scene.seen.all(LeaseLost)) == 1
    await scene.check(jobs)


async def test_a_stop_ends_in_time_while_jobs_run_and_the_server_hangs(outage: OutageServer) -> None:
    scene = make_scene(outage, lease=30.0)
    async with scene.working(grace=0.5):
        await scene.hold.enqueue()
        await scene.written.enqueue()
        await scene.until(lambda: len(scene.starts) == 2)
        outage.hold_still()
        # Something is asked of the server, and not answered.
        await asyncio.sleep(0.6)
        began = time.monotonic()
    assert time.monotonic() - began < 0.5 + 12.0


async def test_a_stop_is_as_quick_with_the_default_deadlines(outage: OutageServer) -> None:
    app = AioQueue(outage.tcp(), schema=outage.schema)
    started = asyncio.Event()

    @app.task
    async def wait(ctx: JobContext) -> None:
        started.set()
        await asyncio.Event().wait()

    async with app, app.worker(grace=0.5):
        await wait.enqueue()
        async with asyncio.timeout(10):
            await started.wait()
        outage.hold_still()
        await asyncio.sleep(1.5)
        began = time.monotonic()
    assert time.monotonic() - began < 0.5 + 12.0


async def test_a_job_inside_its_own_query_hears_of_the_lost_lease_in_time(outage: OutageServer) -> None:
    scene = make_scene(outage)
    ended: list[float] = []

    @scene.app.task
    async def query(ctx: JobContext) -> None:
        try:
            async with ctx.transaction() as tx:
                await tx.execute("SELECT pg_sleep(60)")
        finally:
            ended.append(time.monotonic())

    async with scene.working():
        await query.enqueue()
        await scene.until("count(*) = 1 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(60)'")
        with outage.held():
            await scene.seen.wait(LeaseLost)
            lost = time.monotonic()
            await scene.until(lambda: bool(ended))
            # psycopg's own cancellation would take ten seconds.
            assert ended[0] - lost < 5.0


async def test_a_blocked_loop_and_a_server_that_hangs_at_once_end_in_no_error(outage: OutageServer) -> None:
    scene = make_scene(outage)

    @scene.app.task
    async def block(ctx: JobContext) -> None:
        scene.starts.append((ctx.job_id, ctx.attempt))
        if ctx.attempt == 1:
            outage.hold_still()
            time.sleep(1.5 * LEASE)  # noqa: ASYNC251 - that is the point
            outage.go_on()

    async with scene.working():
        job = await block.enqueue()
        other = await scene.hold.enqueue()
        scene.gate.set()
        await scene.until_ended(2)
    assert len(scene.seen.all(WorkerStarted)) == 1
    await scene.check([job.id, other.id])


@pytest.mark.parametrize("trouble", ["ended", "half-open"])
async def test_a_blocked_loop_keeps_its_lease_though_the_guard_loses_its_connection(
    outage: OutageServer, proxy: Proxy, trouble: str
) -> None:
    scene = make_scene(outage, outage.tcp(port=proxy.port), lease=6.0)

    @scene.app.task
    async def block(ctx: JobContext) -> None:
        scene.starts.append((ctx.job_id, ctx.attempt))
        if trouble == "ended":
            proxy.cut()
        else:
            proxy.mode = "swallow"
            time.sleep(2.0)  # noqa: ASYNC251 - that is the point
            proxy.mode = "pass"
        time.sleep(1.2 * 6.0)  # noqa: ASYNC251 - as above

    async with scene.working() as worker:
        inside = worker._worker
        assert inside is not None
        await scene.until(lambda: inside._steps.guard._conn is not None)
        job = await block.enqueue()
        other = await scene.hold.enqueue()
        await scene.seen.wait(LoopBlocked, over=True)
        scene.gate.set()
        await scene.until_ended(2)
        assert not scene.seen.all(LeaseLost)
    # One run each; the other's first claim may have had no answer.
    assert [attempt for ran, attempt in scene.starts if ran == job.id] == [1]
    assert len(scene.starts) == 2
    await scene.check([job.id, other.id])


async def test_a_machine_that_slept_longer_than_the_lease_ends_its_jobs_at_once_and_proves_its_lease(
    outage: OutageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make_scene(outage, lease=60.0)
    async with scene.working():
        job = await scene.hold.enqueue()
        await scene.until(lambda: len(scene.starts) == 1)
        slept = 61.0
        monkeypatch.setattr(renew, "clock", lambda: clock() + slept)
        # The next beat by the timetable is up to twenty seconds away.
        async with asyncio.timeout(10):
            await scene.seen.wait(LeaseLost)
            scene.gate.set()
            await scene.seen.wait(JobRecorded, state="succeeded")
    await scene.check([job.id])


async def test_a_signalled_worker_process_ends_in_time_while_its_server_hangs(outage: OutageServer, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        f"import asyncio\nfrom aioqueue import AioQueue\napp = AioQueue(schema={outage.schema!r})\n"
        "@app.task(name='wait')\nasync def wait() -> None:\n    print('started', flush=True)\n    await asyncio.sleep(600)\n"
    )
    command = [sys.executable, "-m", "aioqueue", "worker", "-A", "told:app", "--dsn", outage.tcp(), "--grace", "0.5"]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "AIOQUEUE_SCHEMA": outage.schema},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        scene = make_scene(outage)
        await scene.until("count(*) = 1 FROM aioqueue.task WHERE name = 'wait'")
        async with scene.app:
            await scene.app.enqueue_by_name("wait")
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"started\n"
        outage.hold_still()
        await asyncio.sleep(1.5)
        process.terminate()
        async with asyncio.timeout(0.5 + 15.0):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 1
    assert b"Traceback" not in said
    assert len(said.splitlines()) < 15


async def test_a_command_does_not_wait_for_ever_for_a_server_that_hangs(
    outage: OutageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "COMMAND_SECONDS", 0.5)
    common = Common(dsn=outage.tcp(), schema=outage.schema, given={"dsn"})
    async with asyncio.timeout(20):
        with pytest.raises(psycopg.OperationalError):
            async with options.connected(common) as (conn, _):
                outage.hold_still()
                await conn.execute("SELECT 1")
