"""Throughput: draining, enqueuing, picking up, idling; one worker process, default durability, beside its peers when asked.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --peers --jobs 20000 --rounds 5 --svg drain.svg
    python -m benchmarks.throughput --peers graphile-worker,pgqueuer-asyncpg --only drain

The jobs do nothing; those of aioqueue have a typed payload, their results are stored. Draining is timed from the first job's
start until the database holds no job that is still to be done. A pick-up is timed from before the enqueue, in another process,
until the job starts. Rounds are interleaved; peers that do a few hundred jobs a second are given a tenth of the jobs. Exits with
1 where aioqueue does not keep a promise that this run measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from . import kit
from .peers import CONTESTANTS, Contestant, Driver, NotInstallable, add_options, chosen, running

MEASURES = ("bulk", "single", "drain", "pickup", "idle")
BLOCK = 50
"""Pick-ups of one contestant in a row."""
SETTLED = 12.0
"""Seconds after its start in which a worker is not yet called idle."""


@dataclass
class Plan:
    """What to measure, and how much of it."""

    jobs: int
    rounds: int
    singles: int
    pickups: int
    idle: float
    measures: Sequence[str]
    cache: Path
    logs: Path | None = None


@dataclass
class Entry:
    """One contestant at work, and its figures by measure."""

    contestant: Contestant
    dsn: str
    driver: Driver
    about: dict[str, str]
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: str | None = None

    @property
    def name(self) -> str:
        return self.contestant.name


async def enter(plan: Plan, server: kit.Server, names: Sequence[str], stack: contextlib.AsyncExitStack) -> list[Entry]:
    """Install and start the contestants; those that do not install are left out with a word."""
    entries = []
    for name in names:
        contestant, dsn = CONTESTANTS[name], server.database()
        log = plan.logs / f"{name}.log" if plan.logs else None
        try:
            driver = await stack.enter_async_context(running(contestant, dsn, plan.cache, log))
            about = await driver.ask("setup", seconds=60)
        except (NotInstallable, RuntimeError, TimeoutError) as error:
            kit.say(f"{name} is left out: {str(error) or type(error).__name__}")
            continue
        entries.append(Entry(contestant, dsn, driver, about))
        kit.say(f"{name} {about['version']}: {about['settings']}")
    return entries


async def one_round(plan: Plan, entry: Entry) -> None:
    """Enqueue in bulk, enqueue one by one, drain all."""
    n = max(10, plan.jobs // 10 if entry.contestant.slow else plan.jobs)
    figures, total = entry.figures, 0
    if {"bulk", "drain"} & set(plan.measures):
        figures["bulk"].append(n / (await entry.driver.ask("bulk", n))["seconds"])
        total += n
    if "single" in plan.measures:
        figures["single"].append(plan.singles / (await entry.driver.ask("single", plan.singles))["seconds"])
        total += plan.singles
    if not total:
        return
    await asyncio.to_thread(kit.settle, entry.dsn)
    total = total // 10 * 10
    drained = await entry.driver.ask("drain", total)
    figures["drain"].append(total / drained["seconds"])
    figures["cpu"].append(1e6 * drained["cpu"] / total)
    kit.say(f"{entry.name}: " + ", ".join(f"{what} {values[-1]:,.0f}" for what, values in figures.items()))


async def pick_up(plan: Plan, entry: Entry, *, n: int) -> None:
    """Let an idle worker in a process of its own pick up jobs that another process enqueues, one at a time."""
    async with running(entry.contestant, entry.dsn, plan.cache) as worker:
        await worker.ask("setup", seconds=60)
        await worker.ask("serve", seconds=60)
        for i in range(n + 5):
            enqueued = asyncio.create_task(entry.driver.ask("single", 1, seconds=30))
            ran = await worker.hear(30)
            (began,) = (await enqueued)["at"]
            while ran["ran"] < began:
                ran = await worker.hear(30)  # that was the one before, which the peer has run twice
            if i >= 5:  # the first ones warm up
                entry.figures["pickup"].append(1000 * (ran["ran"] - began))
            await asyncio.sleep(0.02)  # until it is idle again


async def idle(plan: Plan, entry: Entry) -> None:
    """Count what a worker without work costs."""
    async with running(entry.contestant, entry.dsn, plan.cache) as worker:
        await worker.ask("setup", seconds=60)
        await worker.ask("serve", seconds=60)
        # Until the statistics have what its start took: an idle backend hands them over after ten seconds.
        await asyncio.sleep(min(SETTLED, plan.idle))
        async with await psycopg.AsyncConnection.connect(entry.dsn, autocommit=True) as conn:
            before, first, begin = await worker.ask("idle"), await _transactions(conn), time.monotonic()
            await asyncio.sleep(plan.idle)
            after, last, end = await worker.ask("idle"), await _transactions(conn), time.monotonic()
            backends = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            mine = await (await conn.execute(backends)).fetchone()
        assert mine is not None
        figures = entry.figures
        figures["transactions/s"].append((last - first - 2) / (end - begin))
        figures["connections"].append(mine[0])
        figures["rss_mb"].append(after["rss_mb"])
        figures["cpu %"].append(100 * (after["cpu"] - before["cpu"]) / plan.idle)


async def _transactions(conn: psycopg.AsyncConnection[Any]) -> int:
    await conn.execute("SELECT pg_stat_force_next_flush()")
    # What a backend has done reaches the statistics after at most a second.
    await asyncio.sleep(1.0)
    row = await (
        await conn.execute("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()")
    ).fetchone()
    assert row is not None
    return int(row[0])


async def measure(plan: Plan, server: kit.Server, names: Sequence[str]) -> list[Entry]:
    """Run everything; a contestant that fails is out from then on."""

    async def attempt(entry: Entry, what: Callable[[Plan, Entry], Any]) -> None:
        if entry.failed is None:
            try:
                await what(plan, entry)
            except (RuntimeError, TimeoutError, psycopg.Error) as error:
                entry.failed = f"{type(error).__name__}: {error}"
                kit.say(f"{entry.name} is out: {entry.failed}")

    async with contextlib.AsyncExitStack() as stack:
        entries = await enter(plan, server, names, stack)

        def order(turn: int) -> list[Entry]:
            by_name = {entry.name: entry for entry in entries}
            return [by_name[name] for name in kit.rotated(list(by_name), turn)]

        for turn in range(plan.rounds):
            for entry in order(turn):
                await attempt(entry, one_round)
        if "pickup" in plan.measures:
            for turn in range(-(-plan.pickups // BLOCK)):
                size = min(BLOCK, plan.pickups - turn * BLOCK)
                for entry in order(turn):
                    await attempt(entry, functools.partial(pick_up, n=size))
    if "idle" in plan.measures:
        # One after the other, and with nobody else about: the drivers above have ended.
        for entry in entries:
            await asyncio.to_thread(kit.settle, entry.dsn)
            await attempt(entry, idle)
    return entries


def report(entries: Sequence[Entry]) -> str:
    """One table: medians, the spread of the drains, ratios to the first."""
    base = entries[0].figures
    head = ["", "drain/s", "lowest–highest", "ratio", "µs CPU/job", "bulk/s", "ratio", "single/s", "ratio"]
    head += ["pick-up p50 ms", "p99", "idle tx/s", "connections", "MB"]
    rows = []
    for entry in entries:
        f = entry.figures

        def rate(what: str, f: dict[str, list[float]] = f) -> list[str]:
            if not f[what]:
                return ["–", "–"]
            return [f"{kit.median(f[what]):,.0f}", f"{kit.median(f[what]) / kit.median(base[what]):.2f}" if base[what] else "–"]

        drain, ratio = rate("drain")
        pickup = [f"{kit.percentile(f['pickup'], share):.1f}" if f["pickup"] else "–" for share in (0.5, 0.99)]
        costs = [f"{f[what][0]:{form}}" if f[what] else "–" for what, form in
                 (("transactions/s", ".1f"), ("connections", ".0f"), ("rss_mb", ".0f"))]  # fmt: skip
        cpu = f"{kit.median(f['cpu']):.0f}" if f["cpu"] else "–"
        rows.append([entry.name, drain, kit.spread(f["drain"]), ratio, cpu, *rate("bulk"), *rate("single"), *pickup, *costs])
    return kit.table(head, rows)


def promised(entries: Sequence[Entry]) -> list[kit.Promise]:
    """What aioqueue promises beside the peers that took part, and when idle."""
    ours = {entry.name: entry.figures for entry in entries if not entry.contestant.packages}
    theirs = {entry.name: entry.figures for entry in entries if entry.contestant.packages}
    base = entries[0].figures

    def rate(of: dict[str, dict[str, list[float]]], what: str) -> float:
        return max((kit.median(figures[what]) for figures in of.values() if figures[what]), default=math.nan)

    def quick(figures: dict[str, list[float]], share: float) -> float:
        return kit.percentile(figures["pickup"], share) if figures["pickup"] else math.nan

    shipped = {name: figures for name, figures in ours.items() if "uvloop" not in name}
    python = {name: figures for name, figures in theirs.items() if CONTESTANTS[name].driver.endswith(".py")}
    graphile = {name: figures for name, figures in theirs.items() if name == "graphile-worker"}
    return [
        kit.Promise("drain to graphile-worker's", rate(shipped, "drain") / rate(graphile, "drain"), least=1.0),
        kit.Promise("drain to the fastest Python peer's", rate(shipped, "drain") / rate(python, "drain"), least=2.5),
        kit.Promise("drain at default settings to that", kit.median(base["drain"]) / rate(python, "drain"), least=2.0),
        kit.Promise("enqueue, one by one, to the fastest peer's", kit.median(base["single"]) / rate(theirs, "single"), least=1.0),
        kit.Promise("enqueue_many to the fastest peer's", kit.median(base["bulk"]) / rate(theirs, "bulk"), least=1.2),
        *(
            kit.Promise(f"pick-up, p{100 * share:g}, to the quickest peer's", quick(base, share) / min(
                (quick(figures, share) for figures in theirs.values() if figures["pickup"]), default=math.nan), most=1.0)
            for share in (0.5, 0.99)
        ),
        *(
            kit.Promise(f"idle: {what}", kit.median(base[what]), most=most)
            for what, most in (("connections", 3.0), ("transactions/s", 3.0), ("rss_mb", 60.0))
        ),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "throughput", rounds=3)
    parser.add_argument("--jobs", type=int, default=20_000, metavar="N", help="jobs of one drain (default 20,000)")
    parser.add_argument(
        "--singles", type=int, default=1_000, metavar="N", help="jobs enqueued one by one in a round (default 1,000)"
    )
    parser.add_argument("--pickups", type=int, default=200, metavar="N", help="pick-ups by an idle worker (default 200)")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="how long to watch idle workers (default 10)")
    parser.add_argument("--only", default=",".join(MEASURES), metavar="WHAT", help=f"of {','.join(MEASURES)}")
    add_options(parser)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where to keep what the drivers say")
    arguments = parser.parse_args(argv)
    measures = arguments.only.split(",")
    peers = chosen(parser, arguments)
    for unknown in {*measures} - {*MEASURES}:
        parser.error(f"{unknown!r} is not known")
    plan = Plan(
        arguments.jobs, arguments.rounds, arguments.singles, arguments.pickups, arguments.idle, measures,
        arguments.cache, arguments.logs,
    )  # fmt: skip
    names = list(dict.fromkeys(["aioqueue", *peers]))
    with kit.server(arguments) as server:
        entries = asyncio.run(measure(plan, server, names))
    if not entries:
        return 1
    print(report(entries), "", sep="\n")
    said, kept = kit.promises(one for one in promised(entries) if one.kept is not None)
    print(said)
    drains = {e.name: kit.median(e.figures["drain"]) for e in entries if e.figures["drain"]}
    kit.bars(arguments.svg, f"{plan.jobs:,} jobs drained by one process", drains, "jobs/s")
    return int(not kept or any(entry.failed for entry in entries if not entry.contestant.packages))


if __name__ == "__main__":
    raise SystemExit(main())
