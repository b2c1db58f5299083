"""Cancellation from outside, and what else ends a job before its time: each has a state of its own, and the job's clean-up runs.

Between a request and its effect stand a row, a hint and a tick; here all of it runs, with real workers.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aioqueue import (
    AioQueue,
    JobCancelled,
    JobContext,
    JobFailed,
    JobState,
    JobTransaction,
    LimitSettings,
    PoolSettings,
    Retry,
    Snooze,
    WorkerSettings,
)
from aioqueue.attempt import Cause
from aioqueue.events import JobRecorded, WorkerStopping
from aioqueue.outcome import Cancelled
from tests.kit import PATIENCE, Bench, MakeApp, Seen, bench, end_time, passed, session, until, until_true
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

LATER = Retry(base=3600, jitter=False)


@pytest.fixture
async def guest(make_app: MakeApp, client_dsn: str) -> AsyncIterator[AioQueue]:
    """Another app, without the tasks, as the client role."""
    async with make_app(client_dsn) as opened:
        yield opened


@pytest.fixture
async def shop(boss: Session) -> AsyncIterator[Session]:
    """A table of the user's own."""
    await boss.rows("CREATE SCHEMA shop")
    await boss.rows("CREATE TABLE shop.note (body text)")
    await boss.rows("GRANT USAGE ON SCHEMA shop TO aioqueue_worker")
    await boss.rows("GRANT ALL ON ALL TABLES IN SCHEMA shop TO aioqueue_worker")
    yield boss
    await boss.rows("DROP SCHEMA shop CASCADE")


@pytest.fixture
async def watcher(database: Database, schema: str) -> AsyncIterator[Session]:
    """As the superuser, who sees what other sessions do."""
    async with session(database.dsn("superuser"), schema) as made:
        yield made


@pytest.fixture
async def at(boss: Session, worker_dsn: str) -> AsyncIterator[Bench]:
    async with bench(worker_dsn, boss, AioQueue(), pool=PoolSettings(size=3)) as made:
        yield made


class Slow:
    """A task `slow` that stays inside until it is ended; `ends` says how each run ended and what its clean-up came to."""

    def __init__(self, app: AioQueue, how: str = "nothing", **options: Any) -> None:
        self.inside, self.goes_on = asyncio.Event(), asyncio.Event()
        self.ends: list[str] = []
        self.loop = asyncio.get_running_loop()

        async def wait() -> str:
            self.inside.set()
            try:
                await self.goes_on.wait()
            except asyncio.CancelledError:
                self.ends.append("cancelled")
                raise
            finally:
                await asyncio.sleep(0.01)
                self.ends.append("cleaned up")
            return "done"

        async def nothing(ctx: JobContext) -> str:
            return await wait()

        async def own_transaction(tx: JobTransaction) -> str:
            return await wait()

        async def short_transaction(ctx: JobContext) -> str:
            async with ctx.transaction():
                return await wait()

        every: dict[str, Any] = {"nothing": nothing, "own transaction": own_transaction, "short transaction": short_transaction}
        self.task: Any = app.task(name="slow", **options)(every[how])


HOLDS = ("nothing", "own transaction", "short transaction")


# -- a job that waits ----------------------------------------------------------------------------------------------------


async def test_a_waiting_job_is_cancelled_at_once_and_never_runs(app: AioQueue, guest: AioQueue, boss: Session) -> None:
    slow = Slow(app)
    job = await slow.task.enqueue()
    assert await guest.job(job.id).cancel() is JobState.CANCELLED
    with pytest.raises(JobCancelled):
        await job.result(30)
    async with app.worker(drain=True) as worker:
        await worker.wait()
    assert not slow.inside.is_set()
    assert await boss.places(job.id) == ["outcome"]


async def test_a_scheduled_job_is_cancelled_at_once(app: AioQueue, boss: Session) -> None:
    job = await Slow(app).task.options(delay=3600).enqueue()
    assert await job.cancel() is JobState.CANCELLED
    assert await boss.places(job.id) == ["outcome"]


@pytest.mark.parametrize("how", ["fails", "snoozes"])
async def test_a_job_between_two_attempts_is_cancelled_and_keeps_its_attempts(
    app: AioQueue, boss: Session, seen: Seen, how: str
) -> None:
    @app.task(name="work", retry=LATER)
    async def work() -> None:
        if how == "fails":
            raise ValueError("no")
        raise Snooze(3600)

    async with app.worker():
        job = await work.enqueue()
        await seen.wait(JobRecorded, job_id=job.id, state="scheduled")
        assert await job.cancel() is JobState.CANCELLED
        with pytest.raises(JobCancelled):
            await job.result(30)
    reason = "error" if how == "fails" else "snoozed"
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, reason)]
    status = await job.status()
    assert (status.state, status.attempt, status.spared) == (JobState.CANCELLED, 1, int(how == "snoozes"))


# -- a job that runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOLDS)
async def test_a_running_job_is_cancelled_from_another_app_and_cleans_up(
    app: AioQueue, guest: AioQueue, boss: Session, how: str
) -> None:
    slow = Slow(app, how)
    async with app.worker() as worker:
        job = await slow.task.enqueue()
        await passed(slow.inside)
        assert await guest.job(job.id).cancel() is JobState.RUNNING
        with pytest.raises(JobCancelled):
            await job.result(30)
        assert slow.ends == ["cancelled", "cleaned up"]
        await until(boss, "SELECT NOT EXISTS (SELECT FROM aioqueue.cancel)")
        assert worker.running == 0
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "cancelled")]
    assert await job.cancel() is JobState.CANCELLED


async def test_a_worker_that_came_to_rest_long_ago_hears_of_it_by_a_hint(make_app: MakeApp, guest: AioQueue) -> None:
    """Nobody waits for the next poll: here it would be an hour."""
    app = make_app(worker=WorkerSettings(poll=3600))
    slow = Slow(app)
    async with app, app.worker() as worker:
        job = await slow.task.enqueue()
        await passed(slow.inside)
        assert worker._worker is not None
        floors = worker._worker._steps.maintenance._floors
        await until_true(lambda: floors.at_rest)
        assert await guest.job(job.id).cancel() is JobState.RUNNING
        with pytest.raises(JobCancelled):
            await job.result(30)


async def test_a_request_in_plain_sql_is_seen_with_the_poll(app: AioQueue, boss: Session) -> None:
    slow = Slow(app)
    async with app.worker():
        job = await slow.task.enqueue()
        await passed(slow.inside)
        assert await boss.value("SELECT aioqueue.cancel_job(%s)", job.id) == "running"
        with pytest.raises(JobCancelled):
            await job.result(30)


@pytest.mark.parametrize("answer", ["returns", "raises", "has not looked"])
async def test_a_thread_is_told_and_ends_itself(app: AioQueue, boss: Session, answer: str) -> None:
    inside, cancelled = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @app.task(name="work")
    def work(ctx: JobContext) -> str:
        loop.call_soon_threadsafe(inside.set)
        if answer == "has not looked":
            cancelled.wait(60)
            return "finished all the same"
        while not ctx.should_stop:
            time.sleep(0.001)
        if answer == "raises":
            raise RuntimeError("stopped half-way")
        return "half"

    async with app.worker():
        job = await work.enqueue()
        await passed(inside)
        assert await job.cancel() is JobState.RUNNING
        cancelled.set()
        if answer == "has not looked":
            assert await job.result(30) == "finished all the same"
        else:
            with pytest.raises(JobCancelled):
                await job.result(30)
    assert await boss.places(job.id) == ["outcome"]


async def test_a_job_is_cancelled_while_its_worker_drains(app: AioQueue, guest: AioQueue, seen: Seen) -> None:
    slow = Slow(app)
    async with app.worker(grace=3600) as worker:
        job = await slow.task.enqueue()
        await passed(slow.inside)
        worker.stop()
        await seen.wait(WorkerStopping)
        assert await guest.job(job.id).cancel() is JobState.RUNNING
        await worker.wait()
    assert slow.ends == ["cancelled", "cleaned up"]
    assert (await job.status()).state is JobState.CANCELLED


@pytest.mark.parametrize("how", ["nothing", "own transaction"])
async def test_a_job_that_ends_well_all_the_same_has_succeeded_and_keeps_its_end(app: AioQueue, boss: Session, how: str) -> None:
    inside = asyncio.Event()

    async def wait() -> str:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "saved"
        return "?"

    async def nothing() -> str:
        return await wait()

    async def own(tx: JobTransaction) -> str:
        return await wait()

    fn: Any = own if how == "own transaction" else nothing
    work: Any = app.task(name="work")(fn)
    async with app.worker():
        job = await work.enqueue()
        await passed(inside)
        assert await job.cancel() is JobState.RUNNING
        assert await job.result(30) == "saved"
        assert await job.cancel() is JobState.SUCCEEDED
        await until(boss, "SELECT NOT EXISTS (SELECT FROM aioqueue.cancel)")
    assert await boss.places(job.id) == ["outcome"]


async def test_a_success_and_a_cancel_at_one_moment_leave_one_end(app: AioQueue, boss: Session) -> None:
    """Whichever comes first; what cancel() says and what result() says agree with what is stored."""

    @app.task(name="quick")
    async def quick(n: int) -> int:
        return n

    answers: list[JobState] = []
    ends: list[str] = []
    async with app.worker():
        for n in range(60):
            job = await quick.enqueue(n)
            if n % 3:
                await until(boss, "SELECT state <> 'ready' FROM aioqueue.jobs WHERE id = %s", job.id)
            answers.append(await job.cancel())
            try:
                assert await job.result(30) == n
                ends.append("succeeded")
            except JobCancelled:
                ends.append("cancelled")
            assert await boss.state(job.id) == ends[-1]
            assert await boss.places(job.id) == ["outcome"]
            if answers[-1].ended:
                assert answers[-1] == ends[-1]
    assert "succeeded" in ends


async def test_a_request_to_a_worker_that_dies_is_done_by_whoever_takes_its_jobs(app: AioQueue, boss: Session) -> None:
    slow = Slow(app)
    job = await slow.task.enqueue()
    dead = await boss.register()
    assert len(await boss.claim(dead)) == 1
    assert await job.cancel() is JobState.RUNNING
    await boss.end_lease(dead)
    async with app.worker():
        with pytest.raises(JobCancelled):
            await job.result(30)
    assert not slow.inside.is_set(), "it does not run again"
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "worker lost")]


# -- one state for each cause --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOLDS)
async def test_a_job_over_its_time_is_no_cancelled_one(app: AioQueue, boss: Session, how: str) -> None:
    slow = Slow(app, how, timeout=PATIENCE, retry=LATER)
    async with app.worker() as worker:
        last = await slow.task.options(max_attempts=1).enqueue()
        await passed(slow.inside)
        end_time(worker, last.id)
        with pytest.raises(JobFailed, match="time limit"):
            await last.result(30)
        slow.inside.clear()
        job = await slow.task.enqueue()
        await passed(slow.inside)
        end_time(worker, job.id)
        await until(boss, "SELECT state = 'scheduled' FROM aioqueue.jobs WHERE id = %s", job.id)
    assert slow.ends == ["cancelled", "cleaned up"] * 2
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "time limit")]
    assert (await last.status()).state is JobState.DEAD
    assert (await job.status()).spared == 0


@pytest.mark.parametrize("how", HOLDS)
async def test_an_interrupted_job_is_ready_again_and_spared(app: AioQueue, boss: Session, how: str) -> None:
    slow = Slow(app, how)
    async with app.worker(grace=3600) as worker:
        job = await slow.task.enqueue()
        await passed(slow.inside)
        worker.stop(hurry=True)
        await worker.wait()
    assert slow.ends == ["cancelled", "cleaned up"]
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "interrupted")]
    status = await job.status()
    assert (status.state, status.attempt, status.spared) == (JobState.READY, 1, 1)
    slow.goes_on.set()
    async with app.worker():
        assert await job.result(30) == "done"


@pytest.mark.parametrize("how", HOLDS)
async def test_a_cancelled_error_of_the_tasks_own_is_a_failure(app: AioQueue, boss: Session, how: str) -> None:
    cleaned_up: list[int] = []

    async def work_() -> None:
        try:
            raise asyncio.CancelledError("mine")
        finally:
            await asyncio.sleep(0.01)
            cleaned_up.append(1)

    async def nothing(ctx: JobContext) -> None:
        await work_()

    async def own(tx: JobTransaction) -> None:
        await work_()

    async def short(ctx: JobContext) -> None:
        async with ctx.transaction():
            await work_()

    every: dict[str, Any] = {"nothing": nothing, "own transaction": own, "short transaction": short}
    work: Any = app.task(name="work", retry=LATER)(every[how])
    async with app.worker():
        last = await work.options(max_attempts=1).enqueue()
        with pytest.raises(JobFailed, match="CancelledError"):
            await last.result(30)
        job = await work.enqueue()
        await until(boss, "SELECT state = 'scheduled' FROM aioqueue.jobs WHERE id = %s", job.id)
    assert cleaned_up == [1, 1]
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "error")]
    assert (await job.status()).spared == 0


async def test_a_cancel_and_a_stop_at_once_end_as_cancelled(app: AioQueue, boss: Session) -> None:
    """Whoever cancels was told that it runs: it does not run again after its worker's stop."""
    slow = Slow(app)
    async with app.worker(grace=3600) as worker:
        job = await slow.task.enqueue()
        await passed(slow.inside)
        assert await boss.cancel(job.id) == "running"
        worker.stop(hurry=True)
        await worker.wait()
    assert (await job.status()).state is JobState.CANCELLED


# -- a transaction that is cut off ---------------------------------------------------------------------------------------


async def test_100_cancelled_transactions_roll_back_and_use_one_connection(at: Bench, shop: Session, watcher: Session) -> None:
    pids: set[int] = set()
    ends: list[int] = []
    inside = asyncio.Event()

    async def work(tx: JobTransaction, n: int) -> None:
        pids.add(tx.connection.info.backend_pid)
        await tx.execute("INSERT INTO shop.note VALUES ('cut off')")
        inside.set()
        try:
            match n % 3:
                case 0:
                    await tx.execute("SELECT pg_sleep(1000)")
                case 1:
                    await asyncio.sleep(1000)
                case _:
                    async with tx.connection.transaction(), tx.connection.cursor() as cursor:
                        await cursor.execute("SELECT pg_sleep(1000)")
        finally:
            await asyncio.sleep(0.001)
            ends.append(n)

    at.tasks.task(name="work")(work)
    for n in range(100):
        inside.clear()
        job = await at.start("work", f'{{"n": {n}}}', tenant=f"tenant {n % 2}")
        await passed(inside)
        if n % 3 != 1:
            # A cancellation that reaches the server before the query does is lost, and the connection is closed.
            await until(watcher, "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s", *pids)
        at.stop(job, (Cause.CANCELLED, Cause.INTERRUPTED)[n % 5 == 0])
        await at.end()
        assert n % 5 == 0 or isinstance(at.outcomes[job.job_id], Cancelled)
    assert ends == list(range(100))
    assert await shop.rows("SELECT body FROM shop.note") == []
    assert len(pids) == 1
    (pid,) = pids
    assert await watcher.value("SELECT state FROM pg_stat_activity WHERE pid = %s", pid) == "idle"
    assert await watcher.value("SELECT count(*) FROM pg_locks WHERE pid = %s", pid) == 0


async def test_a_thread_that_ignores_its_cancel_costs_its_slot_and_not_its_worker(make_app: MakeApp) -> None:
    """A def task cannot be cancelled; only past its time limit is it given up on, and its worker with it."""
    started, end = threading.Event(), threading.Event()
    async with make_app(limits=LimitSettings(abandon=0.2)) as app:

        @app.task(name="deaf")
        def deaf() -> None:
            started.set()
            end.wait(60)

        @app.task(name="other")
        async def other() -> int:
            return 7

        async with app.worker(concurrency=2) as worker:
            try:
                job = await deaf.enqueue()
                await asyncio.to_thread(started.wait, 20)
                await job.cancel()
                with pytest.raises(JobCancelled):
                    await job.result(20)
                assert worker.abandoned == 0
                assert worker.running == 1, "its slot stays taken"
                assert await (await other.enqueue()).result(20) == 7
            finally:
                end.set()
