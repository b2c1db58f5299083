"""Maintenance: what is due is promoted, what dead workers ran is rescued, and a restarted server loses no job."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioqueue import AioQueue, JobContext, JobFailed, JobState, LeaseSettings, Retry, WorkerSettings
from aioqueue.events import JobRecorded, JobsPromoted, JobsRescued
from aioqueue.store import Store
from tests.kit import Seen, passed
from tests.postgres import FAST, Database, Server
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

MakeApp = Callable[..., AioQueue]
SHORT = LeaseSettings(lease=1.5, rescue_interval=0.2)


@pytest.fixture
def make_app(worker_dsn: str, schema: str, seen: Seen) -> MakeApp:
    def make(**settings: Any) -> AioQueue:
        app = AioQueue(worker_dsn, schema=schema, observers=[seen], **settings)

        @app.task(name="t")
        async def t(ctx: JobContext) -> list[int]:
            return [ctx.attempt, ctx.spared]

        return app

    return make


async def test_a_scheduled_job_runs_when_it_is_due_and_not_before(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    app = make_app()
    async with app, app.worker():
        far = await app.get("t").options(delay=3600).enqueue()
        near = await app.get("t").options(delay=0.3).enqueue()
        assert await near.result(30) == [1, 0]
        assert seen.all(JobsPromoted) == [JobsPromoted(1)]
        assert (await far.status()).state is JobState.SCHEDULED
    assert await boss.rows("SELECT started_at >= run_at FROM aioqueue.jobs WHERE id = %s", near.id) == [(True,)]


async def test_many_that_fall_due_together_are_all_promoted(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    app = make_app()
    async with app:
        jobs = await app.get("t").options(delay=0.5).enqueue_many([()] * 2_500)
        async with app.worker(), app.worker():
            await asyncio.gather(*(job.result(60) for job in jobs))
    assert sum(e.count for e in seen.all(JobsPromoted)) == 2_500


async def test_a_retry_runs_after_its_delay(make_app: MakeApp) -> None:
    app = make_app()

    @app.task(name="third", retry=Retry(base=0.05, jitter=False))
    async def third(ctx: JobContext) -> int:
        if ctx.attempt < 3:
            raise ValueError
        return ctx.attempt

    async with app, app.worker():
        assert await (await third.enqueue()).result(30) == 3


@pytest.mark.parametrize("poll", [1.0, 3600.0])
async def test_a_dead_workers_jobs_are_taken_over_after_its_lease(
    make_app: MakeApp, seen: Seen, boss: Session, poll: float
) -> None:
    dead = await boss.register(lease=1.5)
    ids = await boss.enqueue(3)
    last = await boss.enqueue_one(max_attempts=1)
    scheduled = [job.job_id for job in await boss.claim(dead)]
    assert sorted(scheduled) == sorted([*ids, last])
    app = make_app(lease=SHORT, worker=WorkerSettings(poll=poll))
    async with app, app.worker():
        for number in ids:
            assert await app.job(number).result(30) == [2, 0]
        with pytest.raises(JobFailed, match=f"worker {dead} was lost"):
            await app.job(last).result(30)
        assert sum(e.count for e in seen.all(JobsRescued, worker=dead)) == 4
    assert await boss.rows("SELECT FROM aioqueue.worker WHERE id = %s", dead) == []
    assert [row[:2] for row in await boss.attempts(last)] == [(1, "worker lost")]


async def test_jobs_whose_worker_has_no_row_are_rescued(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    gone = await boss.register()
    number = await boss.enqueue_one()
    await boss.claim_one(gone)
    await boss.rows("DELETE FROM aioqueue.worker WHERE id = %s", gone)
    app = make_app(lease=SHORT)
    async with app, app.worker():
        assert await app.job(number).result(30) == [2, 0]


async def test_a_task_that_the_rescuer_does_not_know_is_rescued_too(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    dead = await boss.register(lease=0.5)
    number = await boss.enqueue_one(task="elsewhere")
    await boss.claim_one(dead)
    app = make_app(lease=SHORT)
    async with app, app.worker():
        await seen.wait(JobRecorded, job_id=number, state="scheduled")
    assert await boss.state(number) == "scheduled"


async def test_a_clean_stop_leaves_nothing_to_rescue(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    app = make_app(lease=SHORT)
    async with app:
        async with app.worker():
            await (await app.get("t").enqueue()).result(30)
        async with app.worker():
            await (await app.get("t").enqueue()).result(30)
    assert not seen.all(JobsRescued)
    assert await boss.rows("SELECT FROM aioqueue.worker") == []


async def test_a_server_restart_loses_no_job_and_starts_none_twice(
    make_app: MakeApp, seen: Seen, server: Server, database: Database, schema: str
) -> None:
    app = make_app(lease=LeaseSettings(lease=30))
    goes_on, inside = asyncio.Event(), asyncio.Event()
    runs: list[int] = []

    @app.task(name="hold")
    async def hold(ctx: JobContext) -> str:
        runs.append(ctx.attempt)
        inside.set()
        await goes_on.wait()
        return "held"

    def restart() -> None:
        server.cluster.stop("fast")
        server.cluster.start(FAST)

    async with app, app.worker() as worker:
        first = worker.id
        before = await app.get("t").enqueue_many([()] * 20)
        for job in before:
            await job.result(60)
        held = await hold.enqueue()
        await passed(inside)
        later = await app.get("t").options(delay=1).enqueue()
        await asyncio.to_thread(restart)
        after = await app.get("t").enqueue_many([()] * 20)
        for job in after:
            assert await job.result(60) == [1, 0]
        assert await later.result(60) == [1, 0]
        goes_on.set()
        assert await held.result(60) == "held"
        assert worker.id == first
    assert runs == [1]


async def test_an_idle_workers_looks_by_the_clock_never_take_two_connections(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool would open another for two at once, and keep it for as long as that comes to pass now and then."""
    under_way: list[str] = []
    at_once: list[list[str]] = []
    enough = asyncio.Event()

    def watched(name: str) -> None:
        real = getattr(Store, name)

        async def look(*args: Any, **options: Any) -> Any:
            under_way.append(name)
            at_once.append(list(under_way))
            try:
                return await real(*args, **options)
            finally:
                under_way.remove(name)
                if len(at_once) == 200:
                    enough.set()

        monkeypatch.setattr(Store, name, look)

    watched("claim")
    watched("tick")
    app = make_app(worker=WorkerSettings(poll=0.005, tick=0.005))
    async with app, app.worker():
        await passed(enough)
    looks = at_once[10:200]  # a worker that begins claims at once
    assert [one for one in looks if len(one) > 1] == []
    assert {one[0] for one in looks} == {"claim", "tick"}
