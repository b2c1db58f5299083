"""Claims while somebody holds the xmin horizon: time, buffers and space from the first block of jobs to the last.

    python -m benchmarks.held_horizon [--jobs 100000] [--hold xid,reader,writers] [--writers 1.5,30] [--svg held.svg]

A queue of N jobs is emptied by batches. Ten blocks of 10,000 jobs, from the very first to the very last, are looked at: in the
middle of each, claims of one and of 100 are timed, and some explained for their buffers, one after the other, while the floors
follow as they can. Each way of holding the horizon has a database of its own, beside one that nobody holds. They are copies of
one; their claims take turns, so that a busy machine is the same for all, and the lower quartile counts; none waits for the disk
(synchronous_commit is off). Each is vacuumed after a block. Transactions are seen in all databases of a server: what ends in
between, the writers, runs after the other two, with a free database beside it for what other work does to the times;
held to free is to the one of the first run, when nothing else was open on the server.

xid      a transaction that has written, open from beginning to end
reader   one of REPEATABLE READ
writers  overlapping transactions that have written, each open for --writers seconds; one database for each length

The promise: the last block takes at most 1.2 times the buffers of the first, and of the free database's last; in time too, where
what the free database's last block takes longer than its first is the machine's, and taken off. Exits with 1 where it is broken.
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

from aioqueue.migrate import migrate

from . import kit
from .fairness import LANE, SCHEMA, Loop, loops_on

HOLDS = ("xid", "reader", "writers")
SIZES = (1, 100)
BLOCKS, BLOCK = 10, 10_000
BATCH = 250
EXPLAINED = 5
"""Each so many-th claim is explained before."""
LIMIT = 1.2
ENQUEUE = """
SELECT count(*) FROM aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object(
    'task', 'send', 'tenant', 't' || mod(n, 10), 'payload', jsonb_build_object('n', n))) FROM generate_series(1, %s) AS n))
"""
EXPLAIN = """
EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
SELECT * FROM aioqueue.claim(%s::bigint, %s::bigint[], %s::bigint[], %s::uuid[], '{0}', %s::integer[], %s::integer)
"""
SPACE = "SELECT pg_relation_size('aioqueue.live'), pg_indexes_size('aioqueue.live')"


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
def held(dsn: str, how: str) -> Iterator[None]:
    """Hold the horizon of a database in one of the ways, `writers` with how long they are open; `free`: not at all."""
    with overlapping_writers(dsn, float(how.split()[1])) if "writers" in how else kit.held_horizon(dsn, how):
        yield


class Queue:
    """One database and its figures: by batch size, for each block."""

    def __init__(self, loop: Loop, dsn: str) -> None:
        self.loop = loop
        self.dsn = dsn
        self.times: dict[int, list[float]] = defaultdict(list)
        self.buffers: dict[int, list[float]] = defaultdict(list)
        self.space = (0, 0)
        """Bytes of live, and of its indexes, at the end."""

    async def timed(self, size: int) -> float:
        """Milliseconds of one claim."""
        await self.loop.tick()
        begin = time.perf_counter()
        claims = await self.loop.claim(size)
        took = 1000 * (time.perf_counter() - begin)
        await self.loop.end(claims.jobs)
        return took

    async def rest(self) -> None:
        """Tick until the floor has followed the claims; a transaction of any database is set aside after a second."""
        give_up = time.monotonic() + 3.0
        while time.monotonic() < give_up:
            await self.loop.tick()
            if self.loop.floor.start[0] >= self.loop.claimed:
                return
            await asyncio.sleep(0.05)

    async def take(self, jobs: int) -> None:
        """Take so many jobs and end them."""
        while jobs > 0:
            claims = await self.loop.claim(min(BATCH, jobs))
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

    async def measured_space(self) -> tuple[int, int]:
        """What both take now."""
        ((heap, indexes),) = await self.loop.rows(SPACE)
        return int(heap), int(indexes)


async def filled(server: kit.Server, jobs: int) -> str:
    """The DSN of a database with so many jobs, to which nobody is connected."""
    dsn = server.database()
    await migrate(dsn, schema=SCHEMA)
    async with loops_on(dsn, 1) as (loop,):
        await loop.rows("SELECT set_config('synchronous_commit', 'off', false)")
        for start in range(0, jobs, BLOCK):
            await loop.rows(ENQUEUE, min(BLOCK, jobs - start))
        await loop.rows("DELETE FROM aioqueue.worker")
    kit.settle(dsn)
    return dsn


async def measure(server: kit.Server, like: str, holds: Sequence[str], jobs: int, samples: int) -> dict[str, Queue]:
    """Empty one queue each, all copies of `like`."""
    found: dict[str, Queue] = {}
    block = min(BLOCK, jobs // BLOCKS)
    pauses = (jobs - BLOCKS * block) // (BLOCKS - 1)
    half = (block - sum(SIZES) * samples) // 2
    async with contextlib.AsyncExitStack() as stack:
        for how in ("free", *holds):
            dsn = server.copy(like)
            stack.callback(server.drop, dsn)
            (loop,) = await stack.enter_async_context(loops_on(dsn, 1))
            await loop.rows("SELECT set_config('synchronous_commit', 'off', false)")
            found[how] = Queue(loop, dsn)
            stack.enter_context(held(dsn, how))
        for turn in range(BLOCKS):
            await asyncio.gather(*(one.take(half) for one in found.values()))
            await asyncio.gather(*(one.rest() for one in found.values()))
            times: dict[tuple[str, int], list[float]] = defaultdict(list)
            looks: dict[tuple[str, int], list[float]] = defaultdict(list)
            for sample in range(samples):
                for how in kit.rotated(list(found), sample):
                    for size in SIZES:
                        if sample % EXPLAINED == EXPLAINED - 1:
                            looks[how, size].append(await found[how].explain(size))
                        times[how, size].append(await found[how].timed(size))
            for (how, size), values in times.items():
                found[how].times[size].append(kit.percentile(values, 0.25))
                found[how].buffers[size].append(kit.median(looks[how, size]))
            await asyncio.gather(*(one.take(half + (pauses if turn < BLOCKS - 1 else 0)) for one in found.values()))
            for one in found.values():
                await one.loop.rows("VACUUM aioqueue.live")
            kit.say(f"block {turn + 1} of {BLOCKS}: " + ", ".join(f"{how} {q.times[1][-1]:.2f} ms" for how, q in found.items()))
        for one in found.values():
            one.space = await one.measured_space()
    return found


def report(found: dict[str, Queue], jobs: int, undisturbed: Queue) -> tuple[str, list[kit.Promise]]:
    """One table, and what was promised; `undisturbed`: a free database on a server where nothing else was open."""
    rows, promised = [], []
    for size in SIZES:
        for how, one in found.items():
            times, buffers, free = one.times[size], one.buffers[size], found["free"]
            growth, beside = buffers[-1] / buffers[0], buffers[-1] / undisturbed.buffers[size][-1]
            slower, late = times[-1] / times[0], times[-1] / undisturbed.times[size][-1]
            if how != "free":
                drift = max(1.0, free.times[size][-1] / free.times[size][0])
                for what, value in (
                    ("buffers, last block to first", growth), ("buffers, last block to free", beside),
                    ("time, last block to first", slower / drift), ("time, last block to free", late),
                ):  # fmt: skip
                    promised.append(kit.Promise(f"claim of {size}, {how}, {jobs:,} jobs: {what}", value, most=LIMIT))
            rows.append([
                how, size, f"{times[0]:.2f}", f"{times[-1]:.2f}", f"{slower:.2f}", f"{late:.2f}",
                f"{buffers[0]:.0f}", f"{buffers[-1]:.0f}", f"{growth:.2f}", f"{beside:.2f}",
                *(f"{part / jobs:.0f}" for part in one.space),
            ])  # fmt: skip
    head = ["horizon", "jobs a claim", "first block ms", "last ms", "last/first", "to free", "first buffers", "last",
            "last/first", "to free", "bytes of live per job done", "of its indexes"]  # fmt: skip
    return kit.table(head, rows), promised


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "held_horizon", rounds=1)
    parser.add_argument("--jobs", type=int, default=100_000, metavar="N", help="jobs of each queue (default 100,000)")
    parser.add_argument("--samples", type=int, default=60, metavar="N", help="claims timed in each block (default 60)")
    parser.add_argument("--hold", default=",".join(HOLDS), metavar="WAYS", help=f"of {','.join(HOLDS)}")
    parser.add_argument("--writers", default="1.5", metavar="SECONDS", help="how long writers stay open; several (default 1.5)")
    arguments: argparse.Namespace = parser.parse_args(argv)
    ways = arguments.hold.split(",")
    if unknown := {*ways} - {*HOLDS}:
        parser.error(f"{unknown} is not known")
    if min(BLOCK, arguments.jobs // BLOCKS) < sum(SIZES) * arguments.samples:
        parser.error(f"--jobs: at least {BLOCKS * sum(SIZES) * arguments.samples:,} for so many samples")
    lengths = [f"writers {float(length):g} s" for length in arguments.writers.split(",")]
    groups = [[way for way in ways if way != "writers"], lengths if "writers" in ways else []]
    tables: list[str] = []
    promised: list[kit.Promise] = []
    series: dict[str, list[tuple[float, float]]] = {}
    with kit.server(arguments) as server:
        like = asyncio.run(filled(server, arguments.jobs))
        kit.say(f"{arguments.jobs:,} jobs enqueued")
        undisturbed = None
        for holds in filter(None, groups):
            found = asyncio.run(measure(server, like, holds, arguments.jobs, arguments.samples))
            undisturbed = undisturbed or found["free"]
            text, those = report(found, arguments.jobs, undisturbed)
            tables.append(text)
            promised += those
            for how, one in found.items():
                step = arguments.jobs / BLOCKS
                series.setdefault(how, [(step * (i + 0.5), value) for i, value in enumerate(one.times[1])])
        server.drop(like)
    said, kept = kit.promises(promised)
    print(*tables, said, sep="\n\n")
    kit.lines(
        arguments.svg, "Claiming one job while the xmin horizon is held", series, "ms, lower quartile of a block", "jobs taken"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
