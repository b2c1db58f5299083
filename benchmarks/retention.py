"""What retention costs: partitions at a claim, dropping one against deleting its rows, and claims while one is dropped.

    python -m benchmarks.retention [--jobs 100000] [--seconds 20]

partitions  claim of 1 and of 100 with 0, 10 and 30 ranges of id time, interleaved: time and buffers, as ratios to none
drop        an old range of N ended jobs, 1 % of which must stay: dropped whole, against DELETE in batches (and its WAL)
waits       claims one after the other beside a transaction that has enqueued and stays open, while a pruner tries again and
            again to drop an old range: the longest claim with it and without it; more than 100 ms longer is a failure
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from aioqueue.job import lane
from aioqueue.migrate import script
from aioqueue.sql import as_sql, functions
from benchmarks import kit

THEN = "2026-03-01Z"
DAY, WEEK, MONTH = 86_400.0, 7 * 86_400.0, 30 * 86_400.0
LANE = lane("default", 0)
WORKER = 4_711
RANGES = (0, 10, 30)
LONGEST = 0.1
"""Seconds that a claim may take longer while a range is dropped."""


class Queue:
    """A database with the schema, and one connection to it."""

    def __init__(self, server: kit.Server) -> None:
        self.dsn = server.database()
        self.conn = psycopg.connect(self.dsn, autocommit=True)
        self.conn.execute(as_sql(script(), "aioqueue"))
        self.run(
            "INSERT INTO aioqueue.worker (id, host, pid, version, queues, concurrency, started_at, beat_at, lease_until)"
            " VALUES (%s, 'h', 1, '0', '{}', 1, now(), now(), now() + interval '1 day')",
            WORKER,
        )

    def run(self, statement: str, *params: object) -> list[tuple[Any, ...]]:
        """Run a statement; its rows."""
        cursor = self.conn.execute(as_sql(statement, "aioqueue"), params or None)
        return cursor.fetchall() if cursor.description else []

    def make_old_range(self) -> None:
        """Make one range as if it were THEN."""
        text = functions()["make_ranges"]
        self.run(text.replace("clock_timestamp()", f"'{THEN}'::timestamptz"))
        self.run("SELECT aioqueue.make_ranges(%s, 0)", DAY)
        self.run(text)

    def fill_old(self, jobs: int) -> None:
        """Write jobs of THEN that ended then, each hundredth dead yesterday."""
        ids = "aioqueue.first_id(%s::timestamptz + n * interval '0.8 ms') AS id"
        self.run(
            "INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at)"
            f" SELECT DISTINCT ON (id) id, 't', 'default', '', 0, 5, '{{\"text\": \"of some length\"}}', now()"
            f" FROM (SELECT {ids} FROM generate_series(1, %s) AS n) x",
            THEN,
            round(jobs * 1.25),
        )
        self.run(
            "INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, finished_at)"
            " SELECT id, CASE WHEN i %% 100 = 0 THEN 'dead' ELSE 'succeeded' END, 1, 0, '1',"
            " CASE WHEN i %% 100 = 0 THEN now() - interval '1 day' ELSE %s END"
            " FROM (SELECT id, row_number() OVER () AS i FROM aioqueue.job) x",
            THEN,
        )

    def claim(self, limit: int) -> str:
        """The claim as a statement."""
        return (
            f"SELECT * FROM aioqueue.claim({WORKER}, ARRAY[{LANE}::bigint], ARRAY[0::bigint],"
            f" ARRAY['00000000-0000-0000-0000-000000000000'::uuid], ARRAY[0], ARRAY[{limit}], {limit})"
        )

    def enqueue(self, number: int) -> None:
        """Enqueue jobs of now."""
        self.run("SELECT aioqueue.enqueue_many(jsonb_agg(jsonb_build_object('task', 't'))) FROM generate_series(1, %s)", number)


def timed(call: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def partitions(server: kit.Server, rounds: int) -> dict[int, float]:
    """Claims beside more or fewer ranges; the ratio of each number of ranges to none, for a claim of one."""
    queues = {}
    for number in RANGES:
        queue = queues[number] = Queue(server)
        if number:
            queue.run("SELECT aioqueue.make_ranges(%s, %s)", 3600.0, number - 1)
        queue.enqueue(101 * rounds * 20 + 500)
        kit.settle(queue.dsn)
    took: dict[tuple[int, int], list[float]] = {}
    for turn in range(rounds * 20):
        for name in kit.rotated([str(number) for number in RANGES], turn):
            for limit in (1, 100):
                queue = queues[int(name)]
                statement = queue.claim(limit)
                took.setdefault((int(name), limit), []).append(timed(lambda q=queue, s=statement: q.run(s)))  # type: ignore[misc]
    rows = []
    ratios = {}
    for number in RANGES:
        ratios[number] = kit.median(took[number, 1]) / kit.median(took[0, 1])
        buffers = [
            sum(node["Plan"]["Shared Hit Blocks"] + node["Plan"]["Shared Read Blocks"] for node in plan)
            for limit in (1, 100)
            for ((plan,),) in [queues[number].run("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + queues[number].claim(limit))]
        ]
        rows.append([
            number, f"{ratios[number]:.2f}", f"{kit.median(took[number, 100]) / kit.median(took[0, 100]):.2f}", *buffers,
        ])  # fmt: skip
    print(kit.table(["ranges", "claim of 1, to none", "claim of 100, to none", "buffers of 1", "buffers of 100"], rows))
    return ratios


def drop(server: kit.Server, jobs: int) -> float:
    """Drop a range of ended jobs, and delete as many row by row; the ratio of the times."""
    rows = []
    seconds = {}
    for how in ("dropped whole", "deleted in batches of 1,000"):
        queue = Queue(server)
        if how == "dropped whole":
            queue.make_old_range()
        queue.fill_old(jobs)
        kit.settle(queue.dsn)
        before = kit.rates(queue.conn)[1]
        if how == "dropped whole":
            seconds[how] = timed(lambda q=queue: q.run("SELECT aioqueue.prune_range(%s, %s)", WEEK, MONTH))  # type: ignore[misc]
        else:
            seconds[how] = timed(lambda q=queue: _delete(q))  # type: ignore[misc]
        left = queue.run("SELECT count(*) FROM aioqueue.job")[0][0]
        rows.append([how, f"{seconds[how] * 1000:,.0f} ms", f"{(kit.rates(queue.conn)[1] - before) / 1e6:,.1f} MB", f"{left:,}"])
    print(kit.table([f"{jobs:,} ended jobs", "time", "WAL", "jobs left"], rows))
    return seconds["dropped whole"] / seconds["deleted in batches of 1,000"]


def _delete(queue: Queue) -> None:
    while queue.run("SELECT aioqueue.prune_default(%s, %s, 1000)", WEEK, MONTH)[0][0]:
        pass
    queue.run("VACUUM aioqueue.job_default, aioqueue.outcome_default")


def waits(server: kit.Server, seconds: float) -> bool:
    """Claim beside an open transaction and a pruner; whether no claim took 100 ms longer than the longest without one."""
    longest = {}
    tries = 0
    for how in ("without a pruner", "with a pruner"):
        queue = Queue(server)
        queue.make_old_range()
        queue.run("SELECT aioqueue.make_ranges(%s, 2)", DAY)
        queue.fill_old(10_000)
        ended = threading.Event()

        def prune(dsn: str = queue.dsn, ended: threading.Event = ended) -> None:
            nonlocal tries
            with psycopg.connect(dsn, autocommit=True) as conn:
                while not ended.wait(0.05):
                    tries += 1
                    try:
                        conn.execute(as_sql("SELECT aioqueue.prune_range(%s, %s)", "aioqueue"), (WEEK, MONTH))
                    except psycopg.errors.LockNotAvailable:
                        continue
                    raise AssertionError("it did not give way to the open transaction")

        with psycopg.connect(queue.dsn) as caller:
            caller.execute("SELECT aioqueue.enqueue('t')")
            pruner = threading.Thread(target=prune)
            if how == "with a pruner":
                pruner.start()
            took = []
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                queue.enqueue(50)
                took += [timed(lambda q=queue: q.run(q.claim(1))) for _ in range(50)]  # type: ignore[misc]
            ended.set()
            if pruner.ident is not None:
                pruner.join()
        longest[how] = max(took)
        kit.say(f"{how}: {len(took):,} claims, median {kit.median(took) * 1000:.2f} ms, longest {max(took) * 1000:.0f} ms")
    kit.say(f"the pruner tried {tries} times, and gave way each time")
    return longest["with a pruner"] < longest["without a pruner"] + LONGEST and tries > 0


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 if a claim had to wait."""
    parser = kit.parser(__doc__, "retention", rounds=5)
    parser.add_argument("--jobs", type=int, default=100_000, metavar="N", help="jobs of the range that is dropped (100,000)")
    parser.add_argument("--seconds", type=float, default=20, metavar="S", help="length of the third part, twice (20)")
    given: argparse.Namespace = parser.parse_args(arguments)
    with kit.server(given) as server:
        ratios = partitions(server, given.rounds)
        print(f"dropping takes {drop(server, given.jobs):.3f} of the time of deleting")
        well = waits(server, given.seconds)
    if isinstance(given.svg, Path):
        kit.bars(given.svg, "Claim of one, against no partitions", {f"{n} ranges": r for n, r in ratios.items()}, "x")
    print("no claim waited" if well else "FAILED: a claim waited for the pruner")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
