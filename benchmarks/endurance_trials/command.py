"""The command line of the trials."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable

from . import interrupts, memory, poison, stops, takeover
from .bench import Bench, Verdict, bench

Trial = Callable[[Bench, argparse.Namespace], Awaitable[Verdict]]
TRIALS: dict[str, Trial] = {
    "takeover": lambda b, o: takeover.run(b, runs=o.runs, at_once=o.at_once, seed=o.seed),
    "interrupts": lambda b, o: interrupts.run(b, interruptions=o.interruptions),
    "stops": lambda b, o: stops.run(b, stops=o.stops),
    "memory": lambda b, o: memory.run(b, jobs=o.jobs),
    "poison": lambda b, o: poison.run(b, neighbours=o.neighbours),
}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/endurance.py", description="Long trials; exit status 1: something did not hold."
    )
    commands = parser.add_subparsers(dest="trial", required=True)
    for name, module in (
        ("takeover", takeover),
        ("interrupts", interrupts),
        ("stops", stops),
        ("memory", memory),
        ("poison", poison),
        ("all", None),
    ):
        text = str(module.__doc__).strip() if module else "All of them, one after the other."
        command = commands.add_parser(name, help=text, description=text)
        if name in ("takeover", "all"):
            command.add_argument("--runs", type=int, default=20, help="workers killed (20)")
            command.add_argument("--at-once", type=int, default=10, help="of them at a time (10)")
            command.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the moments of the kills")
        if name in ("interrupts", "all"):
            command.add_argument("--interruptions", type=int, default=1000, help="how many, all kinds together (1,000)")
        if name in ("stops", "all"):
            command.add_argument("--stops", type=int, default=500, help="how many (500)")
        if name in ("memory", "all"):
            command.add_argument("--jobs", type=int, default=1_000_000, help="how many (1,000,000), a multiple of 2,000")
        if name in ("poison", "all"):
            command.add_argument("--neighbours", type=int, default=500, help="ten-second jobs beside it (500)")
    return parser.parse_args()


def main() -> int:
    """Run as asked; the exit status."""
    options = arguments()
    logging.getLogger().addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    good = True
    for name in TRIALS if options.trial == "all" else [options.trial]:
        with bench() as made:
            verdict = asyncio.run(_run(name, made, options))
        seed = f", seed {options.seed}" if name == "takeover" else ""
        verdict.print(f"{name}{seed}")
        if verdict.faults:
            print(f"  logs of the processes: {made.directory}", file=sys.stderr)
        good = good and not verdict.faults
    return 0 if good else 1


async def _run(name: str, made: Bench, options: argparse.Namespace) -> Verdict:
    return await TRIALS[name](made, options)
