"""drain(): every ready job, through the real claim, run and record, and what became of each."""

import asyncio
from typing import Any

import anyio
import pytest

from aioqueue import AioQueue, JobState, LeaseSettings, testing
from aioqueue.job import new_job_id
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.kit import MakeApp, Seen, passed
from tests.sql.engine import Session
from tests.testing.tasks import Broken, Order, register

pytestmark = pytest.mark.anyio


async def test_runs_what_is_ready_and_says_what_became_of_it(app: AioQueue[Any], queue: testing.Queue) -> None:
    job = await app.get("order").options(tenant="42").enqueue(Order(customer="Ada", cents=[1, 2]))
    await app.get("thread").enqueue(4)
    runs = await queue.drain()
    assert [(ran.task, ran.state, ran.result, ran.attempt, ran.tenant, ran.queue) for ran in runs] == [
        ("thread", "succeeded", 4, 1, None, "default"),
        ("order", "succeeded", 3, 1, "42", "shop"),
    ]
    assert await job.result(timeout=30) == 3
    assert await queue.drain() == []


async def test_runs_what_the_jobs_enqueue(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("parent").enqueue(3)
    runs = await queue.drain()
    assert runs.states == ["succeeded"] * 4
    assert [ran.result for ran in runs.of("add")] == [1, 2, 3]


async def test_raises_the_task_s_own_error_at_the_end(app: AioQueue[Any], queue: testing.Queue) -> None:
    broken = await app.get("break").enqueue("no stock")
    whole = await app.get("add").enqueue(1)
    with pytest.raises(Broken, match="no stock") as caught:
        await queue.drain()
    assert str(broken.id) in caught.value.__notes__[0]
    assert (await whole.status()).state is JobState.SUCCEEDED


async def test_reports_errors_where_they_are_not_to_be_raised(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("break").enqueue()
    (ran,) = await queue.drain(raises=False)
    assert (ran.state, ran.reason, ran.attempt) == ("scheduled", "error", 1)
    assert isinstance(ran.error, Broken)
    assert ran.delay is not None
    assert ran.failed and not ran.expected


async def test_retries_and_delays_are_run_in_the_order_of_their_time(app: AioQueue[Any], queue: testing.Queue) -> None:
    dead = await app.get("break").enqueue()
    await app.get("add").options(delay=86_400).enqueue(2)
    await app.get("add").options(delay=7_200).enqueue(1)
    runs = await queue.drain(raises=False)
    assert runs.states == ["scheduled"]
    runs = await queue.drain(include_scheduled=True, raises=False)
    assert runs.of("break").states == ["scheduled", "dead"]
    assert [ran.result for ran in runs.of("add")] == [2, 3]
    assert runs.states[0] == "scheduled"  # its retry is due within a second
    assert (await dead.status()).attempt == 3


async def test_a_snoozed_job_is_no_failure(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("again").enqueue(2)
    runs = await queue.drain(include_scheduled=True)
    assert runs.states == ["scheduled", "scheduled", "succeeded"]
    assert runs[-1].result == 3


async def test_a_cancelled_job_is_no_failure(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("cancel").enqueue()
    (ran,) = await queue.drain()
    assert (ran.state, ran.message) == ("cancelled", "enough")


async def test_jobs_without_an_end_are_bounded(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("again").enqueue(10**6)
    with pytest.raises(testing.TestingError, match="5 attempts were run"):
        await queue.drain(include_scheduled=True, limit=5)


async def test_a_job_that_does_not_end_is_handed_back(app: AioQueue[Any], queue: testing.Queue) -> None:
    job = await app.get("wait").enqueue()
    with pytest.raises(testing.TestingError, match=r"within 1\.5 s"):
        await queue.drain(timeout=1.5)
    status = await job.status()
    assert (status.state, status.attempt, status.spared) == (JobState.READY, 1, 1)


async def test_a_time_limit_around_it_leaves_nothing_behind(app: AioQueue[Any], queue: testing.Queue, boss: Session) -> None:
    job = await app.get("wait").enqueue()
    before = asyncio.all_tasks()
    with pytest.raises(TimeoutError), anyio.fail_after(0.3):
        await queue.drain()
    assert asyncio.all_tasks() <= before
    assert (await job.status()).state is JobState.READY
    assert await boss.value("SELECT count(*) FROM aioqueue.worker") == 0


async def test_a_task_that_is_not_here_is_said_so(app: AioQueue[Any], queue: testing.Queue, boss: Session) -> None:
    job = NewJob(id=new_job_id(), task="elsewhere", payload="{}")
    await enqueue_many(boss.store, boss.conn, [job])
    with pytest.raises(testing.JobsFailed, match="no task 'elsewhere'"):
        await queue.drain(include_scheduled=True)


async def test_only_of_the_queues_that_are_named(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("order").enqueue(Order(customer="Ada"))
    await app.get("add").enqueue(1)
    assert [ran.task for ran in await queue.drain(queues=["shop"])] == ["order"]
    assert [ran.task for ran in await queue.drain()] == ["add"]


async def test_jobs_that_wait_for_each_other_need_more_than_one_at_once(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("meet").enqueue("a job and")
    runs = await queue.drain(concurrency=2)
    assert [ran.result for ran in runs.of("meet")] == ["a job and 2"]


async def test_a_limit_of_running_jobs_holds_nothing_up(make_app: MakeApp, owner_dsn: str) -> None:
    app = make_app()
    running = 0
    most: list[int] = []

    @app.task(name="one", max_running=1)
    async def one() -> None:
        nonlocal running
        running += 1
        most.append(running)
        await asyncio.sleep(0)
        running -= 1

    async with testing.queue(app, owner_dsn=owner_dsn) as queue:
        await one.enqueue_many([{}] * 5)
        assert (await queue.drain(concurrency=5)).states == ["succeeded"] * 5
        assert most == [1] * 5


async def test_a_running_job_can_be_cancelled(app: AioQueue[Any], queue: testing.Queue, seen: Seen) -> None:
    started = asyncio.Event()

    @app.task(name="hang")
    async def hang() -> None:
        started.set()
        await asyncio.Event().wait()

    job = await hang.enqueue()
    draining = asyncio.create_task(queue.drain())
    await passed(started)
    assert await job.cancel() is JobState.RUNNING
    (ran,) = await draining
    assert ran.state == "cancelled"


async def test_the_lease_outlives_a_long_drain(make_app: MakeApp, owner_dsn: str) -> None:
    app = make_app(lease=LeaseSettings(lease=1.0, rescue_interval=0.1))
    register(app)

    @app.task(name="long")
    async def long() -> None:
        await asyncio.sleep(1.8)

    async with testing.queue(app, owner_dsn=owner_dsn) as queue:
        await long.enqueue()
        assert (await queue.drain()).states == ["succeeded"]


async def test_the_app_s_own_observers_and_middleware_take_part(make_app: MakeApp, seen: Seen) -> None:
    around: list[str] = []

    async def middleware(ctx: Any, call_next: Any) -> Any:
        around.append(ctx.task)
        return await call_next()

    app = make_app(middleware=[middleware])
    async with testing.queue(app) as queue:
        await app.get("add").enqueue(1)
        await queue.drain()
    assert around == ["add"]
    assert {"JobClaimed", "JobRecorded"} <= {type(event).__name__ for event in seen.events}


async def test_nothing_runs_between_two_calls(app: AioQueue[Any], queue: testing.Queue, boss: Session) -> None:
    job = await app.get("add").enqueue(1)
    await queue.drain()
    assert await boss.value("SELECT count(*) FROM aioqueue.worker") == 0
    assert (await job.status()).state is JobState.SUCCEEDED
    later = await app.get("add").enqueue(1)
    assert (await later.status()).state is JobState.READY
