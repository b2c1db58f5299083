"""What a job with a transaction of its own costs, beside a hand-written psycopg loop that does the least.

    python -m benchmarks.transactions [--jobs 20000] [--connections 8] [--query read,write] [--rounds 3]

by hand   so many connections, each in a loop: BEGIN, set_config of the tenant, the query, COMMIT
recorded  the same, of jobs, by hand: the least that keeps a job's success and its writes in one commit: 250 jobs claimed at a
          time by one UPDATE, and one more statement before COMMIT, which takes the job away, if it is still this claim's, and
          writes its outcome. No functions, no result, nothing checked, nothing cleaned
aioqueue  jobs of a task with a JobTransaction, over as many connections: claim, the same query in the job's tenant, the fenced
          finish in the same commit, and what a job may have left on the connection taken off again
bare      the same, but a job's transaction begins with its tenant alone, and ends with the statement of `recorded` and COMMIT.
          What it lacks is what checks and cleaning cost: no limits of time on the server, no look whether the task has changed
          its tenant, role or transaction, nothing of it taken off the connection. Not for use: it tells that cost from the
          runtime's own
read      the query counts its tenant's invoices: the loop writes nothing, and its COMMIT waits for no disk; a job's outcome does
write     the query adds a row for its tenant, as the work of most jobs does: COMMIT waits for the disk in all

Rounds are interleaved. Beside the rate stands what the client's process takes of the processor for one, which decides the rate
where the server has a processor of its own; other work on the machine changes it least. The promise is 0.8 of the loop's rate
with each query; exits with 1 below it. What `recorded` has of that rate is what jobs have by hand, statement after statement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, LiteralString, NamedTuple
from unittest.mock import patch

from psycopg import AsyncConnection

from aioqueue import AioQueue, JobTransaction, PoolSettings, migrate, transaction
from aioqueue.job import lane, new_job_id
from aioqueue.open_transaction import OpenTransaction
from aioqueue.pool import RESERVED
from aioqueue.pool_connection import PoolConnection
from aioqueue.store import Store
from aioqueue.trip import Trip, wired

from . import kit
from .mixed_jobs import NewJob, enqueue_many

QUERIES: dict[str, LiteralString] = {
    "read": "SELECT count(*) FROM invoices WHERE tenant = current_setting('app.tenant')",
    "write": "INSERT INTO payments (tenant, cents) VALUES (current_setting('app.tenant'), 100) RETURNING cents",
}
TABLES = """
CREATE TABLE invoices AS SELECT 't' || mod(n, 10) AS tenant, n FROM generate_series(1, 100) AS n;
CREATE TABLE payments (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL, cents bigint NOT NULL);
"""
LANE = lane("default", 0)
CLAIM = """
WITH first AS (
    SELECT ctid FROM aioqueue.live WHERE lane = %s AND worker IS NULL ORDER BY vt, job_id LIMIT 250 FOR UPDATE SKIP LOCKED)
UPDATE aioqueue.live l SET worker = 1, attempt = attempt + 1, claimed_at = clock_timestamp() FROM first WHERE l.ctid = first.ctid
RETURNING l.tenant, l.lane, l.vt, l.job_id, l.attempt
"""
RECORD = """
WITH gone AS (
    DELETE FROM aioqueue.live WHERE worker = %s AND lane = %s AND vt = %s AND job_id = %s AND attempt = %s
    RETURNING job_id, attempt, spared, claimed_at)
INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, started_at, finished_at)
SELECT job_id, 'succeeded', attempt, spared, %s, claimed_at, clock_timestamp() FROM gone
"""
BEGIN_BARE = b"SELECT pg_catalog.current_setting('role'), pg_catalog.set_config('app.tenant', $1, true)"
PROMISE = 0.8


class Bare(OpenTransaction):
    """See above."""

    def _prepare_beginning(self, conn: PoolConnection) -> Trip:
        self._conn = conn
        trip = self._beginning = Trip(conn)
        trip.add(b"BEGIN", prepare=True)
        trip.add(BEGIN_BARE, [self._job.tenant], prepare=True)
        return trip

    async def _end(self, statement: str, *result: str) -> BaseException | None:
        self._check_status()
        trip = Trip(self._conn)
        trip.add(wired(RECORD), [*self._job.fence, *result], prepare=True)
        trip.add(b"COMMIT", prepare=True)
        self._follow(trip)
        (recorded, *_) = await trip.run(self._settings.pool.deadline)
        assert recorded.command_tuples == 1  # else another has the job, in a benchmark
        self._ended = True
        return None


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


@contextlib.asynccontextmanager
async def connected(dsn: str, number: int) -> AsyncIterator[list[AsyncConnection[tuple[Any, ...]]]]:
    """So many connections, of which everything is prepared."""
    conns = [await AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=1) for _ in range(number)]
    try:
        yield conns
    finally:
        for conn in conns:
            await conn.close()


async def by_hand(dsn: str, connections: int, jobs: int, query: LiteralString = QUERIES["read"]) -> Measured:
    """The loop."""
    left = jobs

    async def loop(conn: AsyncConnection[tuple[Any, ...]]) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await conn.execute("BEGIN")
            await conn.execute("SELECT set_config('app.tenant', %s, true)", [f"t{left % 10}"])
            await (await conn.execute(query)).fetchone()
            await conn.execute("COMMIT")

    async with connected(dsn, connections) as conns:
        begin = clocks()
        await asyncio.gather(*map(loop, conns))
        return since(begin, jobs)


async def recorded(dsn: str, connections: int, jobs: int, query: LiteralString = QUERIES["read"]) -> Measured:
    """The loop, with jobs."""
    store = Store("aioqueue")
    claimed: deque[tuple[Any, ...]] = deque()
    claiming = asyncio.Lock()

    async def loop(conn: AsyncConnection[tuple[Any, ...]]) -> None:
        while True:
            if not claimed:
                async with claiming:
                    if not claimed:
                        claimed.extend(await (await conn.execute(CLAIM, [LANE])).fetchall())
                if not claimed:
                    return
            tenant, *fence = claimed.popleft()
            await conn.execute("BEGIN")
            await conn.execute("SELECT set_config('app.tenant', %s, true)", [tenant])
            await (await conn.execute(query)).fetchone()
            if (await conn.execute(RECORD, [1, *fence, None])).rowcount == 1:
                await conn.execute("COMMIT")
            else:
                await conn.execute("ROLLBACK")

    new = [
        NewJob(id=new_job_id(), task="count", payload="{}", queue="default", priority=0, tenant=f"t{n % 10}", max_attempts=1)
        for n in range(jobs)
    ]
    async with connected(dsn, connections) as conns:
        await enqueue_many(store, conns[0], new)
        await asyncio.to_thread(kit.settle, dsn)
        begin = clocks()
        await asyncio.gather(*map(loop, conns))
        return since(begin, jobs)


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


async def by_bare_jobs(dsn: str, connections: int, jobs: int, query: LiteralString = QUERIES["read"]) -> Measured:
    """Jobs that are neither checked nor cleaned after."""
    with patch.object(transaction, "OpenTransaction", Bare):
        return await by_jobs(dsn, connections, jobs, query)


async def measure(
    dsn: str, rounds: int, connections: int, jobs: int, queries: Sequence[str]
) -> dict[tuple[str, str], list[Measured]]:
    """Interleaved rounds of both ways with each query."""
    await migrate.migrate(dsn)
    async with await AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(TABLES)
    ways = {"by hand": by_hand, "recorded": recorded, "aioqueue": by_jobs, "bare": by_bare_jobs}
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
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="jobs of a round, in tens (default 20,000)")
    parser.add_argument("--connections", type=int, default=8, metavar="N", help="transactions at once (default 8)")
    parser.add_argument("--query", type=chosen, default=list(QUERIES), metavar="NAMES", help="read, write (default: both)")
    arguments = parser.parse_args(argv)
    with kit.server(arguments) as server:
        dsn = server.database()
        found = asyncio.run(measure(dsn, arguments.rounds, arguments.connections, arguments.jobs // 10 * 10, arguments.query))
        server.drop(dsn)
    rows, kept, medians = [], True, {}
    for (query, name), values in found.items():
        rate, cpu = (kit.median(column) for column in zip(*values, strict=True))
        medians[f"{query}, {name}"] = rate
        row = [query, name, f"{rate:,.0f}", kit.spread([each.rate for each in values]), f"{cpu:.0f} µs"]
        for other in ("by hand", "recorded"):
            other_rate, other_cpu = (kit.median(column) for column in zip(*found[query, other], strict=True))
            row += [f"{rate / other_rate:.2f}", f"{other_cpu / cpu:.2f}"]
            kept = kept and (name != "aioqueue" or other != "by hand" or rate / other_rate >= PROMISE)
        rows.append(row)
    head = ["query", "", "transactions/s", "lowest–highest", "client's processor", "of by hand", "by it", "of recorded", "by it"]
    print(kit.table(head, rows))
    kit.bars(arguments.svg, f"Transactions a second over {arguments.connections} connections", medians, "/s")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
