"""The lease: a refused beat, beats that cannot be sent, and that nobody claims or runs on while the lease is in doubt."""

import asyncio

import pytest

from aioqueue import ConfigurationError, JobContext, JobTransaction, LeaseSettings
from aioqueue.events import DatabaseLost, DatabaseRecovered, JobClaimed, JobLost, LeaseLost
from tests.kit import PATIENCE, MakeApp, Seen, passed, session, until
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


def test_a_beat_slower_than_a_third_of_the_lease_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a third of the lease"):
        LeaseSettings(lease=30, beat=10.1)
    assert LeaseSettings(lease=30, beat=10).beat_seconds == LeaseSettings(lease=30).beat_seconds == 10


async def test_a_worker_that_was_declared_dead_cancels_its_jobs_and_goes_on_under_a_new_identity(
    make_app: MakeApp, seen: Seen, boss: Session
) -> None:
    app = make_app(lease=LeaseSettings(lease=1.5))
    inside = asyncio.Event()
    ended: list[str] = []

    @app.task(name="hold")
    async def hold(ctx: JobContext) -> int:
        if ctx.attempt > 1:
            return ctx.attempt
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 0

    async with app, app.worker() as worker:
        first = worker.id
        job = await hold.enqueue()
        await passed(inside)
        # As another worker's rescue would: the job is ready again, and the worker's row goes with the last of it.
        await boss.end_lease(first)
        assert await boss.rescue() == (first, 1)
        assert await job.result(30) == 2
        lost = await seen.wait(LeaseLost)
        assert lost.worker == first and "declared dead" in lost.reason
        assert worker.id not in (0, first)
        assert ended == ["cancelled"]
        await seen.wait(JobLost, job_id=job.id, attempt=1)
        assert await (await app.get("add").enqueue(1)).result(30) == 2
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "worker lost")]


async def test_a_refusal_of_an_identity_given_up_already_is_nothing_to_the_next(
    make_app: MakeApp, seen: Seen, boss: Session
) -> None:
    """A claim's or the guard's answer may come late, when the worker has another identity."""
    app = make_app(lease=LeaseSettings(lease=30))
    async with app, app.worker() as worker:
        heartbeat = worker._worker.heartbeat if worker._worker is not None else None
        assert heartbeat is not None
        first = worker.id
        heartbeat.refused(first)
        await seen.wait(LeaseLost)
        async with asyncio.timeout(PATIENCE):
            await heartbeat.wait_proven()
        second = worker.id
        assert second != first
        heartbeat.refused(first)
        assert heartbeat.proven
        assert await (await app.get("add").enqueue(1)).result(30) == 2
        assert worker.id == second
    assert len(seen.all(LeaseLost)) == 1


async def test_a_transaction_of_a_worker_declared_dead_leaves_nothing(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    app = make_app(lease=LeaseSettings(lease=1.5))
    inside = asyncio.Event()

    @app.task(name="hold")
    async def hold(tx: JobTransaction) -> int:
        await app.get("add").options(queue="unserved").enqueue(tx.attempt)
        if tx.attempt == 1:
            inside.set()
            await asyncio.Event().wait()
        return tx.attempt

    async with app, app.worker() as worker:
        job = await hold.enqueue()
        await passed(inside)
        await boss.end_lease(worker.id)
        await boss.rescue()
        assert await job.result(30) == 2
    assert await boss.rows("SELECT payload -> 'a' FROM aioqueue.job WHERE task = 'add'") == [(2,)]


async def test_beats_that_cannot_be_sent_end_the_jobs_before_the_lease_and_nothing_is_claimed_meanwhile(
    make_app: MakeApp, seen: Seen, boss: Session, database: Database, schema: str
) -> None:
    """Somebody holds the worker's row, so no beat gets through; the judge of time is the database."""
    app = make_app(lease=LeaseSettings(lease=6))
    inside = asyncio.Event()
    in_time: list[bool] = []

    @app.task(name="hold")
    async def hold(ctx: JobContext) -> str:
        if ctx.attempt > 1:
            return f"attempt {ctx.attempt}, spared {ctx.spared}"
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            in_time.append(await boss.value("SELECT clock_timestamp() < lease_until FROM aioqueue.worker WHERE id = %s", first))
        return ""

    async with app, session(database.dsn("superuser"), schema) as holder, app.worker() as worker:
        first = worker.id
        job = await hold.enqueue()
        await passed(inside)
        await holder.begin()
        await holder.rows("SELECT FROM aioqueue.worker WHERE id = %s FOR NO KEY UPDATE", first)
        lost = await seen.wait(LeaseLost)
        assert lost.worker == first
        late = await app.get("add").enqueue(1)
        assert seen.all(DatabaseLost, loop="heartbeat")
        await until(boss, "SELECT clock_timestamp() > lease_until FROM aioqueue.worker WHERE id = %s", first)
        assert not seen.all(JobClaimed, job_id=late.id)
        await holder.rollback()
        assert await late.result(30) == 2
        assert await job.result(30) == "attempt 2, spared 1"
        await seen.wait(DatabaseRecovered, loop="heartbeat")
    assert in_time == [True]


async def test_a_worker_beats_while_all_job_connections_are_in_use(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    app = make_app(lease=LeaseSettings(lease=1.5))
    goes_on, inside = asyncio.Event(), asyncio.Event()
    holding = 0

    @app.task(name="hold")
    async def hold(tx: JobTransaction) -> None:
        nonlocal holding
        holding += 1
        if holding == 2:
            inside.set()
        await goes_on.wait()

    async with app, app.worker() as worker:
        await hold.enqueue_many([()] * 2)
        await passed(inside)
        beat = await boss.value("SELECT beat_at FROM aioqueue.worker")
        await until(boss, "SELECT beat_at > %s::timestamptz + interval '2 s' FROM aioqueue.worker", beat)
        assert await boss.rows("SELECT id, dead FROM aioqueue.worker") == [(worker.id, False)]
        goes_on.set()
    assert not seen.all(LeaseLost)
