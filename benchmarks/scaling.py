"""What more of everything costs: worker processes on one database, and claims beside many rows that are not ready.

    python -m benchmarks.scaling [--jobs 20000] [--processes 1,2,4,8] [--rows 100000] [--svg scaling.svg]

processes  the same backlog drained by 1, 2, 4 and 8 worker processes: jobs a second of all, and what the slowest
           did of its share
claims     claims of 100, median, of a queue that also has N finished or scheduled jobs, 1,000 running ones, or whose
           jobs are of 1 to 10,000 tenants; each beside a queue that has nothing else, in turns

Exits with 1 where a process did nothing, or a claim needs more than 1.2 times the buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from . import kit
from .fairness import LANE, Loop, queue
from .held_horizon import ENQUEUE, Queue
from .peers import CONTESTANTS, running

LIMIT = 1.2
SAMPLES = 10
FINISHED = """
WITH j AS (INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at)
           SELECT aioqueue.uuidv7(), 'send', 'default', '', 0, 5, '{"n": 1}', now() FROM generate_series(1, %s) RETURNING id)
INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, finished_at) SELECT id, 'succeeded', 1, 0, '1', now() FROM j
"""
SCHEDULED = """
SELECT count(*) FROM aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object('task', 'send', 'delay', 86400 + n))
    FROM generate_series(1, %s) AS n))
"""
TENANTS = ENQUEUE.replace("mod(n, 10)", "mod(n, {})")


async def drain(server: kit.Server, processes: int, jobs: int) -> tuple[float, float]:
    """Drain one backlog: jobs a second, and the least share of a process in what a fair one would be."""
    contestant, dsn = CONTESTANTS["aioqueue"], server.database()
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(running(contestant, dsn, Path())) for _ in range(processes)]
        await drivers[0].ask("setup")
        await drivers[0].ask("bulk", jobs)
        await asyncio.to_thread(kit.settle, dsn)
        begin = time.perf_counter()
        await asyncio.gather(*(driver.ask("work") for driver in drivers))
        done = [0]
        while sum(done) < jobs:
            await asyncio.sleep(0.02)
            done = [(await driver.ask("idle"))["runs"] for driver in drivers]
        rate = jobs / (time.perf_counter() - begin)
    server.drop(dsn)
    return rate, min(done) * processes / jobs


async def prepare(loop: Loop, what: str, rows: int) -> None:
    """Fill a queue with what is not ready, then with jobs to claim."""
    tenants = 10
    match what.split():
        case ["finished"]:
            await loop.rows(FINISHED, rows)
        case ["scheduled"]:
            for start in range(0, rows, 10_000):
                await loop.rows(SCHEDULED, min(10_000, rows - start))
        case ["running"]:
            await loop.rows(ENQUEUE, 1_000)
            for _ in range(10):
                await loop.claim(100)
        case [number, "tenants"]:
            tenants = int(number)
    await loop.rows(TENANTS.format(tenants), 10_000)


async def claims(server: kit.Server, what: str, rows: int) -> tuple[float, float]:
    """Milliseconds and buffers of a claim of 100, each in relation to an empty queue's."""
    async with queue(server, loops=1) as (plain,), queue(server, loops=1) as (full,):
        pair = [Queue(plain, server.dsn_of(plain.conn.info.dbname)), Queue(full, server.dsn_of(full.conn.info.dbname))]
        await prepare(plain, "nothing", 0)
        await prepare(full, what, rows)
        times: list[list[float]] = [[], []]
        buffers: list[list[float]] = [[], []]
        for one in pair:
            kit.settle(one.dsn)
        for turn in range(SAMPLES):
            for i in (0, 1) if turn % 2 else (1, 0):
                await pair[i].rest()
                buffers[i].append(await pair[i].explain(100))
                begin = time.perf_counter()
                claimed = await pair[i].loop.claim(100)
                times[i].append(time.perf_counter() - begin)
                assert all(job.lane == LANE for job in claimed.jobs)
                await pair[i].loop.end(claimed.jobs)
    return kit.median(times[1]) / kit.median(times[0]), kit.median(buffers[1]) / kit.median(buffers[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "scaling", rounds=3)
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="jobs of one backlog (default 20,000)")
    parser.add_argument("--processes", default="1,2,4,8", metavar="NUMBERS", help="worker processes (default 1,2,4,8)")
    parser.add_argument("--rows", type=int, default=100_000, metavar="N", help="finished and scheduled jobs (default 100,000)")
    parser.add_argument("--tenants", default="1,100,10000", metavar="NUMBERS", help="numbers of tenants (default 1,100,10000)")
    arguments = parser.parse_args(argv)
    numbers = [int(number) for number in arguments.processes.split(",") if number]
    rates: dict[int, list[float]] = {number: [] for number in numbers}
    shares: dict[int, list[float]] = {number: [] for number in numbers}
    kinds = ["finished", "scheduled", "running", *(f"{number} tenants" for number in arguments.tenants.split(",") if number)]
    with kit.server(arguments) as server:
        for turn in range(arguments.rounds if numbers else 0):
            for name in kit.rotated([str(number) for number in numbers], turn):
                rate, share = asyncio.run(drain(server, int(name), arguments.jobs))
                rates[int(name)].append(rate)
                shares[int(name)].append(share)
                kit.say(f"{name} processes: {rate:,.0f} jobs/s, the slowest did {share:.0%} of its share")
        beside = {what: asyncio.run(claims(server, what, arguments.rows)) for what in kinds}
    rows = [
        [number, f"{kit.median(rates[number]):,.0f}", kit.spread(rates[number]),
         f"{kit.median(rates[number]) / kit.median(rates[numbers[0]]):.2f}", f"{min(shares[number]):.0%}"]
        for number in numbers
    ]  # fmt: skip
    print(kit.table(["processes", "jobs/s", "lowest–highest", "ratio", "least share"], rows))
    print(
        kit.table(
            ["a claim of 100 beside", "time", "buffers"], [[what, f"{t:.2f}", f"{b:.2f}"] for what, (t, b) in beside.items()]
        )
    )
    kit.bars(arguments.svg, "Worker processes on one database", {f"{n}": kit.median(v) for n, v in rates.items()}, "jobs/s")
    starved = any(min(values) == 0 for values in shares.values())
    return int(starved or any(b > LIMIT for _, b in beside.values()))


if __name__ == "__main__":
    raise SystemExit(main())
