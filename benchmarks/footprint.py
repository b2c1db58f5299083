"""What a worker process takes: idle, and with 10,000 jobs that sleep, all running at once.

    python -m benchmarks.footprint [--running 10000] [--seconds 60]

idle      connections, transactions a second, resident memory and processor time of a worker without work
sleeping  resident memory at its highest, and the longest time between two beats, of a worker with N jobs that all sleep at the
          same time; then they end, and the seconds until every outcome is recorded

The worker is a process of its own, with default settings but for the concurrency of the second. The promises: idle at most 3
connections, 3 transactions a second and 60 MB; with 10,000 running below 250 MB, and no beat later than half its interval.
Exits with 1 where one is broken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psycopg

from aioqueue import LeaseSettings

from . import kit
from .peers import CONTESTANTS, Contestant, running
from .throughput import Entry, Plan, idle

CONNECTIONS, TRANSACTIONS, IDLE_MB, RUNNING_MB = 3.0, 3.0, 60.0, 250.0
LATE = 1.5
"""A beat may come so many times its interval after the one before."""
STARTED = 600.0
"""Seconds until all run, at most."""
RUNNING = "SELECT count(*) FROM aioqueue.live WHERE worker IS NOT NULL"
BEAT = "SELECT max(extract(epoch FROM beat_at))::float8 FROM aioqueue.worker"


class Sleeping(NamedTuple):
    """What many sleeping jobs took."""

    before_mb: float
    """Before any ran."""
    most_mb: float
    gap: float
    """The longest time between two beats, in seconds."""
    started: float
    """Seconds until all ran."""
    recorded: float
    """Seconds from when the first one could end until the last one was recorded."""


def most_mb(pid: int) -> float:
    """The most memory that a process has had in resident pages, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


async def sleeping(server: kit.Server, jobs: int, seconds: float) -> Sleeping:
    """Let so many sleep at once for so long."""
    dsn = server.database()
    options = {"concurrency": jobs, "sleep": seconds}
    aioqueue = dataclasses.replace(CONTESTANTS["aioqueue"], options=options)
    async with running(aioqueue, dsn, Path()) as enqueuer:
        await enqueuer.ask("setup")
        await enqueuer.ask("bulk", jobs)
    async with (
        running(aioqueue, dsn, Path()) as worker,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
    ):

        async def value(query: str) -> float:
            row = await (await conn.execute(query.encode())).fetchone()
            assert row is not None
            return float(row[0] or 0)

        await worker.ask("setup")
        before = most_mb(worker.pid)
        begin = time.monotonic()
        await worker.ask("work")
        at_once = gap = last = started = 0.0
        while not started or await value(RUNNING):
            beat = await value(BEAT)
            gap, last = max(gap, beat - last) if last else gap, beat
            at_once = max(at_once, await value(RUNNING))
            now = time.monotonic()
            if not started and at_once == jobs:
                started = now - begin
            assert started or now < begin + min(seconds, STARTED), f"{at_once:,.0f} of {jobs:,} ran at once"
            await asyncio.sleep(0.1)
        found = Sleeping(before, most_mb(worker.pid), gap, started, time.monotonic() - begin - seconds)
    server.drop(dsn)
    return found


async def idling(server: kit.Server, seconds: float) -> Entry:
    """An idle worker's figures."""
    contestant: Contestant = CONTESTANTS["aioqueue"]
    dsn = server.database()
    async with running(contestant, dsn, Path()) as driver:
        entry = Entry(contestant, dsn, driver, await driver.ask("setup"))
    await idle(Plan(jobs=0, rounds=1, singles=0, pickups=0, idle=seconds, measures=("idle",), cache=Path()), entry)
    server.drop(dsn)
    return entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "footprint", rounds=1)
    parser.add_argument("--running", type=int, default=10_000, metavar="N", help="jobs that sleep at once (default 10,000)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long each part is watched (default 60)")
    arguments = parser.parse_args(argv)
    # Its transactions would be counted with those of an idle worker.
    with kit.server(arguments, autovacuum="off") as server:
        figures = asyncio.run(idling(server, arguments.seconds)).figures
        kit.say("idle: " + ", ".join(f"{values[0]:.2f} {what}" for what, values in figures.items()))
        found = asyncio.run(sleeping(server, arguments.running, arguments.seconds))
    rows = [
        ["idle", *(f"{figures[what][0]:.1f}" for what in ("connections", "transactions/s", "rss_mb", "cpu %")), "–"],
        [f"{arguments.running:,} sleeping", "–", "–", f"{found.most_mb:.0f} at most ({found.before_mb:.0f} before)", "–",
         f"{found.gap:.1f}"],
    ]  # fmt: skip
    print(kit.table(["a worker", "connections", "transactions/s", "MB", "% of a processor", "s between beats"], rows))
    print(f"\nall ran after {found.started:.1f} s; all were recorded {found.recorded:.1f} s after the first could end\n")
    beat = LeaseSettings().beat_seconds
    said, kept = kit.promises([
        kit.Promise("idle worker: connections", figures["connections"][0], most=CONNECTIONS, form="{:.0f}"),
        kit.Promise("idle worker: transactions a second", figures["transactions/s"][0], most=TRANSACTIONS),
        kit.Promise("idle worker: MB", figures["rss_mb"][0], most=IDLE_MB, form="{:.0f}"),
        kit.Promise(f"{arguments.running:,} jobs sleeping: MB", found.most_mb, most=RUNNING_MB, form="{:.0f}"),
        kit.Promise(f"{arguments.running:,} jobs sleeping: s between beats (each {beat:g} s)", found.gap, most=LATE * beat),
    ])  # fmt: skip
    print(said)
    kit.bars(arguments.svg, "Resident memory of a worker", {
        "idle": figures["rss_mb"][0], f"{arguments.running:,} jobs sleeping": found.most_mb,
    }, "MB")  # fmt: skip
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
