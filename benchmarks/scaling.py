"""What more of everything costs: worker processes on one database, and claims beside many rows that are not ready.

    python -m benchmarks.scaling [--jobs 20000] [--processes 1,2,4,8] [--peers [NAMES]] [--rows 100000] [--svg scaling.svg]
    python -m benchmarks.scaling --jobs 100000 --finished 10000000 --scheduled 1000000 --parked 100000

processes  the same backlog drained by 1, 2, 4 and 8 worker processes, in turns: jobs a second of all, from the first run to the
           last, and what the slowest did of its share. Of jobs that wait 0.1 s for something else, as those for which processes
           are added do; and of no-op jobs, by peers too: with these two processes keep two processors busy, and more share them
claims     of one and of 100, beside N jobs that have ended (in eight ranges of id time, of which the present one has its part),
           that are scheduled, that are parked, since their tenant is at its limit (and beside one parked job: what having a limit
           costs); beside 1,000 that run; of jobs of 1 to 10,000 tenants. Each is made in turns with one in a queue that has
           nothing else; the lower quartile counts

The promises: of waiting jobs 8 processes do more than 4, and each at least a quarter of its share; beside jobs that have ended,
are scheduled, parked or run, and with many tenants, no claim takes more than 1.2 times as long, or as many buffers, as that of
the empty queue. Exits with 1 where one is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psycopg

from aioqueue.sql import as_sql, functions

from . import kit
from .fairness import LANE, SCHEMA, Loop, queue
from .held_horizon import ENQUEUE, SIZES, Queue
from .peers import CONTESTANTS, Contestant, NotInstallable, add_options, chosen, running

LIMIT = 1.2
SHARE = 0.25
READY = 5_000
"""Jobs to claim, beside those of the timed claims."""
DAYS = 8
BATCH = 10_000
JOBS = """
INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at)
SELECT aioqueue.first_id(d.at + n * (interval '20 hours' / %(rows)s)), 'send', 'default', '', 0, 5, '{"n": 1}', d.at
  FROM (SELECT clock_timestamp() - make_interval(days => %(day)s, hours => 20) AS at) d, generate_series(1, %(rows)s) AS n
RETURNING id
"""
FINISHED = (
    f"WITH j AS ({JOBS}) INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, finished_at)"
    " SELECT id, 'succeeded', 1, 0, '1', now() FROM j"
)
SCHEDULED = (
    f"WITH j AS ({JOBS}) INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)"
    " SELECT now() + interval '1 day' + row_number() OVER () * interval '1 s', id, %(lane)s, '' FROM j"
)
PARKED = "SELECT count(*) FROM aioqueue.parked"
TENANTS = ENQUEUE.replace("mod(n, 10)", "mod(n, {})")
WAIT = 0.1
"""Seconds that a waiting job waits."""
WAITING = f"waits {WAIT:g} s"
LOOK = 0.02
"""Seconds between looks at how far all are."""


def works(peers: Sequence[str]) -> dict[str, Contestant]:
    """What is drained, by what it is called."""
    own = CONTESTANTS["aioqueue"]
    return {
        WAITING: dataclasses.replace(own, options={"sleep": WAIT}),
        "no-op": own,
        **{f"no-op, {name}": CONTESTANTS[name] for name in peers},
    }


async def drain(server: kit.Server, contestant: Contestant, cache: Path, processes: int, jobs: int) -> tuple[float, float]:
    """Drain one backlog: jobs a second, and the least share of a process in what a fair one would be."""
    dsn = server.database()
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(running(contestant, dsn, cache)) for _ in range(processes)]
        await drivers[0].ask("setup")
        await drivers[0].ask("bulk", jobs)
        await asyncio.to_thread(kit.settle, dsn)
        done, begin, before = [0], time.monotonic(), 0
        await asyncio.gather(*(driver.ask("work") for driver in drivers))
        while sum(done) < jobs:
            await asyncio.sleep(LOOK)
            done = [(await driver.ask("idle"))["runs"] for driver in drivers]
            if not before and 0 < sum(done) < jobs:  # those that were all done by then are counted from the start
                begin, before = time.monotonic(), sum(done)
        end = time.monotonic()
    server.drop(dsn)
    return (jobs - before) / (end - begin), min(done) * processes / jobs


async def past_ranges(loop: Loop) -> None:
    """Ranges of id time for today, and for the days before, as if they had been made then."""
    text = functions()["make_ranges"]
    for day in range(DAYS + 1):
        await loop.rows(text.replace("clock_timestamp()", f"(clock_timestamp() - interval '{day} days')"))
        await loop.rows("SELECT aioqueue.make_ranges(86400, 0)")
    await loop.rows(text)


async def insert(loop: Loop, statement: str, rows: int) -> None:
    """Insert so many rows without going through the queue, spread over the last days: two connections share the days."""
    days = iter(range(DAYS))

    async def fill(conn: psycopg.AsyncConnection[object]) -> None:
        await conn.execute("SET synchronous_commit = off")
        for day in days:
            await conn.execute(as_sql(statement, SCHEMA), {"rows": rows // DAYS, "day": day, "lane": LANE})

    dsn = f"{loop.conn.info.dsn} password={loop.conn.info.password}"
    async with contextlib.AsyncExitStack() as stack:
        conns = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None))
            for _ in (1, 2)
        ]
        await asyncio.gather(*(fill(conn) for conn in conns))


async def park(loop: Loop, rows: int) -> None:
    """Park so many jobs of a tenant that may run one at a time, as claims do."""
    await loop.store.set_tenant(loop.conn, "big", max_running=1)
    big = ENQUEUE.replace("'t' || mod(n, 10)", "'big'")
    await loop.rows(big, 1)
    await loop.claim(1)
    for start in range(0, rows, BATCH):
        await loop.rows(big, min(BATCH, rows - start))
    while (await loop.rows(PARKED))[0][0] < rows:
        for _ in range(10):
            await loop.claim(500)


async def prepare(loop: Loop, what: str, rows: int, ready: int) -> None:
    """Fill a queue with what is not ready, then with jobs to claim."""
    tenants = 10
    await loop.rows("SET synchronous_commit = off")
    await past_ranges(loop)
    match what.split():
        case ["finished"]:
            await insert(loop, FINISHED, rows)
        case ["scheduled"]:
            await insert(loop, SCHEDULED, rows)
        case ["parked"]:
            await park(loop, rows)
        case ["running"]:
            await loop.rows(ENQUEUE, rows)
            for _ in range(0, rows, 100):
                await loop.claim(100)
        case ["tenants"]:
            tenants = rows
    await loop.rows(TENANTS.format(tenants), ready)


async def claims(server: kit.Server, what: str, rows: int, samples: int) -> dict[int, tuple[float, float]]:
    """Time and buffers of a claim of one and of 100, each in relation to an empty queue's."""
    began = time.monotonic()
    async with queue(server, loops=1) as (plain,), queue(server, loops=1) as (full,):
        pair = [Queue(plain, server.dsn_of(plain.conn.info.dbname)), Queue(full, server.dsn_of(full.conn.info.dbname))]
        ready = READY + sum(SIZES) * samples
        await prepare(plain, "nothing", 0, ready)
        await prepare(full, what, rows, ready)
        for one in pair:
            kit.settle(one.dsn)
        made = time.monotonic() - began
        times: dict[tuple[int, int], list[float]] = defaultdict(list)
        buffers: dict[tuple[int, int], list[float]] = defaultdict(list)
        for turn in range(samples):
            for which in (0, 1) if turn % 2 else (1, 0):
                for size in SIZES:
                    if turn % 5 == 0:
                        buffers[which, size].append(await pair[which].explain(size))
                    times[which, size].append(await pair[which].timed(size))
    found = {
        size: (
            kit.percentile(times[1, size], 0.25) / kit.percentile(times[0, size], 0.25),
            kit.median(buffers[1, size]) / kit.median(buffers[0, size]),
        )
        for size in SIZES
    }
    said = ", ".join(f"of {size}: time {t:.2f}, buffers {b:.2f}" for size, (t, b) in found.items())
    kit.say(f"{what} {rows:,}: {said} (made in {made:.0f} s)")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "scaling", rounds=3)
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="jobs of one backlog (default 20,000)")
    parser.add_argument("--waiting", type=int, default=16_000, metavar="N", help="jobs that wait (default 16,000)")
    add_options(parser)
    parser.add_argument("--processes", default="1,2,4,8", metavar="NUMBERS", help="worker processes (default 1,2,4,8; '': none)")
    parser.add_argument("--rows", type=int, default=100_000, metavar="N", help="jobs beside the claims (default 100,000)")
    for what in ("finished", "scheduled", "parked"):
        parser.add_argument(f"--{what}", type=int, metavar="N", help=f"jobs {what} (default: --rows; 0: none)")
    parser.add_argument("--running", type=int, default=1_000, metavar="N", help="jobs running (default 1,000; 0: none)")
    parser.add_argument("--samples", type=int, default=150, metavar="N", help="claims timed of each size (default 150)")
    parser.add_argument("--tenants", default="1,100,10000", metavar="NUMBERS", help="numbers of tenants (default 1,100,10000)")
    arguments = parser.parse_args(argv)
    numbers = [int(number) for number in arguments.processes.split(",") if number]
    drained = works(chosen(parser, arguments))
    rates: dict[tuple[str, int], list[float]] = {(what, number): [] for what in drained for number in numbers}
    shares: dict[tuple[str, int], list[float]] = {each: [] for each in rates}
    sizes = {what: getattr(arguments, what) for what in ("finished", "scheduled", "parked", "running")}
    kinds = [(what, arguments.rows if size is None else size) for what, size in sizes.items()]
    kinds += [("parked", 1)] if any(what == "parked" and n > 1 for what, n in kinds) else []
    kinds += [("tenants", int(number)) for number in arguments.tenants.split(",") if number]
    with kit.server(arguments) as server:
        for turn in range(arguments.rounds):
            for what, number in kit.rotated(list(rates), turn):
                jobs = arguments.waiting if what == WAITING else arguments.jobs
                try:
                    rate, share = asyncio.run(drain(server, drained[what], arguments.cache, number, jobs))
                except (NotInstallable, RuntimeError, TimeoutError, psycopg.Error) as error:
                    kit.say(f"{what} is left out: {str(error) or type(error).__name__}")
                    continue
                rates[what, number].append(rate)
                shares[what, number].append(share)
                kit.say(f"{what}, {number} processes: {rate:,.0f} jobs/s, the slowest did {share:.0%} of its share")
        beside = {(what, rows): asyncio.run(claims(server, what, rows, arguments.samples)) for what, rows in kinds if rows}
    medians = {each: kit.median(found) for each, found in rates.items() if found}
    rows = [
        [what, number, f"{rate:,.0f}", kit.spread(rates[what, number]), f"{rate / medians.get((what, numbers[0]), math.nan):.2f}",
         f"{rate / medians.get((what, 4), math.nan):.2f}", f"{min(shares[what, number]):.0%}"]
        for (what, number), rate in medians.items()
    ]  # fmt: skip
    head = ["jobs", "processes", "jobs/s", "lowest–highest", f"of {numbers[0] if numbers else 1}", "of 4", "least share"]
    print(kit.table(head, rows), "", sep="\n")
    cells = [
        [f"{n:,} {what}", *(f"{value:.2f}" for size in SIZES for value in found[size])] for (what, n), found in beside.items()
    ]
    head = ["claims beside", *(f"{what} of a claim of {size}" for size in SIZES for what in ("time", "buffers"))]
    print(kit.table(head, cells), "", sep="\n")
    nothing = math.nan
    promised = [
        kit.Promise(
            f"8 processes to 4, {WAITING}", medians.get((WAITING, 8), nothing) / medians.get((WAITING, 4), nothing), least=1.0
        ),
        kit.Promise(
            "least share of a process",
            min((min(found) for (what, _), found in shares.items() if found and what in (WAITING, "no-op")), default=nothing),
            least=SHARE,
        ),
    ]
    for (what, n), found in beside.items():
        for size, (t, b) in found.items():
            promised.append(kit.Promise(f"time of a claim of {size} beside {n:,} {what}", t, most=LIMIT))
            promised.append(kit.Promise(f"its buffers of {size} beside {n:,} {what}", b, most=LIMIT))
    said, kept = kit.promises(promised)
    print(said)
    kit.bars(
        arguments.svg,
        "Jobs drained by worker processes on one database",
        {f"{what}, {n} process{'es' if n > 1 else ''}": value for (what, n), value in medians.items()},
        "jobs/s",
    )
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
