"""The server is another one now, or can only read."""

import asyncio
from collections.abc import Iterator
from uuid import UUID

import pytest

from aioqueue.events import DatabaseLost, ListenerConnected, WorkerStarted
from tests.outage.scene import Scene, make_scene
from tests.outage.server import OutageServer, Standby

pytestmark = pytest.mark.anyio

READ_ONLY = "ALTER SYSTEM SET default_transaction_read_only = on"
WRITABLE = "ALTER SYSTEM RESET default_transaction_read_only"
RELOAD = "SELECT pg_reload_conf()"


@pytest.fixture
def primary(request: pytest.FixtureRequest, schema: str) -> Iterator[OutageServer]:
    """A primary that ends with its test."""
    with OutageServer(int(str(request.config.getoption("postgres"))), schema) as server:
        yield server


async def test_work_goes_on_at_once_on_a_promoted_standby_and_nothing_is_lost_or_doubled(primary: OutageServer) -> None:
    standby = await asyncio.to_thread(Standby, primary)
    try:
        await _fail_over(primary, standby)
    finally:
        await asyncio.to_thread(standby.close)


async def _fail_over(primary: OutageServer, standby: Standby) -> None:
    # The list of hosts is the client's; the standby stands first, so that it is asked and passed over.
    dsn = (
        f"postgresql://aioqueue_worker@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/outage"
        "?target_session_attrs=read-write&connect_timeout=2"
    )
    scene = make_scene(primary, dsn, lease=20.0, poll=30.0)
    async with scene.working() as worker:
        await scene.until("count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
        jobs = [(await scene.quick.enqueue()).id for _ in range(50)]
        await scene.until_ended(50)
        held = [(await scene.hold.enqueue()).id for _ in range(5)]
        await scene.until(lambda: len(scene.starts) == 55)
        listened = len(scene.seen.all(ListenerConnected))
        assert worker._worker is not None
        floors = worker._worker._steps.claimer._floors
        await scene.until(lambda: any(floors[lane].value > 0 for lane in floors.lanes))

        await asyncio.to_thread(primary.stop)
        scene.gate.set()
        await asyncio.to_thread(standby.promote)
        primary.cluster = standby.cluster

        await scene.until_ended(55)
        await scene.seen.wait(ListenerConnected, listened + 1)
        later: list[UUID] = []
        for _ in range(20):
            job = await scene.quick.enqueue()
            later.append(job.id)
            await job.result(timeout=15)
        assert len(scene.seen.all(WorkerStarted)) == 1
    await scene.check(jobs + held + later)


async def _until_recovered(scene: Scene) -> None:
    await scene.until(lambda: all(scene.recoveries()[loop] == n for loop, n in scene.losses().items()))


async def test_a_server_that_can_only_read_is_an_outage_and_not_a_busy_loop(outage: OutageServer) -> None:
    scene = make_scene(outage)
    before = "SELECT sessions FROM pg_stat_database WHERE datname = 'outage'"
    async with scene.working() as worker:
        jobs = [(await scene.hold.enqueue()).id for _ in range(3)]
        await scene.until(lambda: len(scene.starts) == 3)
        outage.run(READ_ONLY, RELOAD)
        await scene.until(lambda: len(scene.cancelled) == 3)
        assert max(at for _, at in scene.cancelled) < scene.lease_end(worker)
        ((first,),) = await scene.ask(before)
        await asyncio.sleep(4)
        ((second,),) = await scene.ask(before)
        assert max(scene.losses().values()) <= 2
        # Every refused call costs a session, and there are few calls.
        assert second - first < 60
        outage.run(WRITABLE, RELOAD)
        scene.gate.set()
        await scene.until_ended(3)
        await _until_recovered(scene)
        jobs.append((await scene.quick.enqueue()).id)
        await scene.until_ended(4)
    await scene.check(jobs)


async def test_sessions_of_a_demoted_server_are_left_for_one_that_can_write(
    outage: OutageServer, primary: OutageServer, quick_probes: None
) -> None:
    """The old one still answers, and can only read; the list of hosts finds the new one."""
    scene = make_scene(
        primary,
        f"postgresql://aioqueue_worker@127.0.0.1:{outage.port},127.0.0.1:{primary.port}/outage?target_session_attrs=read-write",
    )
    here = "count(*) > 0 FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"
    async with scene.working():
        scene.server = outage
        job = await scene.quick.enqueue()
        await scene.until_ended(1)
        assert (await scene.ask(f"SELECT {here}")) == [(True,)]
        scene.server = primary
        outage.run(READ_ONLY, RELOAD)
        await scene.seen.wait(DatabaseLost)
        await scene.until(here)
        scene.starts.clear()
        job = await scene.quick.enqueue()
        await scene.until_ended(1)
        await scene.check([job.id])
        scene.server = outage
        # The guard's has asked nothing, and asks nothing until the loop is blocked.
        await scene.until("count(*) = 0 FROM pg_stat_activity WHERE usename = 'aioqueue_worker' AND query <> ''")
    outage.run(WRITABLE, RELOAD)
