"""What it costs to keep a pooled connection clean: beside a local setting, DISCARD ALL, a pool's reset.

aioqueue's commit records the job's outcome, fenced. The local form beside which its promise stands does the same, by hand: the
same tables, the same fence, one call of the same function. An UPDATE of a table with a single index, printed too, records less:
no result, and not whether the job was still this worker's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.demo.data import make_tables
from aioqueue.job import lane, new_job_id
from aioqueue.settings import PoolSettings, Settings
from aioqueue.store import LOWEST_ID, LaneScan, Store
from aioqueue.transaction import JobTransactions
from benchmarks.kit import median, percentile
from benchmarks.mixed_jobs import NewJob, enqueue_many

from .stage import Place, Stage, Verdict, value

TITLE = "cost of cleaning after each job"
PUBLISHED = "leaking 0.33 ms, local 0.35 ms; DISCARD ALL breaks at job 7; reset without commit: 301 connections for 300 jobs"
WORK = "SELECT cents FROM demo.invoices WHERE id = %s"
DONE = "UPDATE naive.job SET state = 'done' WHERE id = %s"
FINISH = "SELECT aioqueue.finish(%s::bigint, %s::bigint, %s::bigint, %s::uuid, %s::integer, NULL, %s::text::jsonb, '{}')"
"""By hand nothing of the transaction is checked: its settings are none."""
RUN = 50
"""Jobs of one form in a row, as a worker has them; then another form's turn comes. The ratio is the median of all turns' own."""
MOST = 1.10
"""What aioqueue may cost beside a local setting with the same work, and the same outcome recorded by the same commit."""


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    await make_tables(place.dsn("owner"))
    jobs = stage.size(1000, 2000)
    async with place.connection() as boss:
        await boss.execute("INSERT INTO naive.job (work) SELECT 'SELECT 1' FROM generate_series(1, %s::int)", [3 * jobs])
        await boss.execute("VACUUM (ANALYZE)")
        # The disk is the same for all, and no part of what is compared.
        await boss.execute(f"ALTER DATABASE {place.name} SET synchronous_commit = off".encode())
    broken_at = await _discard_all(place)
    connections = await _reset(place)
    await _side_by_side(place, verdict, jobs, broken_at, connections)
    verdict.published(broken_at == 7, "DISCARD ALL breaks prepared statements at job 7")
    verdict.published(connections == 301, "a reset without commit makes 301 connections for 300 jobs")
    return verdict


async def _discard_all(place: Place) -> int | None:
    """The job at which prepared statements break; None: they do not."""
    async with place.connection("worker") as conn:
        for number in range(1, 51):
            try:
                await conn.execute("SELECT set_config('app.tenant', '1', false)")
                await conn.execute(WORK, [1])
                await conn.execute("DISCARD ALL")
            except psycopg.errors.InvalidSqlStatementName:
                return number
    return None


async def _reset(place: Place) -> int:
    """Connections that a pool of one makes for 300 jobs, when its reset leaves a transaction open."""
    pids = set()
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # it says so for each connection

    async def reset(conn: AsyncConnection[Any]) -> None:
        await conn.execute("RESET ALL")

    async with AsyncConnectionPool(place.dsn("worker"), min_size=1, max_size=1, reset=reset, open=False) as pool:
        for _ in range(300):
            async with pool.connection() as conn:
                pids.add(conn.info.backend_pid)
                await conn.execute("SELECT set_config('app.tenant', '1', false)")
        async with pool.connection() as conn:
            pids.add(conn.info.backend_pid)
    return len(pids)


async def _side_by_side(place: Place, verdict: Verdict, jobs: int, broken_at: int | None, connections: int) -> None:
    database = Database(place.dsn("worker"), PoolSettings(size=3))
    store, settings = Store("aioqueue"), Settings()
    transactions = JobTransactions(database, store, settings, hint=lambda kind: None)
    await database.open()
    times: dict[str, list[float]] = {"leaking": [], "local": [], "local, updated": [], "local, finished": [], "aioqueue": []}
    pids: set[int] = set()
    try:
        async with (
            place.connection("worker") as session,
            place.connection("worker") as local,
            place.connection("worker") as updated,
            place.connection("worker") as finished,
        ):
            for conn in (session, local, updated, finished):
                conn.prepare_threshold = 0
            claimed = await _claim(database, store, 2 * jobs)
            pairs = [(n, *claimed[2 * n - 2 : 2 * n]) for n in range(1, jobs + 1)]
            forms: dict[str, Callable[[int, Claimed, Claimed], Awaitable[None]]] = {
                "leaking": lambda n, job, by_hand: _leaking(session, n),
                "local": lambda n, job, by_hand: _local(local, n),
                "local, updated": lambda n, job, by_hand: _local(updated, n, DONE, [n]),
                "local, finished": lambda n, job, by_hand: _local(finished, n, FINISH, [*by_hand.fence, "null"]),
                "aioqueue": lambda n, job, by_hand: _ours(transactions, job, n, pids),
            }
            for start in range(0, jobs, RUN):
                for name in sorted(forms, key=lambda name: hash((name, start))):
                    for pair in pairs[start : start + RUN]:
                        began = time.perf_counter()
                        await forms[name](*pair)
                        times[name].append(time.perf_counter() - began)
        async with database.runtime() as conn:
            prepared = await value(conn, "SELECT count(*) FROM pg_prepared_statements")
    finally:
        await database.close()
    cost = {name: 1000 * percentile(found[jobs // 10 :], 0.25) for name, found in times.items()}
    runs = [slice(start, start + RUN) for start in range(jobs // 10, jobs, RUN)]
    ratio = median([median(times["aioqueue"][run]) / median(times["local, finished"][run]) for run in runs])
    verdict.naive = (
        f"leaking {cost['leaking']:.2f} ms, local {cost['local']:.2f} ms, with an UPDATE {cost['local, updated']:.2f} ms, with "
        f"the same outcome recorded {cost['local, finished']:.2f} ms; DISCARD ALL breaks at job {broken_at}; "
        f"reset: {connections} connections for 300 jobs"
    )
    verdict.ours = (
        f"{cost['aioqueue']:.2f} ms, {ratio:.2f} of local with the same outcome, {cost['aioqueue'] / cost['local, updated']:.2f} "
        f"of local with an UPDATE; {len(pids)} connection for {jobs} jobs"
    )
    verdict.promise(ratio <= MOST, f"within {MOST:.2f} of the local form that records the same: {ratio:.2f}")
    verdict.promise(len(pids) == 1, f"one connection: {len(pids)}")
    verdict.promise(prepared > 0, "prepared statements are alive")


async def _claim(database: Database, store: Store, jobs: int) -> list[Claimed]:
    async with database.runtime() as conn:
        await store.register_worker(
            conn, worker=1, host="published", pid=1, version="1", queues=["default"], concurrency=1, lease=3600.0, tasks=[]
        )
        new = [
            NewJob(id=new_job_id(), task="cost", payload="{}", queue="default", priority=0, tenant="1", max_attempts=1)
            for _ in range(jobs)
        ]
        await enqueue_many(store, conn, new)
        scan = LaneScan(lane("default", 0), (0, LOWEST_ID), jobs)
        found: list[Claimed] = []
        while len(found) < jobs:
            found += (await store.claim(conn, worker=1, lanes=[scan], limit=min(500, jobs - len(found)))).jobs
        return found


async def _leaking(conn: AsyncConnection[Any], number: int) -> None:
    await conn.execute("SELECT set_config('app.tenant', '1', false)")
    await conn.execute(WORK, [number])


async def _local(conn: AsyncConnection[Any], number: int, done: LiteralString = "", values: Sequence[object] = ()) -> None:
    async with conn.transaction():
        await conn.execute("SELECT set_config('app.tenant', '1', true)")
        await conn.execute(WORK, [number])
        if done:
            await conn.execute(done, values)


async def _ours(transactions: JobTransactions, job: Claimed, number: int, pids: set[int]) -> None:
    async with transactions.own(job, 30.0) as opened:
        await opened.face.execute(WORK, [number])
        pids.add(opened.face.connection.info.backend_pid)
        await opened.finish("null")
