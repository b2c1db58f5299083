"""Chaos: everything that can go wrong around claims and floors, for as long as you like; then the books must balance.

    python -m benchmarks.chaos --seconds 60
    python -m benchmarks.chaos --all-sabotages

Late and out-of-order commits, rollbacks, killed sessions, dead workers that come back, claims that race with rescue, retries,
cancels, an XID held all the time; several queues, priorities and tenants. The fallback look below the floors is off.
Exit status 0: every check held (or, with a sabotage, it was caught).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import TupleRow

from aioqueue import embedded, migrate
from aioqueue.store import Store

from .chaos_actors import Canceller, Enqueuer
from .chaos_mortal import MortalWorker
from .chaos_run import Chaos, judge, percentiles
from .chaos_worker import ChaosWorker
from .sabotage import SABOTAGES, Sabotage, install

STALLED = 7.0
"""Seconds without a new end and with nothing that waits for its time, after which what is left counts as lost."""
SABOTAGE_SECONDS = 10.0


@contextlib.contextmanager
def database(dsn: str | None) -> Iterator[str]:
    """Lend the DSN of the database to use: the one given, or that of a temporary server."""
    if dsn is not None:
        yield dsn
        return
    with tempfile.TemporaryDirectory(prefix="aioqueue-chaos-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o711)  # noqa: S103 - as root the server is another user, who must get through
        with embedded.start(Path(home) / "server", settings={"fsync": "off", "max_connections": "100"}) as server:
            yield server.dsn("owner")


@contextlib.asynccontextmanager
async def scratch(dsn: str) -> AsyncIterator[Store]:
    """A schema of this run's own, gone afterwards."""
    schema = f"aioqueue_chaos_{secrets.token_hex(4)}"
    await migrate.migrate(dsn, schema=schema)
    try:
        yield Store(schema)
    finally:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            await conn.execute("SET client_min_messages = warning")
            await conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


async def run(dsn: str, seconds: float, seed: int, workers: int, rate: float, sabotage: Sabotage) -> Chaos:
    """One run; its faults are empty when every check held."""
    async with scratch(dsn) as store:
        chaos = Chaos(dsn, store, seconds, seed, sabotage.floor)
        async with await chaos.connect() as watcher, await chaos.connect() as holder:
            await install(watcher, store.schema, sabotage)
            await holder.execute("SET idle_in_transaction_session_timeout = 0")
            await holder.execute("BEGIN")
            await holder.execute("SELECT pg_current_xact_id()")
            try:
                await act(chaos, watcher, workers, rate)
            except* psycopg.Error as errors:
                for error in errors.exceptions:
                    chaos.fault(f"an operation was refused: {error!r}".replace("\n", " "))
            else:
                await judge(chaos, watcher)
            await holder.execute("ROLLBACK")
    return chaos


async def act(chaos: Chaos, watcher: AsyncConnection[TupleRow], workers: int, rate: float) -> None:
    """Let the actors act until everything has ended, then let what the workers left be rescued."""
    async with asyncio.TaskGroup() as group:
        crowd: list[ChaosWorker] = []
        # One neither dies nor dawdles, so that delays measure the engine and not a lack of workers.
        crowd.extend((MortalWorker if number else ChaosWorker)(chaos, number, crowd) for number in range(workers))
        for worker in crowd:
            group.create_task(worker.run())
        group.create_task(Canceller(chaos).run())
        enqueuers = [group.create_task(Enqueuer(chaos, number, rate).run()) for number in range(10)]
        await asyncio.wait(enqueuers)
        chaos.enqueued.set()
        await wait_ended(chaos, watcher)
        chaos.finished.set()
    while await chaos.store.rescue(watcher, worker=0, limit=1000) is not None:
        pass


async def wait_ended(chaos: Chaos, watcher: AsyncConnection[TupleRow]) -> None:
    """Wait until every committed job has ended, or nothing has ended for a while."""
    best, since = -1, time.monotonic()
    while best < len(chaos.committed):
        ((ended, waiting),) = await chaos.rows(
            watcher,
            "SELECT (SELECT count(*) FROM aioqueue.outcome),"
            " EXISTS (SELECT FROM aioqueue.scheduled WHERE run_at > clock_timestamp())",
        )
        if ended > best or waiting:
            best, since = ended, time.monotonic()
        elif time.monotonic() - since > STALLED:
            return
        await asyncio.sleep(0.2)


def report(chaos: Chaos) -> None:
    """Print what happened."""
    print(f"  jobs {len(chaos.committed)}, claims {chaos.counts.pop('claims', 0)}")
    print(f"  commit to claim: {percentiles(chaos.delays)} ({chaos.slowest[1]})")
    print("  " + ", ".join(f"{name} {number}" for name, number in sorted(chaos.counts.items())))
    for fault in chaos.faults[:10]:
        print(f"  FAULT {fault}")
    if len(chaos.faults) > 10:
        print(f"  … and {len(chaos.faults) - 10} more")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=str(__doc__).partition("\n\n")[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="how long jobs are enqueued (20; with --all-sabotages 10 each)")
    length.add_argument("--minutes", type=float, help="the same in minutes")
    parser.add_argument("--seed", type=int, help="of every actor's random numbers; the order of events still varies")
    parser.add_argument("--workers", type=int, default=4, help="workers; all but the first die now and then (4)")
    parser.add_argument("--rate", type=float, default=8.0, help="transactions a second of each of the ten enqueuers (8)")
    parser.add_argument("--dsn", help="a database to use, in a schema of its own; default: a temporary server")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="break one rule: the run must fail")
    parser.add_argument("--all-sabotages", action="store_true", help="break each rule in turn: every run must fail")
    found = parser.parse_args()
    if found.workers < 2:
        parser.error("--workers: at least 2, or nobody rescues")
    return found


def main() -> int:
    """Run as asked; the exit status."""
    options = arguments()
    seconds = 60 * options.minutes if options.minutes else options.seconds
    seed = secrets.randbits(32) if options.seed is None else options.seed
    names = list(SABOTAGES) if options.all_sabotages else [options.sabotage]
    seconds = seconds or (SABOTAGE_SECONDS if options.all_sabotages else 20.0)
    good = True
    with database(options.dsn) as dsn:
        for name in names:
            sabotage = Sabotage("none") if name is None else SABOTAGES[name]
            broken = "" if name is None else f", sabotage {name}: NOT {sabotage.rule}"
            print(f"chaos: {seconds:g} s, {options.workers} workers, seed {seed}{broken}")
            chaos = asyncio.run(run(dsn, seconds, seed, options.workers, options.rate, sabotage))
            report(chaos)
            held = not chaos.faults
            if name is None:
                print("every check held" if held else f"FAILED: {len(chaos.faults)} faults")
            else:
                print(f"sabotage {name}: " + ("NOT CAUGHT" if held else "caught"))
            good = good and held == (name is None)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
