"""One run of the engine: everything that can go wrong around claims and floors, then the books must balance.

Late and out-of-order commits, rollbacks, killed sessions, dead workers that come back, claims that race with rescue, retries,
cancels, an XID held all the time; several queues, priorities and tenants. The fallback look below the floors is off.
"""

from __future__ import annotations

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
from benchmarks.chaos_harness.sabotage import Sabotage, install

from .actors import Canceller, Enqueuer
from .model import Chaos, judge, percentiles
from .mortal import MortalWorker
from .worker import ChaosWorker

STALLED = 15.0
"""Seconds without a new end and with nothing that waits for its time, after which what is left counts as lost."""


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


async def run(dsn: str, seconds: float, seed: int, workers: int, rate: float, sabotage: Sabotage | None = None) -> Chaos:
    """One run; its faults are empty when every check held. With a sabotage it ends at the first."""
    broken = sabotage or Sabotage("nothing")
    async with scratch(dsn) as store:
        chaos = Chaos(dsn, store, seconds, seed, broken.floor, narrow=broken.narrow, sabotaged=sabotage is not None)
        async with await chaos.connect() as watcher, await chaos.connect() as holder:
            await install(watcher, store.schema, broken)
            await holder.execute("SET idle_in_transaction_session_timeout = 0")
            await holder.execute("BEGIN")
            await holder.execute("SELECT pg_current_xact_id()")
            try:
                await act(chaos, watcher, workers, rate)
            except* psycopg.Error as errors:
                for error in errors.exceptions:
                    chaos.fault(f"an operation was refused: {error!r}".replace("\n", " "))
            else:
                if not chaos.caught:
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
    while not chaos.caught and await chaos.store.rescue(watcher, worker=0, limit=1000) is not None:
        pass


async def wait_ended(chaos: Chaos, watcher: AsyncConnection[TupleRow]) -> None:
    """Wait until every committed job has ended, or nothing has ended for a while."""
    best, since = -1, time.monotonic()
    while best < len(chaos.committed) and not chaos.caught:
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
