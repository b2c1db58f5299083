"""What a worker opens for its jobs: before the first claim, until the last job has ended, whatever opening and closing do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from aioqueue import AioQueue, JobContext, JobState, JobTransaction, LimitSettings, ResourcesFailed
from aioqueue.events import JobAbandoned, WorkerStarted, WorkerStopping
from tests.kit import MakeApp, Seen, passed, until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@dataclass
class Shared:
    """Resources, and the tasks that opened and closed them."""

    opened_by: asyncio.Task[Any] | None = None
    closed_by: asyncio.Task[Any] | None = None
    used: list[str] = field(default_factory=list)


@dataclass
class Opener:
    """Makes resources, and keeps them for the test."""

    made: list[Shared] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def __call__(self, app: AioQueue) -> AsyncIterator[Shared]:
        assert app.is_open
        shared = Shared(asyncio.current_task())
        self.made.append(shared)
        try:
            yield shared
        finally:
            await asyncio.sleep(0)
            shared.closed_by = asyncio.current_task()


async def test_every_job_of_a_worker_has_them_whatever_it_holds(make_app: MakeApp) -> None:
    opener = Opener()
    app = make_app(resources=opener)

    @app.task(name="context")
    async def context(ctx: JobContext[Shared]) -> None:
        ctx.resources.used.append("context")
        async with ctx.transaction() as tx:
            tx.resources.used.append("short")

    @app.task(name="own")
    async def own(tx: JobTransaction[Shared]) -> None:
        tx.resources.used.append("own")

    @app.task(name="thread")
    def thread(ctx: JobContext[Shared]) -> None:
        ctx.resources.used.append("thread")

    async with app, app.worker():
        for task in (context, own, thread):
            await (await task.enqueue()).result(30)
        (shared,) = opener.made
        assert shared.used == ["context", "short", "own", "thread"] and shared.closed_by is None
    assert shared.closed_by is not None and shared.closed_by is shared.opened_by


async def test_where_an_app_has_none_a_job_has_none(make_app: MakeApp) -> None:
    app = make_app()

    @app.task(name="look")
    async def look(ctx: JobContext) -> bool:
        return ctx.resources is None

    async with app, app.worker():
        assert await (await look.enqueue()).result(30)


async def test_each_worker_opens_its_own_and_opening_the_app_opens_none(make_app: MakeApp) -> None:
    opener = Opener()
    async with make_app(resources=opener) as app:
        assert opener.made == []
        async with app.worker(), app.worker():
            assert len(opener.made) == 2
        async with app.worker():
            assert [shared.closed_by is not None for shared in opener.made] == [True, True, False]


async def test_they_are_open_before_the_first_claim_and_until_the_last_job_has_ended(make_app: MakeApp, seen: Seen) -> None:
    opening, may_open = asyncio.Event(), asyncio.Event()
    inside, goes_on = asyncio.Event(), asyncio.Event()
    log: list[str] = []

    @contextlib.asynccontextmanager
    async def slowly(_app: AioQueue) -> AsyncIterator[None]:
        opening.set()
        await may_open.wait()
        log.append("opened")
        yield
        log.append("closed")

    app = make_app(resources=slowly)

    @app.task(name="slow")
    async def slow() -> None:
        log.append("began")
        inside.set()
        await goes_on.wait()
        log.append("ended")

    async def let_go() -> None:
        await seen.wait(WorkerStopping)
        goes_on.set()

    async with app:
        job = await slow.enqueue()
        worker = app.worker()
        running = asyncio.create_task(worker.run())
        await passed(opening)
        assert worker.problems() == ["the worker has not started yet: it opens its resources"]
        assert not seen.all(WorkerStarted)
        may_open.set()
        await passed(inside)
        letting = asyncio.create_task(let_go())
        worker.stop()
        await asyncio.gather(running, letting)
        assert (await job.status()).state is JobState.SUCCEEDED
    assert log == ["opened", "began", "ended", "closed"]


@pytest.mark.parametrize("how", ["at once", "on entering", "a wrong kind"])
async def test_an_error_at_opening_stops_the_worker_and_says_why(make_app: MakeApp, boss: Session, how: str) -> None:
    @contextlib.asynccontextmanager
    async def broken(_app: AioQueue) -> AsyncIterator[None]:
        raise ConnectionError("no such host")
        yield

    def at_once(_app: AioQueue) -> Any:
        raise ConnectionError("no such host")

    makes: dict[str, Any] = {"at once": at_once, "on entering": broken, "a wrong kind": lambda _app: 7}
    app = make_app(resources=makes[how])
    with pytest.raises(ResourcesFailed, match="the worker's resources could not be opened: ") as caught:
        await app.worker().run()
    assert isinstance(caught.value.__cause__, ConnectionError if how != "a wrong kind" else AttributeError)
    assert ("ConnectionError: no such host" in str(caught.value)) is (how != "a wrong kind")
    assert not app.is_open
    assert await boss.rows("SELECT FROM aioqueue.worker") == []


async def test_an_error_at_closing_is_logged_and_costs_no_outcome(
    make_app: MakeApp, boss: Session, caplog: pytest.LogCaptureFixture
) -> None:
    @contextlib.asynccontextmanager
    async def broken(_app: AioQueue) -> AsyncIterator[None]:
        yield
        raise ZeroDivisionError("a bug")

    app = make_app(resources=broken)
    async with app:
        with caplog.at_level(logging.ERROR, "aioqueue"):
            job = await app.get("add").enqueue(1)
            async with app.worker():
                assert await job.result(30) == 2
    (record,) = [record for record in caplog.records if "resources" in record.getMessage()]
    assert record.exc_info is not None and isinstance(record.exc_info[1], ZeroDivisionError)
    assert await boss.rows("SELECT state FROM aioqueue.outcome") == [("succeeded",)]


async def test_closing_that_hangs_is_cancelled_after_the_abandon_limit(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    closing = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hanging(_app: AioQueue) -> AsyncIterator[None]:
        yield
        closing.set()
        await asyncio.Event().wait()

    app = make_app(resources=hanging, limits=LimitSettings(abandon=0.05))
    with caplog.at_level(logging.ERROR, "aioqueue"):
        async with app.worker():
            pass
    assert closing.is_set()
    (record,) = [record for record in caplog.records if "resources" in record.getMessage()]
    assert record.exc_info is not None and "0.05 s to close" in str(record.exc_info[1])


async def test_a_job_that_ignores_its_end_does_not_hold_them_open(make_app: MakeApp, seen: Seen) -> None:
    """It is given up on, then they are closed: what it does with them afterwards fails."""
    opener = Opener()
    app = make_app(resources=opener, limits=LimitSettings(abandon=0.05))
    inside, goes_on = asyncio.Event(), asyncio.Event()
    over = asyncio.Event()

    @app.task(name="stubborn")
    async def stubborn(ctx: JobContext[Shared]) -> None:
        inside.set()
        while not goes_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await goes_on.wait()
        ctx.resources.used.append("closed" if ctx.resources.closed_by else "open")
        over.set()

    async with app:
        async with app.worker(grace=0):
            await stubborn.enqueue()
            await passed(inside)
        assert seen.all(JobAbandoned) and opener.made[0].closed_by is not None
        goes_on.set()
        await passed(over)
    assert opener.made[0].used == ["closed"]


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_a_worker_that_is_ended_while_it_opens_them_leaves_nothing_open(make_app: MakeApp, boss: Session, how: str) -> None:
    opening = asyncio.Event()
    log: list[str] = []

    @contextlib.asynccontextmanager
    async def for_ever(_app: AioQueue) -> AsyncIterator[None]:
        opening.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            await asyncio.sleep(0)
            log.append("undone")

    app = make_app(resources=for_ever)
    worker = app.worker()
    running = asyncio.create_task(worker.run())
    await passed(opening)
    if how == "cancel":
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        worker.stop()
        worker.stop()
        async with asyncio.timeout(30):
            await running
    assert log == ["undone"] and not app.is_open
    assert await boss.rows("SELECT FROM aioqueue.worker") == []
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("aioqueue")] == []


async def test_a_worker_that_was_asked_to_stop_before_it_began_opens_none(make_app: MakeApp) -> None:
    opener = Opener()
    app = make_app(resources=opener)
    worker = app.worker()
    worker.stop()
    async with asyncio.timeout(30):
        await worker.run()
    assert opener.made == [] and not app.is_open


@pytest.mark.parametrize("library", ["asyncio", "anyio"])
async def test_a_task_group_of_theirs_that_fails_stops_the_worker_in_order(
    make_app: MakeApp, boss: Session, seen: Seen, library: str
) -> None:
    fails = asyncio.Event()

    async def refresh() -> None:
        await fails.wait()
        raise ConnectionError("the token cannot be renewed")

    @contextlib.asynccontextmanager
    async def grouped(_app: AioQueue) -> AsyncIterator[None]:
        if library == "asyncio":
            async with asyncio.TaskGroup() as group:
                group.create_task(refresh())
                yield
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(refresh)
                yield

    app = make_app(resources=grouped)
    inside, goes_on = asyncio.Event(), asyncio.Event()

    @app.task(name="slow")
    async def slow() -> str:
        inside.set()
        await goes_on.wait()
        return "done"

    async with app:
        running = asyncio.create_task(app.worker().run())
        await slow.enqueue()
        await passed(inside)
        fails.set()
        await seen.wait(WorkerStopping)
        goes_on.set()
        with pytest.raises(ResourcesFailed, match="failed while the worker ran") as caught:
            async with asyncio.timeout(60):
                await running
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert await boss.rows("SELECT state, result FROM aioqueue.outcome") == [("succeeded", "done")]
    await until(boss, "SELECT NOT EXISTS (SELECT FROM aioqueue.worker)")


async def test_a_scope_of_theirs_that_is_cancelled_ends_the_worker_as_a_stop_does(make_app: MakeApp, boss: Session) -> None:
    scope = anyio.CancelScope()

    @contextlib.asynccontextmanager
    async def scoped(_app: AioQueue) -> AsyncIterator[None]:
        with scope:
            yield

    app = make_app(resources=scoped)
    async with app.worker() as worker:
        scope.cancel()
        async with asyncio.timeout(60):
            await worker.wait()
    assert await boss.rows("SELECT FROM aioqueue.worker") == []
