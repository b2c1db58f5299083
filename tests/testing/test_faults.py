"""fail_next() and crash_worker_at(): what goes wrong does so where it is said, and the real rescue goes on from there."""

from contextlib import AsyncExitStack
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import AioQueue, JobState, testing
from tests.kit import Seen
from tests.sql.engine import Session
from tests.testing.tasks import Broken, Order

pytestmark = pytest.mark.anyio

Notes = AsyncConnection[TupleRow]


async def texts(notes: Notes) -> list[str]:
    return [text for (text,) in await (await notes.execute("SELECT text FROM notes.note")).fetchall()]


async def test_fails_the_next_attempts_and_no_later_one(app: AioQueue[Any], queue: testing.Queue) -> None:
    queue.fail_next("add", ConnectionError("the mail server is away"), times=2)
    await app.get("add").enqueue(1)
    runs = await queue.drain(include_scheduled=True)
    assert [(ran.state, ran.expected) for ran in runs] == [("scheduled", True), ("scheduled", True), ("succeeded", False)]
    assert "the mail server is away" in str(runs[0])
    assert runs[-1].attempt == 3


async def test_fails_with_a_class_and_of_that_task_only(app: AioQueue[Any], queue: testing.Queue) -> None:
    queue.fail_next(app.get("thread"), Broken)
    await app.get("add").enqueue(1)
    await app.get("thread").enqueue(1)
    runs = await queue.drain()
    assert runs.of("add").states == ["succeeded"]
    assert runs.of("thread").states == ["scheduled"]


async def test_a_failure_rolls_back_the_task_s_transaction(app: AioQueue[Any], queue: testing.Queue, notes: Notes) -> None:
    queue.fail_next("note", Broken)
    ran = await queue.run_job(app.get("note").options(tenant="42").enqueue("hello"))
    assert (ran.state, ran.reason) == ("scheduled", "error")
    assert await texts(notes) == []


async def test_what_never_goes_wrong_fails_the_test(app: AioQueue[Any], owner_dsn: str) -> None:
    with pytest.raises(testing.TestingError, match=r"fail_next.*crash_worker_at"):
        async with testing.queue(app, owner_dsn=owner_dsn) as queue:
            queue.fail_next("add", Broken)
            queue.crash_worker_at("before_record", "add")


@pytest.mark.parametrize("wrong", ["nothing", Order, None])
def test_a_task_that_is_not_there_is_said_so(app: AioQueue[Any], wrong: Any) -> None:
    queue = testing.Queue(app, AsyncExitStack())
    with pytest.raises(testing.TestingError, match="expected a task of the app"):
        queue.fail_next(wrong, Broken)


def test_a_point_that_is_not_there_is_said_so(app: AioQueue[Any]) -> None:
    queue = testing.Queue(app, AsyncExitStack())
    with pytest.raises(testing.TestingError, match="before_record"):
        queue.crash_worker_at("during_lunch")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("point", "written"),
    [("after_claim", ["hello"]), ("after_commit", ["hello", "hello"]), ("before_record", ["hello", "hello"])],
)
async def test_a_task_that_holds_nothing_runs_again_after_a_crash(
    app: AioQueue[Any], queue: testing.Queue, notes: Notes, boss: Session, point: Any, written: list[str]
) -> None:
    queue.crash_worker_at(point, "steps")
    job = await app.get("steps").options(tenant="42").enqueue("hello")
    runs = await queue.drain()
    assert [(ran.state, ran.attempt) for ran in runs] == [("lost", 1), ("succeeded", 2)]
    assert runs[0].expected
    assert await texts(notes) == written
    assert await job.result(timeout=30) == 2
    lost = await boss.value("SELECT reason FROM aioqueue.attempt WHERE job_id = %s", job.id)
    assert lost == "worker lost"
    assert await boss.value("SELECT count(*) FROM aioqueue.worker") == 0


@pytest.mark.parametrize("point", ["after_claim", "before_record"])
async def test_a_task_with_a_transaction_has_written_once(
    app: AioQueue[Any], queue: testing.Queue, notes: Notes, point: Any
) -> None:
    queue.crash_worker_at(point)
    await app.get("note").options(tenant="42").enqueue("hello")
    runs = await queue.drain()
    assert runs.states == ["lost", "succeeded"]
    assert await texts(notes) == ["hello"]


@pytest.mark.parametrize("point", ["after_commit", "after_record"])
async def test_what_is_committed_is_not_run_again(app: AioQueue[Any], queue: testing.Queue, notes: Notes, point: Any) -> None:
    queue.crash_worker_at(point)
    job = await app.get("note").options(tenant="42").enqueue("hello")
    runs = await queue.drain()
    assert runs.states == ["succeeded"]
    assert await texts(notes) == ["hello"]
    assert (await job.status()).state is JobState.SUCCEEDED


async def test_a_thread_s_worker_dies_too(app: AioQueue[Any], queue: testing.Queue) -> None:
    queue.crash_worker_at("before_record", "thread")
    await app.get("thread").enqueue(5)
    runs = await queue.drain()
    assert [(ran.state, ran.result) for ran in runs] == [("lost", None), ("succeeded", 10)]


async def test_a_job_that_kills_every_worker_is_dead_in_the_end(app: AioQueue[Any], queue: testing.Queue, seen: Seen) -> None:
    queue.crash_worker_at("after_claim", "add", times=3)
    job = await app.get("add").options(max_attempts=3).enqueue(1)
    other = await app.get("thread").enqueue(1)
    runs = await queue.drain(include_scheduled=True)
    assert runs.of("add").states == ["lost"] * 3
    assert (await job.status()).state is JobState.DEAD
    assert (await other.status()).state is JobState.SUCCEEDED
    assert {"JobsRescued", "JobLost"} <= {type(event).__name__ for event in seen.events}


async def test_run_job_leaves_it_to_be_run_again(app: AioQueue[Any], queue: testing.Queue) -> None:
    queue.crash_worker_at("before_record")
    job = await app.get("add").enqueue(1)
    assert (await queue.run_job(job)).state == "lost"
    assert (await job.status()).state is JobState.READY
    assert (await queue.run_job(job)).result == 2


async def test_jobs_beside_it_are_lost_with_the_worker(app: AioQueue[Any], queue: testing.Queue) -> None:
    waits = await app.get("wait").enqueue()
    queue.crash_worker_at("after_claim", "add")
    await app.get("add").enqueue(1)
    with pytest.raises(testing.TestingError, match="not over"):
        await queue.drain(concurrency=2, timeout=4)
    assert (await waits.status()).attempt == 2
