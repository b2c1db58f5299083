"""Worker processes behind PgBouncer in transaction mode: the poll does what no notification can, and nothing is prepared."""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.pgbouncer import PROGRAM, pgbouncer
from tests.flow.processes import Flow
from tests.flow.tasks import made
from tests.kit import PATIENCE
from tests.postgres import Database

pytestmark = pytest.mark.anyio


@pytest.fixture
def pooled(flow: Flow, database: Database) -> Iterator[str]:
    """The DSN of two server connections that everybody shares; what tasks note goes past them."""
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(database.dsn("worker"), default_pool_size=2) as running:
        flow.evidence = flow.dsn
        yield running.dsn(flow.dsn)


async def test_a_worker_behind_a_pooler_says_so_once_and_finds_its_work_by_the_poll(flow: Flow, pooled: str) -> None:
    worker = await flow.start(dsn=pooled, lease=10, poll=0.2)
    async with made(pooled, schema=flow.schema) as app:
        for number in range(3):
            job = await app.get("quick").enqueue(number=number)
            assert await job.result(timeout=PATIENCE) == number
    assert worker.log.count("pooler") == 1
    assert "cannot reach the database" not in worker.log


async def test_many_processes_share_two_sessions_and_no_statement_of_one_is_missed_by_another(flow: Flow, pooled: str) -> None:
    workers = [await flow.start("-c", "5", dsn=pooled, lease=10, poll=0.1) for _ in range(3)]
    async with made(pooled, schema=flow.schema) as app, made(pooled, schema=flow.schema) as other:
        jobs = [
            job
            for number in range(30)
            for job in await asyncio.gather(
                app.get("counted").enqueue(), other.get("counted").enqueue(), app.get("weigh").enqueue(text="x" * number)
            )
        ]
        await flow.until_ended([job.id for job in jobs])
        assert await jobs[-1].result(timeout=PATIENCE) == 29
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    assert await flow.value("count(*) = 60 AND count(DISTINCT job_id) = 60 FROM flow.counted")
    assert 'prepared statement "' not in "".join(worker.log for worker in workers)
