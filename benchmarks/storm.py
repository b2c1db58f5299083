"""Storm: real worker processes under kills, stops, outages and cut networks; then the books must balance.

    python -m benchmarks.storm --minutes 3 --seed 1
    python -m benchmarks.storm --minutes 1 --only kill,terminate

Exit status 0: every check held. What is checked stands in storm_audit.py and storm_diary.py, the faults in storm_faults.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psycopg

from . import storm_audit, storm_diary
from .sabotage import Sabotage, install
from .storm_audit import Auditor, wait_ended, wait_settled
from .storm_enqueue import Enqueuer
from .storm_faults import Canceller, Faults
from .storm_fleet import Fleet, fleet
from .storm_run import KINDS, Storm
from .storm_sabotage import SABOTAGES
from .storm_server import StormServer, prepare, storm_server
from .storm_tasks import made

ENQUEUERS = 6


async def run(
    server: StormServer,
    directory: Path,
    *,
    seconds: float,
    seed: int,
    kinds: frozenset[str],
    workers: int = 4,
    rate: float = 24.0,
    interval: float = 1.8,
    sabotage: Sabotage | None = None,
) -> Storm:
    """One storm; its faults are empty when every check held."""
    await prepare(server)
    if sabotage is not None:
        async with await psycopg.AsyncConnection.connect(server.owner, autocommit=True) as conn:
            await install(conn, "aioqueue", sabotage)
    storm = Storm(server, directory, seconds, seed, kinds, interval)
    with fleet(storm, workers) as ships:
        auditor = Auditor(storm, ships)
        keeper = asyncio.create_task(ships.keep())
        audits = asyncio.create_task(auditor.run())
        try:
            await ships.wait_ready()
            storm.began = time.monotonic()
            await act(storm, ships, rate)
            # A transaction that committed late may have brought more.
            await wait_ended(storm)
            await wait_settled(storm, ships)
            ships.stopping = True
            await keeper
            await ships.stop()
        finally:
            audits.cancel()
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await audits
        await auditor.look()
        ships.find_losses()
        executions = storm_diary.read(storm, ships)
        storm.counts["executions"] = len(executions)
        storm.counts["worker processes"] = len(ships.lives())
        overlaps = storm_diary.judge(storm, ships, executions)
        storm.counts.update({f"two runs at once: {what}": number for what, number in overlaps.items()})
        await storm_audit.judge(storm, executions)
    report(storm, executions)
    return storm


async def act(storm: Storm, ships: Fleet, rate: float) -> None:
    """Enqueue and break things for as long as the storm lasts."""
    async with asyncio.TaskGroup() as group:
        async with made(storm.server.tcp("client", "storm-client-pool"), pool=6) as app:
            faults = group.create_task(Faults(storm, ships).run())
            enqueuers = [group.create_task(Enqueuer(storm, n, app, rate / ENQUEUERS / 2).run()) for n in range(ENQUEUERS)]
            if storm.wants("cancel"):
                enqueuers.append(group.create_task(Canceller(storm, app).run()))
            ends = group.create_task(_ended(storm, faults))
            await asyncio.wait([ends, *enqueuers])


async def _ended(storm: Storm, faults: asyncio.Task[None]) -> None:
    await faults
    await wait_ended(storm)


def report(storm: Storm, executions: list[storm_diary.Execution]) -> None:
    """Print what happened."""
    first: dict[object, float] = {}
    for execution in executions:
        first[execution.job] = min(execution.start, first.get(execution.job, execution.start))
    delays = sorted(max(0.0, first[job] - at) for job, at in storm.committed.items() if job in first)
    committed = len(storm.committed) + len(storm.pooled)
    print(f"  jobs {committed} committed, {len(storm.rolled_back)} rolled back, {len(storm.unknown)} cut off at COMMIT")
    if delays:
        places = (delays[len(delays) // 2], delays[len(delays) * 99 // 100], delays[-1])
        print("  commit to first start, delayed jobs too: p50 {:.3f} s, p99 {:.3f} s, longest {:.3f} s".format(*places))
    print(f"  all had ended {storm.drained:.1f} s after the storm")
    groups: dict[str, Counter[str]] = {}
    for name, number in sorted(storm.counts.items()):
        head, colon, rest = name.partition(": ")
        groups.setdefault(head if colon else "", Counter())[rest if colon else head] += number
    for head, counts in groups.items():
        print(f"  {head}{': ' if head else ''}" + ", ".join(f"{name} {number}" for name, number in counts.items()))
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storm", description=str(__doc__).partition("\n\n")[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=60.0, help="how long the storm lasts (60)")
    length.add_argument("--minutes", type=float, help="the same in minutes")
    parser.add_argument("--seed", type=int, help="of the faults' schedule and every actor's choices; the order of events varies")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (4)")
    parser.add_argument("--rate", type=float, default=24.0, help="jobs enqueued a second, about (24)")
    parser.add_argument("--interval", type=float, default=1.8, help="seconds between faults, on average, cancels apart (1.8)")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="break one rule: the run must fail")
    parser.add_argument("--only", type=_kinds, metavar="KIND,…", help=f"faults that happen: {', '.join(KINDS)} (all)")
    parser.add_argument("--without", type=_kinds, default=frozenset(), metavar="KIND,…", help="faults that do not")
    return parser.parse_args()


def _kinds(text: str) -> frozenset[str]:
    found = frozenset(filter(None, text.split(",")))
    if found - set(KINDS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(KINDS)}, got {text!r}")
    return found


def main() -> int:
    """Run as asked; the exit status."""
    options = arguments()
    # Outages are no news here.
    logging.getLogger().addHandler(logging.NullHandler())
    # As Ctrl-C does: no worker and no server outlives this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seconds = 60 * options.minutes if options.minutes else options.seconds
    seed = secrets.randbits(32) if options.seed is None else options.seed
    kinds = (frozenset(KINDS) if options.only is None else options.only) - options.without
    directory = Path(tempfile.mkdtemp(prefix="aioqueue-storm-logs-"))
    print(
        f"storm: {seconds:g} s, {options.workers} workers, seed {seed}, faults: {', '.join(sorted(kinds)) or 'none'}", flush=True
    )
    with storm_server() as server:
        lasting = run(
            server,
            directory,
            seconds=seconds,
            seed=seed,
            kinds=kinds,
            workers=options.workers,
            rate=options.rate,
            interval=options.interval,
            sabotage=SABOTAGES.get(options.sabotage),
        )
        storm = asyncio.run(lasting)
    if options.sabotage:
        print(f"sabotage {options.sabotage}: " + ("caught" if storm.faults else "NOT CAUGHT"))
    else:
        print("every check held" if not storm.faults else f"FAILED: {len(storm.faults)} faults")
    print(f"logs and diaries of the workers: {directory}")
    return 0 if bool(storm.faults) == bool(options.sabotage) else 1


if __name__ == "__main__":
    sys.exit(main())
