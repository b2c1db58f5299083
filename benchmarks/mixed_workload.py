"""A steady stream of jobs beside long analytic transactions: does a backlog grow, do pick-ups slow down?

    python -m benchmarks.mixed_workload [--minutes 15] [--rate 800] [--query 120] [--svg mixed.svg]

One worker process, one enqueuer at a steady rate, and three analytic transactions of REPEATABLE READ (each --query seconds long,
overlapping all the time) that read a table of a million rows again and again. Every minute (of less than three minutes every
sixth part): jobs that wait, p50 and p99 from enqueue to start by the database's clock, dead rows in live.
Published for a queue of the usual design: 155,000 jobs behind after 15 minutes.

The promises: at the end no more jobs wait than a second brings; the last minute's p99 is at most 1.5 times the first one's. Exits
with 1 where one is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

from . import kit
from .peers import CONTESTANTS, running

INTERVALS = 6
"""Of a run of less than three minutes."""
LIMIT = 1.5
BURST = 0.05
"""Seconds between two calls of the enqueuer."""
FACTS = "CREATE TABLE facts AS SELECT n, md5(n::text) AS text FROM generate_series(1, 1000000) AS n"
LOOK = """
SELECT (SELECT count(*) FROM aioqueue.live WHERE worker IS NULL),
       coalesce(1000 * percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM o.started_at - j.created_at)), 0)::float8,
       coalesce(1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM o.started_at - j.created_at)), 0)::float8,
       (SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'aioqueue.live'::regclass)
  FROM aioqueue.outcome o JOIN aioqueue.job j ON j.id = o.job_id
 WHERE o.finished_at > clock_timestamp() - make_interval(secs => %(seconds)s)
   AND o.job_id >= aioqueue.first_id(clock_timestamp() - 3 * make_interval(secs => %(seconds)s))
"""
"""Ids are in the order of time: what is longer ago need not be read."""


@contextlib.contextmanager
def analysts(dsn: str, seconds: float, number: int = 3) -> Iterator[None]:
    """So many overlapping transactions that each hold their snapshot for so many seconds, and read."""
    over = threading.Event()

    def analyse(first: float) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            length = first
            while not over.is_set():
                end = time.monotonic() + length
                length = seconds
                conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                while time.monotonic() < end and not over.is_set():
                    conn.execute("SELECT count(*) FROM facts WHERE text LIKE '%%abc%%'")
                    over.wait(2.0)
                conn.execute("COMMIT")

    with kit.beside(over, analyse, (seconds * (i + 1) / number for i in range(number))):
        yield


async def at_rate(enqueue: Callable[[int], Awaitable[object]], rate: int, seconds: float) -> None:
    """Enqueue at a steady rate; what a slow call has missed is made up for by the next."""
    begin, done = time.monotonic(), 0
    while (passed := time.monotonic() - begin) < seconds:
        wanted = int(rate * passed) - done
        if wanted:
            await enqueue(wanted)
            done += wanted
        await asyncio.sleep(BURST)


async def look_often(conn: psycopg.AsyncConnection[Any], look: str, seconds: float, intervals: int) -> list[tuple[Any, ...]]:
    """(jobs that wait, p50, p99, dead rows) of each interval, said as they are found."""
    found: list[tuple[Any, ...]] = []
    length = seconds / intervals
    for _ in range(intervals):
        await asyncio.sleep(length)
        row = await (await conn.execute(look.encode(), {"seconds": length})).fetchone()
        assert row is not None
        found.append(row)
        kit.say(f"{row[0]:,} jobs wait, p50 {row[1]:.1f} ms, p99 {row[2]:.1f} ms, {row[3]:,} dead rows")
    return found


def intervals(seconds: float) -> int:
    """In how many parts a run is looked at."""
    return round(seconds / 60) if seconds >= 180 else INTERVALS


async def measure(dsn: str, rate: int, seconds: float, query: float) -> list[tuple[Any, ...]]:
    """What each interval shows of aioqueue, in an empty database."""
    aioqueue = CONTESTANTS["aioqueue"]
    async with running(aioqueue, dsn, Path()) as enqueuer, running(aioqueue, dsn, Path()) as worker:
        await enqueuer.ask("setup")
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            await conn.execute(FACTS)
            with analysts(dsn, query):
                await worker.ask("work")
                stream = asyncio.create_task(at_rate(lambda jobs: enqueuer.ask("bulk", jobs), rate, seconds))
                found = await look_often(conn, LOOK, seconds, intervals(seconds))
                await stream
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "mixed_workload", rounds=1)
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N", help="how long (default 1)")
    parser.add_argument("--rate", type=int, default=800, metavar="N", help="jobs a second (default 800)")
    parser.add_argument("--query", type=float, metavar="SECONDS", help="length of an analytic transaction (default: a third)")
    arguments = parser.parse_args(argv)
    seconds = 60 * arguments.minutes
    with kit.server(arguments) as server:
        dsn = server.database()
        found = asyncio.run(measure(dsn, arguments.rate, seconds, arguments.query or seconds / 3))
        server.drop(dsn)
    length = seconds / intervals(seconds)
    rows = [[f"{length * (i + 1):.0f}", *(f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in row)]
            for i, row in enumerate(found)]  # fmt: skip
    print(kit.table(["after s", "jobs that wait", "p50 ms", "p99 ms", "dead rows in live"], rows))
    series = {name: [(length * (i + 1), float(row[n])) for i, row in enumerate(found)] for n, name in ((1, "p50"), (2, "p99"))}
    kit.lines(
        arguments.svg,
        f"{arguments.rate} jobs/s beside three analytic transactions",
        series,
        "ms from enqueue to start",
        "seconds",
    )
    first, last = found[0][2], found[-1][2]
    said, kept = kit.promises([
        kit.Promise("jobs that wait at the end", found[-1][0], most=arguments.rate, form="{:,.0f}"),
        kit.Promise("p99 of the last part to the first one's", last / first if first else math.nan, most=LIMIT),
    ])  # fmt: skip
    print("", said, sep="\n")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
