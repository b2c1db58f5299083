"""progress and track: what a task says about how far it is, from the call to whoever asks for the job."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from aioqueue import AioQueue, JobContext, JobTransaction, current_job
from aioqueue.job import JobState
from aioqueue.settings import PoolSettings
from aioqueue.states import JobEnded, JobEvent, ProgressChanged
from tests.kit import PATIENCE, MakeApp, passed, until
from tests.sql.engine import Session
from tests.test_context import JOB, no_transaction

pytestmark = pytest.mark.anyio

NO_ROWS = "SELECT count(*) = 0 FROM aioqueue.progress"


async def followed(events: AsyncIterator[JobEvent[Any]]) -> tuple[float, str | None]:
    """The next progress that is told."""
    async with asyncio.timeout(PATIENCE):
        async for event in events:
            if isinstance(event, ProgressChanged):
                return event.progress.value, event.progress.message
    raise AssertionError("it ended without progress")


async def test_whoever_asks_sees_how_far_the_job_is(app: AioQueue, make_app: MakeApp, client_dsn: str, boss: Session) -> None:
    goes_on = asyncio.Event()

    @app.task(name="slow")
    async def slow(ctx: JobContext) -> int:
        await ctx.progress(0.25, "page 1 of 4")
        await goes_on.wait()
        return 7

    job = await app.get("slow").options(tenant="42").enqueue()
    assert await job.progress() is None
    async with make_app(client_dsn) as elsewhere, app.worker():
        there = elsewhere.job(job.id, tenant="42")
        events = there.watch()
        assert await followed(events) == (0.25, "page 1 of 4")
        for progress in (await job.progress(), await there.progress(), (await there.status()).progress):
            assert progress is not None
            assert (progress.value, progress.message) == (0.25, "page 1 of 4")
        goes_on.set()
        async with asyncio.timeout(PATIENCE):
            (end,) = [event async for event in events]
        assert isinstance(end, JobEnded)
        assert (end.state, end.result) == (JobState.SUCCEEDED, 7)
        assert await there.progress() is None
        await until(boss, NO_ROWS)


async def test_in_a_jobs_own_transaction_it_is_seen_before_the_commit(app: AioQueue, boss: Session) -> None:
    goes_on = asyncio.Event()

    @app.task(name="own")
    async def own(tx: JobTransaction) -> None:
        await tx.execute("SELECT 1")
        await tx.progress(0.5, "inside")
        await goes_on.wait()
        raise ValueError("rolled back")

    job = await app.get("own").options(max_attempts=1).enqueue()
    async with app.worker():
        events = job.watch()
        assert await followed(events) == (0.5, "inside")
        goes_on.set()
        async with asyncio.timeout(PATIENCE):
            (end,) = [event async for event in events]
        assert isinstance(end, JobEnded)
        assert end.state is JobState.DEAD
        await until(boss, NO_ROWS)


async def test_jobs_that_have_all_connections_keep_nobody_from_seeing_it(make_app: MakeApp) -> None:
    goes_on = asyncio.Event()
    app = make_app(pool=PoolSettings(size=3))

    @app.task(name="own")
    async def own(tx: JobTransaction, number: int) -> None:
        await tx.progress(number / 10)
        await goes_on.wait()

    async with make_app() as watching, app, app.worker(concurrency=1):
        job = await app.get("own").enqueue(3)
        assert await followed(watching.job(job.id).watch()) == (0.3, None)
        goes_on.set()
        await watching.job(job.id).result(30)


async def test_a_blocking_task_reports_from_its_thread(app: AioQueue) -> None:
    goes_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    @app.task(name="blocks")
    def blocks(ctx: JobContext) -> list[int]:
        seen = list(ctx.track_sync(range(3)))
        ctx.progress_sync(0.75, "in a thread")
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
        return seen

    job = await app.get("blocks").enqueue()
    async with app.worker():
        events = job.watch()
        while (told := await followed(events)) != (0.75, "in a thread"):
            assert told in [(0.0, "0 of 3"), (1.0, "3 of 3")]
        goes_on.set()
        assert await job.result(30) == [0, 1, 2]


async def test_code_that_is_not_given_the_context_finds_it(app: AioQueue) -> None:
    goes_on = asyncio.Event()

    @app.task(name="plain")
    async def plain() -> None:
        running = current_job()
        assert running is not None
        await running.progress(0.125)
        await goes_on.wait()

    job = await app.get("plain").enqueue()
    async with app.worker():
        assert await followed(job.watch()) == (0.125, None)
        goes_on.set()
        await job.result(30)


async def test_no_job_fails_by_a_database_that_takes_no_reports(app: AioQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = asyncio.Event()

    async def away(*_: object) -> None:
        tried.set()
        raise psycopg.OperationalError("away")

    monkeypatch.setattr(app.store, "report", away)

    @app.task(name="slow")
    async def slow(ctx: JobContext) -> int:
        for number in range(100):
            await ctx.progress(number / 100)
        await passed(tried)
        return 7

    async with app.worker():
        assert await (await app.get("slow").enqueue()).result(30) == 7


async def test_a_new_attempt_begins_without_progress(app: AioQueue) -> None:
    goes_on = asyncio.Event()

    @app.task(name="twice")
    async def twice(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            await ctx.progress(0.5)
            await goes_on.wait()
            raise ValueError("again")
        await goes_on.wait()

    job = await app.get("twice").enqueue()
    async with app.worker():
        events = job.watch()
        assert await followed(events) == (0.5, None)
        goes_on.set()
        async with asyncio.timeout(PATIENCE):
            rest = [event async for event in events]
        assert not any(isinstance(event, ProgressChanged) for event in rest)
        assert isinstance(rest[-1], JobEnded)
        assert rest[-1].attempt == 2


class Given:
    """Takes reports in the place of a worker's reporter."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, str | None]] = []

    def report(self, job: object, value: float, message: str | None) -> None:
        self.reports.append((value, message))

    def ended(self, job: object) -> None:
        raise NotImplementedError


@pytest.fixture
def ctx(monkeypatch: pytest.MonkeyPatch) -> JobContext:
    """The context of a job whose reports are in `given`; every item of a track is reported."""
    monkeypatch.setattr("aioqueue.progress.TRACK_INTERVAL", 0.0)
    monkeypatch.setattr(JOB, "reporter", Given())
    return JobContext(JOB, no_transaction, lambda: False)


def given(ctx: JobContext) -> list[tuple[float, str | None]]:
    reporter = ctx._job.reporter
    assert isinstance(reporter, Given)
    return reporter.reports


async def test_what_is_no_share_is_an_error_in_its_line(ctx: JobContext) -> None:
    for wrong in (-0.1, 1.1, math.nan, math.inf, 10**400, Decimal("NaN")):
        with pytest.raises(ValueError, match="progress: expected a number from 0 to 1, got"):
            await ctx.progress(wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for kind in ("0.5", None, True, 1j):
        with pytest.raises(TypeError, match="progress: expected a number from 0 to 1, got"):
            await ctx.progress(kind)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a text as message, got int"):
        await ctx.progress(0.5, 4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert given(ctx) == []


async def test_sums_of_floats_and_long_or_unstorable_texts_are_taken(ctx: JobContext) -> None:
    await ctx.progress(1.0000000000000002)
    await ctx.progress(-1e-17, "a\x00b\ud800c")
    await ctx.progress(1, "é" * 10_000)
    (full, _), (none, text), (_, long) = given(ctx)
    assert (full, none, text) == (1.0, 0.0, "a\\x00b\\ud800c")
    assert long is not None
    assert long.startswith("é" * 100)
    assert long.endswith("é" * 100)
    assert len(long) <= 500


async def test_what_runs_outside_of_a_worker_reports_to_nobody(ctx: JobContext) -> None:
    ctx._job.reporter = None
    await ctx.progress(0.5)
    assert [item async for item in ctx.track("ab")] == ["a", "b"]


async def test_track_tells_how_many_items_are_done(ctx: JobContext) -> None:
    assert [item async for item in ctx.track("abcd")] == list("abcd")
    assert given(ctx) == [(0.0, "0 of 4"), (0.25, "1 of 4"), (0.5, "2 of 4"), (0.75, "3 of 4"), (1.0, "4 of 4")]


async def test_track_of_an_asynchronous_source_with_a_total_that_is_wrong(ctx: JobContext) -> None:
    async def source() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    assert [item async for item in ctx.track(source(), total=2)] == [0, 1, 2]
    assert given(ctx) == [(0.0, "0 of 2"), (0.5, "1 of 2"), (1.0, "2 of 2"), (1.0, "3 of 3")]


async def test_track_without_a_total_counts(ctx: JobContext) -> None:
    def source() -> Iterator[int]:
        yield from range(2)

    assert [item async for item in ctx.track(source())] == [0, 1]
    assert given(ctx) == [(0.0, "0"), (0.0, "1"), (1.0, "2")]
    assert list(ctx.track_sync(())) == []
    assert given(ctx)[3:] == [(1.0, "0 of 0")]


async def test_a_track_that_is_left_is_not_done(ctx: JobContext) -> None:
    async for item in ctx.track("abcd"):
        if item == "b":
            break
    assert given(ctx) == [(0.0, "0 of 4"), (0.25, "1 of 4")]
    for item in ctx.track_sync("abcd"):
        if item == "b":
            break
    assert given(ctx)[2:] == [(0.0, "0 of 4"), (0.25, "1 of 4")]
