"""The promises behind a pooler: both or neither, one owner, once in the database, killed workers, limits, its own outages."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg import AsyncConnection

from aioqueue import (
    AioQueue,
    InvalidPayload,
    JobCancelled,
    JobContext,
    JobFailed,
    JobNotFound,
    JobState,
    JobTransaction,
    LimitSettings,
    Retry,
    Snooze,
    migrate,
)
from aioqueue.events import JobRecorded
from aioqueue.settings import PoolSettings, WorkerSettings
from aioqueue.states import JobEnded, ProgressChanged
from aioqueue.store import Store
from benchmarks.pgbouncer import PROGRAM, PgBouncer, pgbouncer
from tests.flow.processes import ROOT, TABLES, Flow
from tests.kit import PATIENCE, MakeApp, Seen, session, until
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

CLIENTS = 4
QUICK = WorkerSettings(poll=0.05, tick=0.05)


@pytest.fixture
async def flow(database: Database, pooled_dsn: str, schema: str) -> AsyncIterator[Flow]:
    """Tables that tasks write to, and worker processes behind the pooler."""
    conn = await AsyncConnection.connect(database.dsn("owner"), autocommit=True)
    flow = Flow(Session(conn, Store(schema)), pooled_dsn, schema)
    try:
        await conn.execute(TABLES)
        yield flow
    finally:
        flow.close()
        await conn.execute("DROP SCHEMA flow CASCADE")
        await conn.close()


async def test_an_enqueue_in_parts_is_one_transaction(make_pooled: MakeApp, flow: Flow) -> None:
    async with make_pooled() as app:

        @app.task
        async def count(number: int) -> None: ...

        with pytest.raises(InvalidPayload, match="number 2400"):
            await count.enqueue_many([{"number": "x" if n == 2_400 else n} for n in range(2_500)])
        assert await flow.owner.rows("SELECT 1 FROM aioqueue.job") == []
        jobs = await count.enqueue_many([{"number": n} for n in range(2_500)])
    assert await flow.owner.rows("SELECT job_id FROM aioqueue.live ORDER BY vt") == [(job.id,) for job in jobs]


async def test_jobs_of_every_kind(make_pooled: MakeApp, seen: Seen) -> None:
    app = make_pooled(worker=QUICK)
    tenants: list[tuple[str, str]] = []

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def own(tx: JobTransaction, number: int) -> int:
        tenants.append((tx.tenant or "", str(await tx.fetch_value("SELECT current_setting('app.tenant')"))))
        if number % 10 == 9:
            raise RuntimeError("no")
        if number % 10 == 8 and tx.attempt == 1:
            raise Snooze(0.01)
        return number

    @app.task
    async def short(ctx: JobContext, number: int) -> int:
        async with ctx.transaction() as tx:
            tenants.append((ctx.tenant or "", str(await tx.fetch_value("SELECT current_setting('app.tenant')"))))
        return number

    @app.task
    def plain(number: int) -> int:
        return number

    async with app, app.worker():
        jobs: list[Any] = []
        for number in range(100):
            tenant = str(number % 7)
            jobs += [
                await own.options(tenant=tenant).enqueue(number=number),
                await short.options(tenant=tenant, delay=timedelta(seconds=0.05)).enqueue(number=number),
                await plain.enqueue(number=number),
            ]
        results = await asyncio.gather(*(job.result(timeout=PATIENCE) for job in jobs), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert (len(failed), {type(error) for error in failed}) == (10, {JobFailed})
    assert all(said == tenant for tenant, said in tenants)
    assert len(tenants) == 100 + 10 + 10 + 100  # once more for each that failed, and that snoozed
    assert len(seen.all(JobRecorded, state="succeeded")) == 290


async def test_progress_is_seen_by_who_watches_and_who_asks(make_pooled: MakeApp) -> None:
    """Through the pooler nobody is told of it: it is found by looking."""
    app = make_pooled(worker=QUICK)
    goes_on = asyncio.Event()

    @app.task
    async def own(tx: JobTransaction) -> int:
        await tx.progress(0.25, "inside")
        await goes_on.wait()
        return 7

    async with app, app.worker():
        job = await own.options(tenant="7").enqueue()
        told: list[object] = []
        async with asyncio.timeout(PATIENCE):
            async for event in job.watch():
                told.append(event)
                if isinstance(event, ProgressChanged):
                    assert (event.progress.value, event.progress.message) == (0.25, "inside")
                    assert await job.progress() == event.progress
                    goes_on.set()
        assert [type(event) for event in told][-2:] == [ProgressChanged, JobEnded]
        assert await job.result() == 7


@pytest.mark.parametrize("commits", [True, False])
async def test_a_job_exists_exactly_if_its_transaction_commits(make_pooled: MakeApp, pooled_dsn: str, commits: bool) -> None:
    app = make_pooled(worker=QUICK)

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async with app, app.worker(), await AsyncConnection.connect(pooled_dsn, prepare_threshold=None) as conn:
        job = await double.options(on=conn).enqueue(number=21)
        if commits:
            await conn.commit()
            assert await job.result(timeout=PATIENCE) == 42
        else:
            await conn.rollback()
            with pytest.raises(JobNotFound):
                await app.job(job.id).status()


async def test_cancel_retry_and_status(make_pooled: MakeApp) -> None:
    app = make_pooled(worker=QUICK)
    began = asyncio.Event()

    @app.task
    async def forever(tx: JobTransaction) -> None:
        began.set()
        await tx.execute("SELECT pg_sleep(600)")

    async with app, app.worker():
        job = await forever.options(tenant="7").enqueue()
        async with asyncio.timeout(PATIENCE):
            await began.wait()
        assert (await job.status()).state is JobState.RUNNING
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result(timeout=PATIENCE)
        waiting = await forever.options(tenant="7", delay=timedelta(hours=1)).enqueue()
        await waiting.cancel()
        assert (await waiting.status()).state is JobState.CANCELLED


async def test_a_job_at_its_time_limit_commits_nothing_and_leaves_no_lock(
    make_pooled: MakeApp, flow: Flow, database: Database, schema: str
) -> None:
    app = make_pooled(worker=QUICK, limits=LimitSettings(rollback=0.2))
    row = flow.owner

    @app.task(timeout=0.3, retry=Retry(max_attempts=1))
    async def slow(tx: JobTransaction) -> None:
        await tx.execute("INSERT INTO flow.counted (job_id) VALUES (%s)", (tx.job_id,))
        # A statement of the server that no cancellation reaches, so that the connection is shut.
        await tx.execute("DO $$ BEGIN PERFORM pg_sleep(1.5); EXCEPTION WHEN query_canceled THEN PERFORM pg_sleep(1.5); END $$")

    async with app, app.worker():
        job = await slow.enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=PATIENCE)
    async with session(database.dsn("superuser"), schema) as boss:
        await until(boss, "SELECT NOT EXISTS (SELECT FROM pg_locks WHERE relation = 'flow.counted'::regclass)")
    assert await row.rows("SELECT * FROM flow.counted") == []


async def test_jobs_of_a_killed_worker_run_once_more_and_what_they_wrote_is_there_once(flow: Flow) -> None:
    first = await flow.start(poll=0.05)
    held = await flow.enqueue("hold", 6)
    await flow.until_started(6)
    counted = await flow.enqueue("counted", 200)
    await flow.until("count(*) > 20 FROM flow.counted")
    first.kill()
    await flow.start(poll=0.05)
    await flow.start(poll=0.05)
    await flow.until_started(12)
    flow.gate.open()
    await flow.until_ended([*held, *counted])
    assert await flow.starts() == {job: [1, 2] for job in held}
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    rows = await flow.owner.rows("SELECT count(*), count(DISTINCT job_id) FROM flow.counted")
    assert rows == [(200, 200)]


async def test_a_worker_that_stood_still_changes_nothing_when_it_goes_on(flow: Flow) -> None:
    first = await flow.start(poll=0.05)
    jobs = await flow.enqueue("hold", 3)
    await flow.until_started(3)
    first.signal(signal.SIGSTOP)
    await flow.start(poll=0.05)
    await flow.until_started(6)
    first.signal(signal.SIGCONT)
    flow.gate.open()
    await flow.until_ended(jobs)
    assert await flow.outcomes() == dict.fromkeys(jobs, ("succeeded", 2))


async def test_a_limit_of_running_jobs_holds(make_pooled: MakeApp, seen: Seen) -> None:
    workers = [make_pooled(worker=QUICK) for _ in range(3)]
    running, most = 0, 0

    async def one() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    tasks = [app.task(name="one", max_running=2)(one) for app in workers]
    async with workers[0], workers[0].worker(), workers[1].worker(), workers[2].worker():
        jobs = await tasks[0].enqueue_many([{}] * 60)
        await asyncio.gather(*(job.result(timeout=PATIENCE) for job in jobs))
    assert most == 2


async def test_the_pooler_is_killed_and_comes_back(flow: Flow, worker_dsn: str) -> None:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(worker_dsn) as pooler:
        flow.dsn = pooler.dsn(worker_dsn)
        await flow.start(poll=0.05, lease=5.0)
        jobs = await flow.enqueue("counted", 300)
        for _ in range(3):
            done = await flow.value("count(*) FROM flow.counted")
            await flow.until("count(*) > %s FROM flow.counted", min(done + 20, 290))
            pooler.restart(worker_dsn)
        await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    assert await flow.owner.rows("SELECT count(*), count(DISTINCT job_id) FROM flow.counted") == [(300, 300)]


async def test_many_clients_on_two_connections_of_the_server(worker_dsn: str, schema: str) -> None:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(worker_dsn, default_pool_size=2, server_round_robin=1) as pooler:
        dsn = pooler.dsn(worker_dsn)
        apps = [AioQueue(dsn, schema=schema, worker=QUICK, pool=PoolSettings(size=5)) for _ in range(4)]

        async def half(tx: JobTransaction, number: int) -> int:
            return int(await tx.fetch_value("SELECT %s / 2", [number]))

        tasks = [app.task(name="half")(half) for app in apps]

        async def client(number: int) -> int:
            task = tasks[number % len(apps)]
            job = await task.options(tenant=str(number % 5)).enqueue(number=number)
            await job.status()
            return await job.result(timeout=PATIENCE)

        async with apps[0], apps[1], apps[2], apps[3], apps[0].worker(concurrency=8), apps[1].worker(concurrency=8):
            for first in range(0, 400, 20):
                found = await asyncio.gather(*(client(number) for number in range(first, first + 20)))
                assert found == [number // 2 for number in range(first, first + 20)]


async def test_many_migrate_at_once(fresh_database: Callable[[], Database], schema: str, pooler: PgBouncer) -> None:
    database = fresh_database()
    dsn = pooler.dsn(database.dsn("owner"))
    found = await asyncio.gather(*(migrate.migrate(dsn, schema=schema) for _ in range(CLIENTS)))
    assert sorted(before.version for before in found) == [0] + [migrate.code_version()] * (CLIENTS - 1)
    async with await AsyncConnection.connect(database.dsn("owner")) as conn:
        await migrate.check(conn, schema=schema)


async def test_the_command_line(pooled_dsn: str, worker_dsn: str, schema: str, flow: Flow) -> None:
    # Nobody looks within the hour: the jobs are found by wake-ups.
    worker = await flow.start("--listen-dsn", worker_dsn, poll=3600.0)
    await worker.logged("wake-ups come through listen_dsn")
    for arguments in (["status", "--json"], ["enqueue", "quick", '{"number": 4}', "--wait", "30"], ["job", "list"], ["health"]):
        command = [sys.executable, "-m", "aioqueue", "--dsn", pooled_dsn, "--schema", schema, *arguments]
        done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
