"""The fairness benchmark at a small size: every promise that it checks is kept, and it sees one that is broken."""

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks import kit
from benchmarks.fairness import (
    LOOPS,
    Result,
    drain,
    enqueue,
    enqueue_small,
    measure_limit,
    measure_order,
    measure_shares,
    queue,
    worst,
)
from tests.postgres import Server


@pytest.fixture
def bench(server: Server) -> Iterator[kit.Server]:
    made = kit.Server(server.dsn("superuser", "postgres"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "name",
    [
        "fair",
        "weight 3 for the big one",
        "limit of 5 for the big one",
        "40 connections at once",
        "40 connections at once, 25 jobs each",
    ],
)
def test_a_small_tenant_waits_behind_one_job_of_each_other(bench: kit.Server, name: str) -> None:
    result = Result()
    asyncio.run(measure_order(bench, result, name, 40, 1_000))
    assert result.broken == []
    assert len(result.order) == 1


def test_without_the_cure_of_open_transactions_the_benchmark_would_say_so(bench: kit.Server) -> None:
    result = Result()
    asyncio.run(measure_order(bench, result, "40 connections at once, without the cure", 10, 0))
    assert int(str(result.order[0][4]).replace(",", "")) > 300, "ten jobs, of which the last waits behind hundreds"


def test_weights_and_a_tenant_at_its_limit(bench: kit.Server) -> None:
    result = Result()
    asyncio.run(measure_shares(bench, result, 1_000))
    asyncio.run(measure_limit(bench, result, 3_000))
    assert result.broken == []


def test_weights_of_jobs_that_wait_already(bench: kit.Server) -> None:
    """A weight that is set later counts for the jobs that wait, once they have new positions."""

    async def run() -> list[str]:
        async with queue(bench) as loops:
            one = loops[0]
            await enqueue(one, "big", 400)
            await enqueue_small(one, 1, 400)
            _, key = await one.store.set_tenant(one.conn, "big", weight=4)
            await one.store.park_tenant(one.conn, "big", limit=1_000)
            await one.store.sweep_parked(one.conn, limit=1_000, keys=[key])
            return await drain(loops, 80)

    order = asyncio.run(run())
    assert 0.75 <= order[:400].count("big") / 400 <= 0.85
    assert worst(order)[0] <= 5 + LOOPS * 10
