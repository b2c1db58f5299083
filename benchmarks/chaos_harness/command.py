"""The command line of the harness: which stage, how long, which seed, which sabotage; the exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import tempfile
from pathlib import Path

from .engine import run as engine
from .sabotage import SABOTAGES
from .storm import run as storm
from .storm.model import KINDS

STAGES = ("storm", "engine")
STORM_SECONDS = 60.0
ENGINE_SECONDS = 20.0
SABOTAGED_STORM = 24.0
SABOTAGED_ENGINE = 45.0
ROUNDS = 3
"""Rounds in which a sabotage must be caught, each with the next seed."""
DESCRIPTION = """\
Everything that can go wrong, for as long as you like; then the books must balance. Stage storm (the default): worker and
enqueuer processes, a primary and its synchronous standby, under kills, stops, ended sessions, restarts, failovers, cut
networks, cut commits, wrong clocks. Stage engine: the storage engine driven by hand in one process, with tighter interleavings.
Exit status 0: every check held; with a sabotage, each was caught."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/chaos.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="how long jobs come and things break (1; the engine: 20 s)")
    length.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--seed", type=int, help="of the faults' schedule and every actor's choices; the order of events varies")
    parser.add_argument("--stage", choices=STAGES, default="storm", help="storm: processes; engine: the engine by hand (storm)")
    parser.add_argument("--workers", type=int, default=4, help="workers; in the engine all but the first die (4)")
    parser.add_argument("--rate", type=float, help="storm: jobs a second, about (90); engine: transactions of each enqueuer (8)")
    parser.add_argument("--interval", type=float, default=3.0, help="storm: seconds between faults on average, cancels apart (3)")
    parser.add_argument("--only", type=_kinds, metavar="KIND,…", help=f"storm: faults that happen: {', '.join(KINDS)} (all)")
    parser.add_argument("--without", type=_kinds, default=frozenset(), metavar="KIND,…", help="storm: faults that do not")
    parser.add_argument("--sabotage", choices=["all", *SABOTAGES], help="break one rule, or each in turn: the run must fail")
    parser.add_argument("--dsn", help="engine: a database to use, in a schema of its own; default: a temporary server")
    found = parser.parse_args()
    if found.workers < 2:
        parser.error("--workers: at least 2, or nobody rescues")
    return found


def _kinds(text: str) -> frozenset[str]:
    found = frozenset(filter(None, text.split(",")))
    if found - set(KINDS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(KINDS)}, got {text!r}")
    return found


def run_engine(options: argparse.Namespace, seed: int, name: str | None) -> list[str]:
    """Run the engine by hand; what was found wrong."""
    seconds = _seconds(options) or (ENGINE_SECONDS if name is None else SABOTAGED_ENGINE)
    rate = options.rate or 8.0
    print(f"engine: {seconds:g} s, {options.workers} workers, seed {seed}{_broken(name)}", flush=True)
    with engine.database(options.dsn) as dsn:
        sabotage = None if name is None else SABOTAGES[name]
        chaos = asyncio.run(engine.run(dsn, seconds, seed, options.workers, rate, sabotage))
    engine.report(chaos)
    return chaos.faults


def run_storm(options: argparse.Namespace, seed: int, name: str | None) -> list[str]:
    """Run a storm of processes; what was found wrong."""
    sabotage = None if name is None else SABOTAGES[name]
    kinds = frozenset(KINDS) if options.only is None else options.only
    interval = options.interval
    if sabotage is not None and sabotage.kinds is not None and options.only is None:
        kinds, interval = sabotage.kinds, 4.0
    kinds -= options.without
    seconds = _seconds(options) or (STORM_SECONDS if name is None else SABOTAGED_STORM)
    directory = Path(tempfile.mkdtemp(prefix="aioqueue-chaos-logs-"))
    happens = ", ".join(sorted(kinds)) or "none"
    print(f"storm: {seconds:g} s, {options.workers} workers, seed {seed}, faults: {happens}{_broken(name)}")
    print(f"  logs, diaries and journals of the processes: {directory}", flush=True)
    made = storm.run(
        directory,
        seconds=seconds,
        seed=seed,
        kinds=kinds,
        workers=options.workers,
        rate=options.rate or (90.0 if name is None else 60.0),
        interval=interval,
        sabotage=sabotage,
    )
    return made.faults


def _seconds(options: argparse.Namespace) -> float | None:
    found: float | None = 60 * options.minutes if options.minutes else options.seconds
    return found


def _broken(name: str | None) -> str:
    return "" if name is None else f", sabotage {name}: NOT {SABOTAGES[name].rule}"


def main() -> int:
    """Run as asked; the exit status."""
    options = arguments()
    # Outages are no news here.
    logging.getLogger().addHandler(logging.NullHandler())
    # As Ctrl-C does: no process and no server outlives this one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    if options.sabotage is None:
        faults = (run_engine if options.stage == "engine" else run_storm)(options, seed, None)
        print("every check held" if not faults else f"FAILED: {len(faults)} faults")
        return 1 if faults else 0
    names = list(SABOTAGES) if options.sabotage == "all" else [options.sabotage]
    missed = []
    for name in names:
        play = run_engine if SABOTAGES[name].kinds is None else run_storm
        # What it breaks shows in some interleavings: on a busy machine these may want more than one round.
        rounds = next((n for n in range(1, ROUNDS + 1) if play(options, seed + n - 1, name)), None)
        print(f"sabotage {name}: " + (f"caught in round {rounds}" if rounds else "NOT CAUGHT"), flush=True)
        if rounds is None:
            missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} sabotages caught" + (f", not {', '.join(missed)}" if missed else ""))
    return 1 if missed else 0
