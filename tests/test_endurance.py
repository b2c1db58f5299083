"""What must not grow: tasks, threads, connections, objects, over many starts, many broken jobs and many jobs."""

import asyncio
import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from pydantic import BaseModel

from aioqueue import AioQueue, JobTransaction, LimitSettings, PoolSettings
from aioqueue.events import Event, JobRecorded, ListenerConnected
from aioqueue.running import RunningWorker
from tests.kit import PATIENCE, Seen, end_time, session, until, until_true
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture
async def watcher(database: Database, schema: str) -> AsyncIterator[Session]:
    """As the superuser, who sees what other sessions do."""
    async with session(database.dsn("superuser"), schema) as made:
        yield made


@pytest.fixture
async def shop(database: Database, schema: str) -> AsyncIterator[Session]:
    """A table of the user's own."""
    async with session(database.dsn("owner"), schema) as made:
        await made.rows("CREATE SCHEMA shop")
        await made.rows("CREATE TABLE shop.note (body text)")
        await made.rows("GRANT USAGE ON SCHEMA shop TO aioqueue_worker")
        await made.rows("GRANT ALL ON ALL TABLES IN SCHEMA shop TO aioqueue_worker")
        yield made
        await made.rows("DROP SCHEMA shop CASCADE")


def threads() -> set[str]:
    """The threads of this process, those apart that asyncio keeps for blocking calls."""
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


def open_files() -> int:
    return len(os.listdir(OPEN_FILES)) if OPEN_FILES.is_dir() else 0


# -- starts and stops ----------------------------------------------------------------------------------------------------


async def test_60_starts_and_stops_leave_no_task_thread_or_connection(worker_dsn: str, schema: str, watcher: Session) -> None:
    seen = Seen()
    app = AioQueue(worker_dsn, schema=schema, observers=[seen])
    ran: list[int] = []

    @app.task(name="thread")
    def in_thread(n: int) -> None:
        ran.append(n)

    async def idle() -> None:
        async with app.worker():
            await seen.wait(ListenerConnected)

    async def busy(n: int) -> None:
        async with app:
            await in_thread.enqueue(n)
            async with app.worker(drain=True) as worker:
                await worker.wait()

    threads_before = threads()
    await busy(-1)  # what is made once is made now
    gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'aioqueue')"
    await until(watcher, gone)
    before = asyncio.all_tasks(), open_files()
    for n in range(60):
        seen.events.clear()
        match n % 4:
            case 0:
                await busy(n)
            case 1:
                async with app:  # two workers, one after the other, of one app
                    await idle()
                    async with app.worker():
                        pass
            case _:
                await idle()
        assert asyncio.all_tasks() == before[0]
        await until_true(lambda: threads() <= threads_before)  # a job's thread ends by itself, a moment after its worker
    await until(watcher, gone)
    assert open_files() <= before[1]
    assert ran == [-1, *range(0, 60, 4)]
    assert await watcher.rows("SELECT id FROM aioqueue.worker") == [], "a worker that left nothing leaves no row"


# -- transactions that are cut off ---------------------------------------------------------------------------------------


async def test_300_broken_transactions_use_few_connections_and_clean_up(
    worker_dsn: str, schema: str, shop: Session, watcher: Session
) -> None:
    """Each is cut off where it is known to stand, and by its time limit once that is let be over: no time decides."""
    app = AioQueue(worker_dsn, schema=schema, pool=PoolSettings(size=3), limits=LimitSettings(transaction_wait=PATIENCE))
    pids: Counter[int] = Counter()
    cleaned_up: list[int] = []
    inside: asyncio.Queue[tuple[UUID, int, int]] = asyncio.Queue()

    async def work(tx: JobTransaction, n: int) -> None:
        pid = tx.connection.info.backend_pid
        pids[pid] += 1
        await tx.execute("INSERT INTO shop.note VALUES ('cut off')")
        try:
            match n % 6:
                case 0:
                    raise ValueError("no")
                case 1:
                    await tx.execute("SELECT 1 / 0")
                case 2 | 4:
                    inside.put_nowait((tx.job_id, pid, n % 6))
                    await tx.execute("SELECT pg_sleep(1000)")
                case 3 | 5:
                    inside.put_nowait((tx.job_id, pid, n % 6))
                    await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.001)
            cleaned_up.append(n)

    async def cut_off(worker: RunningWorker) -> None:
        while True:
            job_id, pid, case = await inside.get()
            if case in (2, 4):
                # A cancellation that reaches the server before the query does is lost, and the connection is closed.
                await until(watcher, "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s", pid)
            if case in (2, 3):
                end_time(worker, job_id)
            else:
                await app.job(job_id).cancel()

    task: Any = app.task(name="work", timeout=PATIENCE)(work)
    async with app, app.worker() as worker:
        cutting = asyncio.create_task(cut_off(worker))
        jobs = [await task.options(tenant=f"tenant {n % 3}", max_attempts=1).enqueue(n) for n in range(300)]
        ends = await asyncio.gather(*(job.result(2 * PATIENCE) for job in jobs), return_exceptions=True)
        cutting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cutting
    assert sorted(cleaned_up) == list(range(300))
    states = dict(await watcher.rows("SELECT state, count(*) FROM aioqueue.outcome GROUP BY 1"))
    assert states == {"dead": 200, "cancelled": 100}, Counter(map(type, ends))
    reasons = dict(await watcher.rows("SELECT reason, count(*) FROM aioqueue.attempt GROUP BY 1"))
    assert reasons == {"error": 100, "time limit": 100, "cancelled": 100}
    assert await shop.rows("SELECT body FROM shop.note") == []
    assert sum(pids.values()) == 300
    assert len(pids) <= 20, "a connection that is cut off serves on"


# -- many jobs -----------------------------------------------------------------------------------------------------------


class Order(BaseModel):
    text: str


class Big(Exception):
    pass


class Recorded:
    """An observer that counts and keeps nothing."""

    def __init__(self) -> None:
        self.number = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobRecorded):
            self.number += 1
            if self.number == self._wanted:
                self._reached.set()

    async def wait(self, number: int) -> None:
        """Wait until so many jobs were recorded since the start."""
        self._wanted = number
        self._reached.clear()
        async with asyncio.timeout(PATIENCE):
            if self.number < number:
                await self._reached.wait()


def objects() -> Counter[str]:
    """The living objects of the library's types and of the test's, by type."""
    for _ in range(3):
        gc.collect()
    kinds = [type(found) for found in gc.get_objects()]
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if str(kind.__module__).startswith("aioqueue") or issubclass(kind, Order | Big | asyncio.Task | psycopg.Error)
    )


def of_jobs(found: Counter[str]) -> list[str]:
    """Those types of which nothing is left of a job that has ended."""
    return [name for name in found if name.endswith((".Order", ".Big", ".Run", ".Claimed", ".Pending"))]


async def settled() -> None:
    """Let the last tasks of jobs end: they are done once the loop came round."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["20,000 small ones", "250 large ones that fail"])
async def test_many_jobs_leave_nothing_in_memory(worker_dsn: str, schema: str, kind: str) -> None:
    recorded = Recorded()
    app = AioQueue(worker_dsn, schema=schema, observers=[recorded], log_events=False)  # pytest keeps what is logged

    @app.task(name="small")
    async def small(n: int) -> int:
        return n

    @app.task(name="large")
    async def large(order: Order) -> None:
        raise Big(order.text, order)

    async def run(number: int) -> None:
        before = recorded.number
        if kind.startswith("20,000"):
            for start in range(0, number, 1000):
                await small.enqueue_many([(n,) for n in range(start, start + 1000)])
        else:
            for _ in range(0, number, 50):
                await large.options(max_attempts=1).enqueue_many([Order(text="x" * 200_000)] * 50)
        await recorded.wait(before + number)
        await settled()

    first, rest = (5_000, 15_000) if kind.startswith("20,000") else (50, 200)
    async with app, app.worker() as worker:
        assert worker._worker is not None
        runner = worker._worker._steps.runner
        await run(first)
        assert not runner.runs
        tasks, before = len(asyncio.all_tasks()), objects()
        await run(rest)
        assert not runner.runs
        assert not worker._worker._steps.recorder.pending
        more: Counter[str] = Counter()

        def settled_down() -> bool:
            nonlocal more
            more = objects() - before
            return len(asyncio.all_tasks()) <= tasks and sum(more.values()) < 50 and not of_jobs(more)

        # A beat or a tick may be under way at one of the two moments, with a task of its own, and on a slow machine for a while.
        with contextlib.suppress(TimeoutError):
            await until_true(settled_down)
        assert settled_down(), more
