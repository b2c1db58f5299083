"""The database goes away under load: the worker keeps its process, every job ends, none runs oftener than was counted."""

import asyncio
from collections.abc import Iterator

import pytest
from psycopg import AsyncConnection

from aioqueue.store import Store
from tests.flow.processes import TABLES, Flow, reconnect
from tests.outage.server import DATABASE, OutageServer, Standby
from tests.postgres import FAST, Server
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def _check(flow: Flow) -> None:
    outcomes = await flow.outcomes()
    assert {state for state, _ in outcomes.values()} == {"succeeded"}
    starts = await flow.starts()
    assert starts.keys() == outcomes.keys()
    for job, attempts in starts.items():
        # A note may be written twice where its answer was lost; an attempt that was not counted may not be there.
        assert set(attempts) <= set(range(1, outcomes[job][1] + 1))
    left = "(SELECT count(*) FROM aioqueue.live) + (SELECT count(*) FROM aioqueue.scheduled)"
    assert await flow.value(left) == 0


async def test_postgresql_crashes_under_load(own_server: tuple[Server, Flow, str]) -> None:
    server, flow, owner = own_server
    worker = await flow.start("-c", "10", lease=10)
    jobs = await flow.enqueue("quick", 400, max_attempts=20)
    for crash in (1, 2):
        await flow.until("count(*) > %s FROM aioqueue.outcome", 100 * crash, alive=worker)
        await asyncio.to_thread(server.cluster.stop, "immediate")
        await asyncio.to_thread(server.cluster.start, FAST)
        await flow.owner.conn.close()
        await reconnect(flow, owner)
    await flow.until("count(*) = %s FROM aioqueue.outcome", len(jobs), alive=worker)
    await _check(flow)


async def test_every_connection_of_the_worker_is_ended_again_and_again(flow: Flow, superuser_dsn: str) -> None:
    worker = await flow.start("-c", "10", lease=10)
    jobs = await flow.enqueue("quick", 200, max_attempts=50) + await flow.enqueue("counted", 100, max_attempts=50)
    done = 0
    for _ in range(20):
        async with await AsyncConnection.connect(superuser_dsn, autocommit=True) as boss:
            await boss.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'aioqueue'")
        await flow.until(
            "count(*) > %s OR count(*) = %s FROM aioqueue.outcome", done, len(jobs), alive=worker
        )  # fmt: skip
        done = await flow.value("count(*) FROM aioqueue.outcome")
    await flow.until("count(*) = %s FROM aioqueue.outcome", len(jobs), alive=worker)
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    counted = await flow.owner.rows("SELECT job_id, count(*) FROM flow.counted GROUP BY job_id")
    assert dict(counted) == dict.fromkeys(jobs[200:], 1)


@pytest.fixture
def primary(request: pytest.FixtureRequest, schema: str) -> Iterator[OutageServer]:
    """A primary that ends with its test."""
    with OutageServer(int(str(request.config.getoption("postgres"))), schema) as server:
        yield server


async def test_a_worker_leaves_a_server_that_can_only_read_for_the_promoted_standby(primary: OutageServer, schema: str) -> None:
    owner = await AsyncConnection.connect(primary.dsn("owner", DATABASE), autocommit=True)
    flow = Flow(Session(owner, Store(schema)), primary.tcp(), schema)
    standby = None
    try:
        await owner.execute(TABLES)
        standby = await asyncio.to_thread(Standby, primary)
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        rest = f"{DATABASE}?target_session_attrs=read-write&connect_timeout=2"
        flow.dsn = f"postgresql://aioqueue_worker@{hosts}/{rest}"
        worker = await flow.start(lease=15)
        (held,) = await flow.enqueue("nap", payload='{"seconds": 4}')
        await flow.until("EXISTS (SELECT FROM aioqueue.live WHERE worker IS NOT NULL)", alive=worker)
        # The old one lives on, as it does when it was cut off and comes back.
        await asyncio.to_thread(primary.run, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
        await asyncio.to_thread(standby.promote)
        await owner.close()
        flow.owner.conn = await AsyncConnection.connect(standby.cluster.dsn("aioqueue_owner", DATABASE), autocommit=True)
        (after,) = await flow.enqueue("counted")
        await flow.until_ended([held, after])
        assert await flow.outcomes() == {held: ("succeeded", 1), after: ("succeeded", 1)}
        assert worker.process.poll() is None
    finally:
        flow.close()
        await flow.owner.conn.close()
        if standby is not None:
            await asyncio.to_thread(standby.close)
