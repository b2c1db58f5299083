"""Draining while somebody holds the xmin horizon: the rate of the last tenth of the jobs to that of the first, of all peers.

    python -m benchmarks.held_drain [--jobs 100000] [--peers] [--rounds 3] [--svg held_drain.svg]
    python -m benchmarks.held_drain --one --peers graphile-worker,pgqueuer-asyncpg

One worker process drains N jobs that do nothing, by turns with nobody else about and with a transaction open that has written;
between rounds the table is vacuumed. Peers that do a few hundred jobs a second are given a tenth of the jobs. With --one the
first tenth and the last are claimed, run and ended one at a time, and what lies between is drained in batches; each part is
enqueued before it, and nothing is drained with nobody else about.

The promise: the last tenth runs at 0.9 of the first one's rate at least. Exits with 1 where aioqueue does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psycopg

from . import kit
from .peers import CONTESTANTS, Contestant, Driver, NotInstallable, add_options, chosen, running

LEAST = 0.9
WAYS = ("free", "xid")
LONGEST = 240.0
"""Seconds that a drain may take."""


class Figures:
    """What one contestant did, by the way in which the horizon was held."""

    def __init__(self, contestant: Contestant, jobs: int) -> None:
        self.contestant = contestant
        self.jobs = jobs
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.tenths: dict[str, list[list[float]]] = defaultdict(list)
        """Jobs a second in each tenth (of --one: in the first and in the last), of every round."""

    def last_to_first(self, how: str) -> float:
        """The median of the rounds."""
        return kit.median([tenths[-1] / tenths[0] for tenths in self.tenths[how]])

    def add(self, how: str, size: float, seconds: Sequence[float]) -> None:
        """Take note of how long each tenth took."""
        self.tenths[how].append([size / each for each in seconds])
        self.rates[how].append(size * len(seconds) / sum(seconds))


async def one_round(found: Figures, how: str, dsn: str, batches: Driver, one: Driver | None) -> None:
    """Enqueue, hold the horizon, drain; one at a time: a tenth, then the rest but a tenth in batches, then a tenth."""
    tenth = found.jobs // 10
    parts = [(batches, found.jobs)] if one is None else [(one, tenth), (batches, found.jobs - 2 * tenth), (one, tenth)]
    took = []
    with contextlib.ExitStack() as stack:
        for number, (driver, jobs) in enumerate(parts):
            await batches.ask("bulk", jobs)
            if not number:
                await asyncio.to_thread(kit.settle, dsn)
                stack.enter_context(kit.held_horizon(dsn, how))
            took.append(await driver.ask("drain", jobs, seconds=LONGEST))
    found.add(how, tenth, took[0]["tenths"] if one is None else [took[0]["seconds"], took[-1]["seconds"]])
    rates = found.tenths[how][-1]
    kit.say(f"{found.contestant.name}, {how}: {found.rates[how][-1]:,.0f}/s, first {rates[0]:,.0f}, last {rates[-1]:,.0f}")


async def drain(server: kit.Server, found: Figures, rounds: int, cache: Path, *, one_at_a_time: bool) -> None:
    """All rounds of one contestant, with a database of its own."""
    dsn = server.database()
    async with contextlib.AsyncExitStack() as stack:
        batches = await stack.enter_async_context(running(found.contestant, dsn, cache))
        about = await batches.ask("setup", seconds=60)
        kit.say(f"{found.contestant.name} {about['version']}: {about['settings']}, {found.jobs:,} jobs")
        one = None
        if one_at_a_time:
            options = {**found.contestant.options, **found.contestant.one}
            alone = dataclasses.replace(found.contestant, options=options)
            one = await stack.enter_async_context(running(alone, dsn, cache))
            about = await one.ask("setup", seconds=60)
            kit.say(f"one at a time: {about['settings']}")
        for turn in range(rounds):
            for how in ["xid"] if one_at_a_time else kit.rotated(WAYS, turn):
                await one_round(found, how, dsn, batches, one)
    server.drop(dsn)


def report(everybody: Sequence[Figures]) -> str:
    """One table."""
    rows = [
        [one.contestant.name, f"{one.jobs:,}",
         *(f"{kit.median(one.rates[how]):,.0f}" if one.rates[how] else "–" for how in WAYS),
         f"{kit.median(one.rates['xid']) / kit.median(one.rates['free']):.2f}" if one.rates["free"] else "–",
         *(f"{one.last_to_first(how):.2f}" if one.rates[how] else "–" for how in WAYS),
         kit.spread([tenths[-1] / tenths[0] for tenths in one.tenths["xid"]], "{:.2f}")]
        for one in everybody
    ]  # fmt: skip
    head = ["", "jobs", "free, jobs/s", "held, jobs/s", "held to free", "free, last to first tenth", "held, last to first tenth",
            "lowest–highest"]  # fmt: skip
    return kit.table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "held_drain", rounds=3)
    parser.add_argument("--jobs", type=int, default=100_000, metavar="N", help="jobs of one drain (default 100,000)")
    parser.add_argument("--one", action="store_true", help="the first and the last tenth one at a time")
    add_options(parser)
    parser.add_argument("--peer-rounds", type=int, default=1, metavar="N", help="rounds of each peer (default 1)")
    arguments = parser.parse_args(argv)
    able = [name for name, each in CONTESTANTS.items() if not arguments.one or each.one]
    peers = chosen(parser, arguments, able)
    everybody = []
    with kit.server(arguments) as server:
        for name in dict.fromkeys(["aioqueue", *peers]):
            contestant = CONTESTANTS[name]
            found = Figures(contestant, max(100, arguments.jobs // 10 if contestant.slow else arguments.jobs) // 10 * 10)
            rounds = arguments.rounds if name == "aioqueue" else arguments.peer_rounds
            try:
                asyncio.run(drain(server, found, rounds, arguments.cache, one_at_a_time=arguments.one))
            except (NotInstallable, RuntimeError, TimeoutError, psycopg.Error) as error:
                kit.say(f"{name} is left out: {str(error) or type(error).__name__}")
            if found.rates["xid"]:
                everybody.append(found)
    print(report(everybody), "", sep="\n")
    ours = next((one for one in everybody if one.contestant.name == "aioqueue"), None)
    if ours is None:
        return 1
    what = "one at a time" if arguments.one else "in batches"
    promise = kit.Promise(
        f"{what}, {ours.jobs:,} jobs, horizon held: last tenth's rate to the first one's", ours.last_to_first("xid"), least=LEAST
    )
    said, kept = kit.promises([promise])
    print(said)
    title = f"A transaction held open, {what}: rate of the last tenth of the jobs to that of the first"
    kit.bars(arguments.svg, title, {one.contestant.name: one.last_to_first("xid") for one in everybody}, "")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
