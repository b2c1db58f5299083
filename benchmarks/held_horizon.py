"""Claims while somebody holds the xmin horizon: time and buffers from the first block of jobs to the last, beside a free one.

    python -m benchmarks.held_horizon [--jobs 100000] [--hold xid,reader,writers] [--svg held.svg]

A queue of N jobs is emptied by batches of 100 in ten blocks; in the middle of each block claims of one and of 100 are timed, one
after the other, and some are explained for their buffers. Each way of holding the horizon has a database of its own, beside one
that nobody holds; they take turns block by block, and each is vacuumed after its block.

xid      a transaction that has written, open from beginning to end
reader   one of REPEATABLE READ
writers  overlapping transactions that have written, each open for --writers seconds

Exits with 1 where the last block takes more than 1.2 times the buffers of the first, or of the free database's last; times are
printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import psycopg

from . import kit
from .fairness import LANE, Loop, queue

HOLDS = ("xid", "reader", "writers")
SIZES = (1, 100)
BLOCKS = 10
EXPLAINED = 3
LIMIT = 1.2
ENQUEUE = """
SELECT count(*) FROM aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object(
    'task', 'send', 'tenant', 't' || mod(n, 10), 'payload', jsonb_build_object('n', n))) FROM generate_series(1, %s) AS n))
"""
EXPLAIN = """
EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
SELECT * FROM aioqueue.claim(%s::bigint, %s::bigint[], %s::bigint[], %s::uuid[], '{0}', %s::integer[], %s::integer)
"""


@contextlib.contextmanager
def overlapping_writers(dsn: str, seconds: float) -> Iterator[None]:
    """At every moment at least one transaction is open that has written."""
    over = threading.Event()

    def write(first: float) -> None:
        with psycopg.connect(dsn, autocommit=True, options="-c idle_in_transaction_session_timeout=0") as conn:
            pause = first
            while not over.is_set():
                conn.execute("BEGIN")
                conn.execute("SELECT pg_current_xact_id()")
                over.wait(pause)
                conn.execute("COMMIT")
                pause = seconds

    with kit.beside(over, write, (seconds, seconds / 2)):
        yield


@contextlib.contextmanager
def held(dsn: str, how: str, seconds: float) -> Iterator[None]:
    """Hold the horizon of a database in one of the ways; `free`: not at all."""
    with overlapping_writers(dsn, seconds) if how == "writers" else kit.held_horizon(dsn, how):
        yield


class Queue:
    """One database and its figures: by batch size, for each block."""

    def __init__(self, loop: Loop, dsn: str) -> None:
        self.loop = loop
        self.dsn = dsn
        self.times: dict[int, list[float]] = defaultdict(list)
        self.buffers: dict[int, list[float]] = defaultdict(list)

    async def fill(self, jobs: int) -> None:
        """Enqueue the jobs."""
        for start in range(0, jobs, 10_000):
            await self.loop.rows(ENQUEUE, min(10_000, jobs - start))

    async def block(self, jobs: int, samples: int) -> None:
        """Take so many jobs, timing some of the claims."""
        half = (jobs - sum(SIZES) * samples) // 2
        await self._take(half)
        await self.rest()
        for size in SIZES:
            self.buffers[size].append(kit.median([await self.explain(size) for _ in range(EXPLAINED)]))
        times: dict[int, list[float]] = defaultdict(list)
        for _ in range(samples):
            for size in SIZES:
                await self.loop.tick()
                begin = time.perf_counter()
                claims = await self.loop.claim(size)
                times[size].append(1000 * (time.perf_counter() - begin))
                await self.loop.end(claims.jobs)
        for size in SIZES:
            self.times[size].append(kit.median(times[size]))
        await self._take(half)
        await self.loop.rows("VACUUM aioqueue.live")

    async def rest(self) -> None:
        """Tick until the floor has followed the claims; a transaction is set aside after a second."""
        give_up = time.monotonic() + 3.0
        while time.monotonic() < give_up:
            await self.loop.tick()
            if self.loop.floor.at_rest and self.loop.claimed <= self.loop.floor.seen:
                return
            await asyncio.sleep(0.05)

    async def _take(self, jobs: int) -> None:
        while jobs > 0:
            claims = await self.loop.claim(min(100, jobs))
            if not claims.jobs:
                return
            await self.loop.end(claims.jobs)
            jobs -= len(claims.jobs)

    async def explain(self, size: int) -> float:
        """Buffers of a claim of so many, which is rolled back."""
        vt, job_id = self.loop.floor.start
        params = (self.loop.worker, [LANE], [vt], [job_id], [size], size)
        async with self.loop.conn.transaction(force_rollback=True):
            ((plan,),) = await self.loop.rows(EXPLAIN, *params)
        return float(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])


async def measure(server: kit.Server, holds: Sequence[str], jobs: int, samples: int, seconds: float) -> dict[str, Queue]:
    """Empty one queue each, in turns."""
    found: dict[str, Queue] = {}
    async with contextlib.AsyncExitStack() as stack:
        for how in ("free", *holds):
            (loop,) = await stack.enter_async_context(queue(server, loops=1))
            dsn = server.dsn_of(loop.conn.info.dbname)
            found[how] = Queue(loop, dsn)
            await found[how].fill(jobs)
            kit.settle(dsn)
            stack.enter_context(held(dsn, how, seconds))
        for turn in range(BLOCKS):
            for how in kit.rotated(list(found), turn):
                await found[how].block(jobs // BLOCKS, samples)
            kit.say(f"block {turn + 1} of {BLOCKS}: " + ", ".join(f"{how} {q.times[1][-1]:.2f} ms" for how, q in found.items()))
    return found


def report(found: dict[str, Queue]) -> tuple[str, bool]:
    """One table, and whether the promise was kept."""
    rows, kept = [], True
    for size in SIZES:
        for how, one in found.items():
            times, buffers, free = one.times[size], one.buffers[size], found["free"]
            growth, beside = buffers[-1] / buffers[0], buffers[-1] / free.buffers[size][-1]
            if how != "free":
                kept = kept and growth <= LIMIT and beside <= LIMIT
            rows.append([
                how, size, f"{times[0]:.2f}", f"{times[-1]:.2f}", f"{times[-1] / times[0]:.2f}",
                f"{kit.median(times) / kit.median(free.times[size]):.2f}",
                f"{buffers[0]:.0f}", f"{buffers[-1]:.0f}", f"{growth:.2f}", f"{beside:.2f}",
            ])  # fmt: skip
    head = ["horizon", "jobs a claim", "first block ms", "last ms", "last/first", "to free", "first buffers", "last",
            "last/first", "to free"]  # fmt: skip
    return kit.table(head, rows), kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "held_horizon", rounds=1)
    parser.add_argument("--jobs", type=int, default=50_000, metavar="N", help="jobs of each queue (default 50,000)")
    parser.add_argument("--samples", type=int, default=30, metavar="N", help="claims timed in each block (default 30)")
    parser.add_argument("--hold", default=",".join(HOLDS), metavar="WAYS", help=f"of {','.join(HOLDS)}")
    parser.add_argument("--writers", type=float, default=1.5, metavar="SECONDS", help="how long writers stay open (default 1.5)")
    arguments: argparse.Namespace = parser.parse_args(argv)
    holds = arguments.hold.split(",")
    if unknown := {*holds} - {*HOLDS}:
        parser.error(f"{unknown} is not known")
    if arguments.jobs < BLOCKS * sum(SIZES) * arguments.samples:
        parser.error(f"--jobs: at least {BLOCKS * sum(SIZES) * arguments.samples:,} for so many samples")
    with kit.server(arguments) as server:
        found = asyncio.run(measure(server, holds, arguments.jobs, arguments.samples, arguments.writers))
    text, kept = report(found)
    print(text)
    step = arguments.jobs / BLOCKS
    series = {how: [(step * (i + 0.5), value) for i, value in enumerate(one.times[1])] for how, one in found.items()}
    kit.lines(arguments.svg, "Claiming one job while the xmin horizon is held", series, "ms, median of a block", "jobs taken")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
