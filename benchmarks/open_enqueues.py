"""How soon a job starts after the commit of the caller's transaction that enqueued it, however long that stayed open.

    python -m benchmarks.open_enqueues [--open 0,20,500] [--pickups 200] [--svg open_enqueues.svg]

A worker process is idle. In another process a caller begins a transaction, enqueues a job in it (`on=`), leaves it open for so
many milliseconds and commits. What counts is the time from before COMMIT was sent until the job runs. The lengths take turns.

The promise: 99 of 100 within 50 ms. Exits with 1 where it is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from . import kit
from .peers import CONTESTANTS, running

MOST = 50.0
"""Milliseconds."""
WARM = 5
"""Pick-ups of each length that do not count."""


async def measure(server: kit.Server, lengths: Sequence[float], pickups: int) -> dict[float, list[float]]:
    """Milliseconds of the pick-ups, by how long the transaction was left open."""
    found: dict[float, list[float]] = {length: [] for length in lengths}
    aioqueue, dsn = CONTESTANTS["aioqueue"], server.database()
    async with running(aioqueue, dsn, Path()) as caller, running(aioqueue, dsn, Path()) as worker:
        await caller.ask("setup")
        await worker.ask("setup")
        await worker.ask("serve")
        for turn in range(pickups + WARM):
            for length in lengths if turn % 2 else reversed(lengths):
                enqueued = asyncio.create_task(caller.ask("open", length, seconds=60))
                ran = await worker.hear(60)
                took = 1000 * (ran["ran"] - (await enqueued)["at"])
                if turn >= WARM:
                    found[length].append(took)
                await asyncio.sleep(0.02)  # until it is idle again
    server.drop(dsn)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = kit.parser(__doc__, "open_enqueues", rounds=1)
    parser.add_argument("--open", default="0,20,500", metavar="MS", help="how long the transactions stay open (default 0,20,500)")
    parser.add_argument("--pickups", type=int, default=200, metavar="N", help="pick-ups of each length (default 200)")
    arguments = parser.parse_args(argv)
    with kit.server(arguments) as server:
        found = asyncio.run(measure(server, [float(length) for length in arguments.open.split(",")], arguments.pickups))
    quantiles = {length: [kit.percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] for length, values in found.items()}
    rows = [[f"{length:g} ms", len(found[length]), *(f"{value:.1f}" for value in values)] for length, values in quantiles.items()]
    print(kit.table(["left open", "pick-ups", "p50 ms", "p90", "p99", "longest"], rows), "", sep="\n")
    said, kept = kit.promises(
        kit.Promise(f"left open {length:g} ms: p99 after the commit, ms", values[2], most=MOST, form="{:.1f}")
        for length, values in quantiles.items()
    )
    print(said)
    bars = {
        f"open {length:g} ms, {what}": values[i] for length, values in quantiles.items() for i, what in ((0, "p50"), (2, "p99"))
    }
    kit.bars(arguments.svg, "From the caller's commit until the job runs", bars, "ms")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
