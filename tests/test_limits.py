"""Limits, weights and pauses as a user has them: over the API, with workers that run, never above a limit at any moment."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from psycopg import AsyncConnection

from aioqueue import AioQueue, InvalidOption, JobContext, JobTransaction, TaskDefinitionError, TenantStatus
from aioqueue.sql import as_sql
from aioqueue.store import Store
from tests.kit import MakeApp, until_true
from tests.postgres import Database
from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio
PATIENCE = 60

RUNNING = """
SELECT j.tenant, j.task, j.key FROM aioqueue.live l JOIN aioqueue.job j ON j.id = l.job_id WHERE l.worker IS NOT NULL
"""


class Watcher:
    """Looks at what runs, again and again, each time in one snapshot of its own."""

    def __init__(self, conn: AsyncConnection[tuple[object, ...]], schema: str) -> None:
        self.conn = conn
        self.schema = schema
        self.looks = 0
        self.most: Counter[tuple[object, ...]] = Counter()

    async def rows(self, statement: str) -> list[tuple[object, ...]]:
        return await (await self.conn.execute(as_sql(statement, self.schema))).fetchall()

    async def holds(self, condition: str) -> bool:
        return await self.rows(condition) == [(True,)]

    async def look(self) -> None:
        rows = await self.rows(RUNNING)
        self.looks += 1
        found: Counter[tuple[object, ...]] = Counter()
        for tenant, task, key in rows:
            found.update([("tenant", tenant), ("task", task), ("key", task, key)])
        for name, number in found.items():
            self.most[name] = max(self.most[name], number)

    async def run(self) -> None:
        while True:
            await self.look()


@pytest.fixture
async def watcher(database: Database, schema: str) -> AsyncIterator[Watcher]:
    async with await AsyncConnection.connect(database.dsn("owner"), autocommit=True) as conn:
        yield Watcher(conn, schema)


@asynccontextmanager
async def watched(watcher: Watcher) -> AsyncIterator[None]:
    task = asyncio.create_task(watcher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(watcher: Watcher, rows: str, number: int) -> None:
    """Wait until there are so many."""
    await until_true(lambda: watcher.holds(f"SELECT count(*) = {number} FROM aioqueue.{rows}"))


async def all_done(watcher: Watcher, number: int, state: str = "succeeded") -> None:
    """Wait until so many jobs have ended."""
    await until(watcher, f"outcome WHERE state = '{state}'", number)


async def test_limits_hold_over_workers_and_nothing_stays_parked(make_app: MakeApp, watcher: Watcher) -> None:
    """Two workers; a tenant, a task and keys limited, most jobs by two or three at once; tasks with and without a transaction."""
    app = make_app()

    @app.task(name="own", max_running=5, max_running_per_key=2)
    async def own(tx: JobTransaction, n: int) -> int:
        return n

    @app.task(name="free", max_running_per_key=1)
    async def free(ctx: JobContext, n: int) -> int:
        await asyncio.sleep(0.002)
        return n

    async with app:
        await app.set_tenant("A", max_running=3)
        for n in range(120):
            task = own if n % 2 else free
            await task.options(tenant="AB"[n // 2 % 2], key=f"k{n % 6}").enqueue(n)
        async with watched(watcher), app.worker(concurrency=20), app.worker(concurrency=20):
            await all_done(watcher, 120)
        tenants = await app.list_tenants()
    assert watcher.most["tenant", "A"] <= 3
    assert watcher.most["task", "own"] <= 5
    assert all(number <= (2 if name[1] == "own" else 1) for name, number in watcher.most.items() if name[0] == "key" and name[2])
    assert watcher.looks > 10 and watcher.most["tenant", "B"] > 0
    for table in ("live", "parked", "held", "scheduled"):
        assert await watcher.rows(f"SELECT count(*) FROM aioqueue.{table}") == [(0,)], table
    assert tenants == [TenantStatus(tenant="A", weight=1, max_running=3, paused=False, running=0, parked=0)]


async def test_pause_and_resume_of_a_tenant_while_it_runs(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()
    inside, goes_on = asyncio.Event(), asyncio.Event()

    @app.task(name="hold")
    async def hold() -> None:
        inside.set()
        await goes_on.wait()

    async with app, app.worker(concurrency=5):
        held = await hold.options(tenant="T").enqueue()
        await inside.wait()
        await app.set_tenant("T", paused=True)
        waiting = [await app.get("add").options(tenant="T").enqueue(n) for n in range(3)]
        others = await app.get("add").options(tenant="U").enqueue(5)
        assert await others.result(PATIENCE) == 6
        goes_on.set()
        await held.result(PATIENCE)
        assert [(await job.status()).state for job in waiting] == ["ready"] * 3
        await app.set_tenant("T", paused=False)
        assert [await job.result(PATIENCE) for job in waiting] == [1, 2, 3]
        assert await app.list_tenants() == []


async def test_pause_and_resume_of_a_queue_while_it_runs(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()
    async with app:
        await app.pause_queue("default")
        jobs = [await app.get("add").enqueue(n) for n in range(3)]
        async with app.worker(queues=["default", "other"]):
            assert await (await app.get("add").options(queue="other").enqueue(1)).result(PATIENCE) == 2
            assert [(await job.status()).state for job in jobs] == ["ready"] * 3
            await app.resume_queue("default")
            assert [await job.result(PATIENCE) for job in jobs] == [1, 2, 3]


async def test_a_suspect_of_a_paused_queue_holds_up_nobody(make_app: MakeApp, watcher: Watcher, schema: str) -> None:
    """A worker would stand still for one that is ready and may not be claimed."""
    app = make_app()
    async with app:
        await app.pause_queue("slow")
        await app.get("add").options(queue="slow").enqueue(1)
        await watcher.rows("UPDATE aioqueue.live SET lane = aioqueue.lane('slow', 9) RETURNING 1")
        async with app.worker(queues=["slow", "default"]):
            for n in range(20):
                assert await (await app.get("add").enqueue(n)).result(PATIENCE) == n + 1
        assert await watcher.rows("SELECT attempt FROM aioqueue.live") == [(0,)]


async def test_a_limit_is_lowered_below_what_runs_raised_and_removed(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()
    running: set[int] = set()
    release: dict[int, asyncio.Event] = {n: asyncio.Event() for n in range(20)}
    started = asyncio.Condition()

    @app.task(name="hold")
    async def hold(n: int) -> None:
        async with started:
            running.add(n)
            started.notify_all()
        await release[n].wait()
        running.discard(n)

    async def runs(number: int) -> None:
        async with asyncio.timeout(PATIENCE), started:
            await started.wait_for(lambda: len(running) == number)

    async with app, app.worker(concurrency=50):
        jobs = [await hold.options(tenant="T").enqueue(n) for n in range(20)]
        await runs(20)
        for event in release.values():
            event.set()
        for job in jobs:
            await job.result(PATIENCE)
        for event in release.values():
            event.clear()
        await app.set_tenant("T", max_running=6)
        jobs = [await hold.options(tenant="T").enqueue(n) for n in range(20)]
        await runs(6)
        await app.set_tenant("T", max_running=2)
        for n in list(running)[:4]:
            release[n].set()
        await until(watcher, "live WHERE worker IS NOT NULL", 2)
        release[next(iter(running))].set()
        await watcher.look()
        assert watcher.most["tenant", "T"] <= 2
        await app.set_tenant("T", max_running=9)
        await runs(9)
        await app.set_tenant("T", max_running=None)
        await runs(20 - 5)
        for event in release.values():
            event.set()
        for job in jobs:
            await job.result(PATIENCE)
    assert await watcher.rows("SELECT count(*) FROM aioqueue.parked") == [(0,)]


async def test_a_new_limit_counts_what_runs(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()
    inside, goes_on = asyncio.Semaphore(0), asyncio.Event()

    @app.task(name="hold")
    async def hold() -> None:
        inside.release()
        await goes_on.wait()

    async with app, app.worker(concurrency=5):
        first = [await hold.options(tenant="T").enqueue() for _ in range(3)]
        for _ in range(3):
            await inside.acquire()
        await app.set_tenant("T", max_running=3)
        later = [await hold.options(tenant="T").enqueue() for _ in range(3)]
        await (await app.get("add").enqueue(1)).result(PATIENCE)
        assert inside.locked() and (await app.list_tenants())[0].running == 3
        goes_on.set()
        for job in first + later:
            await job.result(PATIENCE)


async def test_a_parked_job_is_cancelled_by_its_handle(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()
    async with app:
        await app.set_tenant("T", paused=True)
        job = await app.get("add").options(tenant="T", key="k").enqueue(1)
        async with app.worker():
            await until(watcher, "parked", 1)
            assert (await job.status()).state == "ready"
            assert await job.cancel() == "cancelled"
    assert await watcher.rows("SELECT count(*) FROM aioqueue.parked") == [(0,)]


async def test_a_draining_worker_leaves_nothing_that_it_could_run(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()

    @app.task(name="one", max_running=1)
    async def one(n: int) -> int:
        return n

    async with app:
        await one.enqueue_many([(n,) for n in range(30)])
        async with app.worker(drain=True) as worker:
            async with asyncio.timeout(PATIENCE):
                await worker.wait()
    assert await watcher.rows("SELECT count(*) FROM aioqueue.outcome") == [(30,)]


async def test_jobs_of_one_key_under_a_tenant_at_its_limit_do_not_keep_its_others_waiting(
    make_app: MakeApp, watcher: Watcher
) -> None:
    """Parked under the tenant, they find their key full when they are let go: as many others are tried instead, at once."""
    app = make_app()
    ended: list[str] = []
    printing, others = asyncio.Event(), asyncio.Event()

    @app.task(name="print", max_running_per_key=1)
    async def print_(ctx: JobContext) -> None:
        printing.set()
        await others.wait()

    @app.task(name="other")
    async def other(n: int) -> None:
        ended.append("other")
        if len(ended) == 5:
            others.set()

    async with app:
        await app.set_tenant("T", paused=True, max_running=2)
        await print_.options(tenant="T", key="p").enqueue_many([()] * 40)
        await other.options(tenant="T").enqueue_many([(n,) for n in range(5)])
        async with app.worker(concurrency=10):
            await until(watcher, "parked", 45)
            await app.set_tenant("T", paused=False)
            await printing.wait()
            async with asyncio.timeout(PATIENCE):
                await others.wait()
            await all_done(watcher, 45)


async def test_weights_share_a_queue(make_app: MakeApp, watcher: Watcher) -> None:
    app = make_app()
    order: list[str] = []

    @app.task(name="note")
    async def note(ctx: JobContext) -> None:
        order.append(str(ctx.tenant))

    async with app:
        await note.options(tenant="a").enqueue_many([()] * 60)
        await note.options(tenant="b").enqueue_many([()] * 60)
        await app.set_tenant("a", weight=3)
        async with app.worker(concurrency=1):
            await all_done(watcher, 120)
        assert [tenant.weight for tenant in await app.list_tenants()] == [3]
    assert 27 <= order[:40].count("a") <= 33


async def test_what_cannot_be_is_refused(make_app: MakeApp) -> None:
    app: Any = make_app()
    wrong = {"weight": (0, 101, "3"), "max_running": (0, True, 1.5, "3"), "paused": (1, None)}
    async with app:
        for option, values in wrong.items():
            for value in values:
                with pytest.raises(InvalidOption, match=option):
                    await app.set_tenant("T", **{option: value})
        for name in ("", "x" * 201, None):
            with pytest.raises(InvalidOption, match="tenant"):
                await app.set_tenant(name, paused=True)
            with pytest.raises(InvalidOption, match="queue"):
                await app.pause_queue(name)
        assert await app.list_tenants() == []
    for value in (0, -1, 1.5, True, "3"):
        for option in ("max_running", "max_running_per_key"):
            with pytest.raises(TaskDefinitionError, match=option):
                app.task(name="wrong", **{option: value})(test_what_cannot_be_is_refused)
    with pytest.raises(InvalidOption, match="key"):
        app.get("add").options(key="")


async def test_a_key_by_name_and_in_a_batch(make_app: MakeApp, watcher: Watcher) -> None:
    app: AioQueue = make_app()
    async with app:
        await app.enqueue_by_name("add", {"a": 1}, key="by name")
        await app.get("add").options(key="many").enqueue_many([(1,), (2,)])
    assert await watcher.rows("SELECT key FROM aioqueue.job ORDER BY 1") == [("by name",), ("many",), ("many",)]


async def test_what_a_process_that_died_has_left_is_swept_at_the_next_start(
    make_app: MakeApp, watcher: Watcher, worker_dsn: str, schema: str
) -> None:
    app = make_app()
    async with app, await AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
        await app.set_tenant("T", max_running=1)
        jobs = await app.get("add").options(tenant="T").enqueue_many([(1,), (2,)])
        gone = Session(conn, Store(schema))
        worker = await gone.register()
        (first,) = await gone.claim(worker)
        await gone.record(worker, entry(first, r=7))
        assert len(await gone.parked()) == 1
        async with app.worker():
            assert await jobs[1].result(PATIENCE) == 3


async def test_virtual_time_goes_past_what_is_parked(make_app: MakeApp, watcher: Watcher) -> None:
    """Otherwise no floor could, and each claim would walk over their dead rows."""
    app = make_app()
    async with app:
        await app.set_tenant("T", paused=True)
        await app.get("add").options(tenant="T").enqueue_many([(n,) for n in range(50)])
        async with app.worker():
            await until(watcher, "parked", 50)
            come = "SELECT aioqueue.virtual_time(aioqueue.lane('default', 0)) >= 50000"
            await until_true(lambda: watcher.holds(come))
            job = await app.get("add").options(tenant="U").enqueue(1)
            assert await job.result(PATIENCE) == 2


async def test_a_killed_workers_limit_is_free_after_its_lease(
    make_app: MakeApp, watcher: Watcher, worker_dsn: str, schema: str
) -> None:
    app = make_app()
    async with app, await AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
        await app.set_tenant("T", max_running=1)
        jobs = await app.get("add").options(tenant="T").enqueue_many([(1,), (2,)])
        gone = Session(conn, Store(schema))
        assert len(await gone.claim(await gone.register())) == 1
        async with watched(watcher), app.worker():
            await (await app.get("add").enqueue(1)).result(PATIENCE)
            await watcher.look()
            await watcher.rows("UPDATE aioqueue.worker SET lease_until = '2020-01-01Z' WHERE host = 'host' RETURNING 1")
            assert [await job.result(PATIENCE) for job in jobs] == [2, 3]
    assert watcher.most["tenant", "T"] == 1
