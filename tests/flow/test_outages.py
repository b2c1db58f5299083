"""The database goes away under load: the worker keeps its process, every job ends, none runs oftener than was counted."""

import asyncio

import pytest
from psycopg import AsyncConnection

from tests.flow.processes import Flow, reconnect
from tests.postgres import FAST, Server

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
