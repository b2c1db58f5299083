"""The server is there and lets nobody in: no free slot, another password."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from aioqueue.events import LeaseLost, WorkerStarted
from tests.outage.scene import PATIENCE, Scene, make_scene
from tests.outage.server import TRUSTED, OutageServer

pytestmark = pytest.mark.anyio

MINE = "FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"
END = f"SELECT pg_terminate_backend(pid, 5000) {MINE}"


@pytest.fixture
def tight(request: pytest.FixtureRequest, schema: str) -> Iterator[OutageServer]:
    """A server with few slots."""
    settings = {"max_connections": "15", "superuser_reserved_connections": "3"}
    with OutageServer(int(str(request.config.getoption("postgres"))), schema, settings) as server:
        yield server


@pytest.fixture
def guarded(outage: OutageServer) -> Iterator[OutageServer]:
    """A server that asks the worker's role for a password."""
    outage.run("ALTER ROLE aioqueue_worker PASSWORD 'first'")
    outage.trust(f"host all aioqueue_worker 127.0.0.1/32 scram-sha-256\n{TRUSTED}")
    outage.run("SELECT pg_reload_conf()")
    yield outage
    outage.trust(TRUSTED)
    outage.run("ALTER ROLE aioqueue_worker PASSWORD NULL", "SELECT pg_reload_conf()")


def _take_all(server: OutageServer, stack: ExitStack) -> None:
    """Hold every slot that is left."""
    while True:
        try:
            conn = psycopg.connect(server.tcp("owner"), connect_timeout=5)
        except psycopg.OperationalError:
            return
        stack.callback(conn.close)


async def _until_told(scene: Scene, why: str) -> None:
    """Enqueue until the error says why: the first ones may be of connections that were open."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with pytest.raises(psycopg.OperationalError) as caught:
                await scene.quick.enqueue()
            if re.search(why, str(caught.value)):
                return


async def test_work_goes_on_when_slots_are_free_again(tight: OutageServer) -> None:
    scene = make_scene(tight)
    async with scene.working():
        jobs = [(await scene.quick.enqueue()).id]
        await scene.until_ended(1)
        with ExitStack() as stack:
            # Whoever comes back too early is ended again, until others hold every slot.
            while True:
                tight.run(END)
                _take_all(tight, stack)
                if await scene.ask(f"SELECT count(*) {MINE}") == [(0,)]:
                    break
            await scene.seen.wait(LeaseLost)
            await _until_told(scene, "slots|too many clients")
            assert max(scene.losses().values()) <= 3
        jobs += [(await scene.quick.enqueue()).id, (await scene.quick.enqueue()).id]
        await scene.until_ended(3)
        assert len(scene.seen.all(WorkerStarted)) == 1
    await scene.check(jobs)


async def test_work_goes_on_when_the_password_is_the_old_one_again(guarded: OutageServer) -> None:
    dsn = guarded.tcp().replace("aioqueue_worker@", "aioqueue_worker:first@")
    scene = make_scene(guarded, dsn)
    async with scene.working():
        jobs = [(await scene.quick.enqueue()).id]
        await scene.until_ended(1)
        guarded.run("ALTER ROLE aioqueue_worker PASSWORD 'second'", END)
        await scene.seen.wait(LeaseLost)
        await _until_told(scene, "password authentication failed")
        assert max(scene.losses().values()) <= 2
        await asyncio.to_thread(guarded.run, "ALTER ROLE aioqueue_worker PASSWORD 'first'")
        jobs.append((await scene.quick.enqueue()).id)
        await scene.until_ended(2)
        assert len(scene.seen.all(WorkerStarted)) == 1
    await scene.check(jobs)
