"""What a job with a transaction of its own costs, beside a hand-written psycopg loop that does the least.

    python -m benchmarks.transactions [--jobs 5000] [--connections 8] [--query read,write] [--rounds 3]

by hand   so many connections, each in a loop: BEGIN, set_config of the tenant, the query, COMMIT
aioqueue  jobs of a task with a JobTransaction, over as many connections: claim, the same query in the job's tenant, the fenced
          finish in the same commit, and what a job may have left on the connection taken off again
read      the query counts its tenant's invoices: the loop writes nothing, and its COMMIT waits for no disk; a job's outcome does
write     the query adds a row for its tenant, as the work of most jobs does: COMMIT waits for the disk in both

Rounds are interleaved. Beside the rate stands what the client's process takes of the processor for one, which decides the rate
where the server has a processor of its own; other work on the machine changes it least. The promise is 0.8 of the loop's rate
with each query; exits with 1 below it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import LiteralString, NamedTuple

from psycopg import AsyncConnection

from aioqueue import AioQueue, JobTransaction, PoolSettings, migrate
from aioqueue.database import RESERVED

from . import kit

QUERIES: dict[str, LiteralString] = {
    "read": "SELECT count(*) FROM invoices WHERE tenant = current_setting('app.tenant')",
    "write": "INSERT INTO payments (tenant, cents) VALUES (current_setting('app.tenant'), 100) RETURNING cents",
}
TABLES = """
CREATE TABLE invoices AS SELECT 't' || mod(n, 10) AS tenant, n FROM generate_series(1, 100) AS n;
CREATE TABLE payments (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL, cents bigint NOT NULL);
"""
PROMISE = 0.8


class Measured(NamedTuple):
    """One round."""

    rate: float
    """Transactions a second."""
    cpu: float
    """Microseconds of this process for each."""


def clocks() -> tuple[float, float]:
    """The time, and this process' processor time."""
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float], jobs: int) -> Measured:
    """What so many took since then."""
    now, used = clocks()
    return Measured(jobs / (now - begin[0]), 1e6 * (used - begin[1]) / jobs)


async def by_hand(dsn: str, connections: int, jobs: int, query: LiteralString = QUERIES["read"]) -> Measured:
    """The loop."""
    left = jobs

    async def loop(conn: AsyncConnection[tuple[object, ...]]) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await conn.execute("BEGIN")
            await conn.execute("SELECT set_config('app.tenant', %s, true)", [f"t{left % 10}"])
            await (await conn.execute(query)).fetchone()
            await conn.execute("COMMIT")

    conns = [await AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=1) for _ in range(connections)]
    begin = clocks()
    await asyncio.gather(*map(loop, conns))
    measured = since(begin, jobs)
    for conn in conns:
        await conn.close()
    return measured


async def by_jobs(dsn: str, connections: int, jobs: int, query: LiteralString = QUERIES["read"]) -> Measured:
    """Jobs, from the first one's start to the last one's commit."""
    app = AioQueue(dsn, pool=PoolSettings(size=connections + RESERVED))
    began: list[tuple[float, float]] = []

    @app.task()
    async def count(tx: JobTransaction) -> int:
        if not began:
            began.append(clocks())
        found: int = await tx.fetch_value(query)
        return found

    async with app:
        for start in range(0, jobs, 10_000):
            for tenant in range(10):
                await count.options(tenant=f"t{tenant}").enqueue_many([()] * (min(10_000, jobs - start) // 10))
        await asyncio.to_thread(kit.settle, dsn)
        await app.worker(drain=True).run()
        return since(began[0], jobs)


async def measure(
    dsn: str, rounds: int, connections: int, jobs: int, queries: Sequence[str]
) -> dict[tuple[str, str], list[Measured]]:
    """Interleaved rounds of both ways with each query."""
    await migrate.migrate(dsn)
    async with await AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(TABLES)
    ways = {"by hand": by_hand, "aioqueue": by_jobs}
    found: dict[tuple[str, str], list[Measured]] = {(query, name): [] for query in queries for name in ways}
    for turn in range(rounds):
        for query in queries:
            for name in kit.rotated(list(ways), turn):
                measured = await ways[name](dsn, connections, jobs, QUERIES[query])
                found[query, name].append(measured)
                kit.say(f"{query}, {name}: {measured.rate:,.0f}/s, {measured.cpu:.0f} µs of the client's processor for each")
    return found


def chosen(text: str) -> list[str]:
    """The names of queries, as given on the command line."""
    names = text.split(",")
    if unknown := set(names) - QUERIES.keys():
        raise argparse.ArgumentTypeError(f"expected some of {','.join(QUERIES)}, got {', '.join(sorted(unknown))}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "transactions", rounds=3)
    parser.add_argument("--jobs", type=int, default=5_000, metavar="N", help="jobs of a round, in tens (default 5,000)")
    parser.add_argument("--connections", type=int, default=8, metavar="N", help="transactions at once (default 8)")
    parser.add_argument("--query", type=chosen, default=list(QUERIES), metavar="NAMES", help="read, write (default: both)")
    arguments = parser.parse_args(argv)
    with kit.server(arguments) as server:
        dsn = server.database()
        found = asyncio.run(measure(dsn, arguments.rounds, arguments.connections, arguments.jobs // 10 * 10, arguments.query))
        server.drop(dsn)
    rows, ratios, medians = [], [], {}
    for (query, name), values in found.items():
        rate, cpu = (kit.median(column) for column in zip(*values, strict=True))
        hand_rate, hand_cpu = (kit.median(column) for column in zip(*found[query, "by hand"], strict=True))
        medians[f"{query}, {name}"] = rate
        ratios.append(rate / hand_rate)
        spread = kit.spread([each.rate for each in values])
        rows.append([query, name, f"{rate:,.0f}", spread, f"{rate / hand_rate:.2f}", f"{cpu:.0f} µs", f"{hand_cpu / cpu:.2f}"])
    print(kit.table(["query", "", "transactions/s", "lowest–highest", "ratio", "client's processor", "ratio by it"], rows))
    kit.bars(arguments.svg, f"Transactions a second over {arguments.connections} connections", medians, "/s")
    return 0 if min(ratios) >= PROMISE else 1


if __name__ == "__main__":
    raise SystemExit(main())
