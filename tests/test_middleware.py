"""Middleware runs around every task, in its job's asyncio task, transaction and time limit; what it does counts as the task's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker

from aioqueue import (
    AioQueue,
    CallNext,
    Cancel,
    ConfigurationError,
    JobCancelled,
    JobContext,
    JobFacts,
    JobFailed,
    JobTransaction,
    LimitSettings,
    RetryIn,
    Snooze,
    current_job,
)
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.events import JobRecorded
from tests.kit import MakeApp, Seen, passed
from tests.session_kit import DRIVERS, Note, make_engine
from tests.shop import notes
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Log = list[str]


def noting(name: str, log: Log) -> Callable[[JobFacts, CallNext], Awaitable[Any]]:
    async def note(ctx: JobFacts, call_next: CallNext) -> Any:
        log.append(f"{name} begins")
        try:
            return await call_next()
        finally:
            log.append(f"{name} ends")

    return note


async def test_the_first_is_outermost_around_tasks_of_every_kind(make_app: MakeApp) -> None:
    log: Log = []
    app = make_app(middleware=[noting("outer", log), noting("inner", log)])

    @app.task(name="own")
    async def own(tx: JobTransaction) -> None:
        log.append("task")

    @app.task(name="context")
    async def context(ctx: JobContext) -> None:
        log.append("task")

    @app.task(name="nothing")
    async def nothing() -> None:
        log.append("task")

    @app.task(name="thread")
    def thread() -> None:
        assert threading.current_thread() is not threading.main_thread()
        log.append("task")

    async with app, app.worker():
        for task in (own, context, nothing, thread):
            await (await task.enqueue()).result(30)
            assert log == ["outer begins", "inner begins", "task", "inner ends", "outer ends"], task.name
            log.clear()


async def test_it_sees_the_job_and_runs_where_the_task_runs(make_app: MakeApp) -> None:
    seen: list[JobFacts] = []
    setting: ContextVar[str] = ContextVar("setting", default="unset")

    async def look(ctx: JobFacts, call_next: CallNext) -> Any:
        seen.append(ctx)
        assert current_job() is ctx
        setting.set(f"of {ctx.task}")
        return [id(asyncio.current_task()), *(await call_next())]

    app = make_app(middleware=[look])

    @app.task(name="where")
    async def where(ctx: JobContext) -> list[int | str]:
        assert ctx is seen[-1]
        return [id(asyncio.current_task()), setting.get()]

    @app.task(name="thread")
    def thread() -> list[int | str]:
        return [setting.get()]

    async with app, app.worker():
        job = await where.options(tenant="a").enqueue()
        outer, inner, text = await job.result(30)
        assert outer == inner and text == "of where"
        facts = seen[0]
        assert (facts.job_id, facts.task, facts.tenant, facts.attempt, facts.queue) == (job.id, "where", "a", 1, "default")
        assert (await (await thread.enqueue()).result(30))[1] == "of thread"


async def test_what_it_writes_is_one_with_the_tasks_transaction(make_app: MakeApp, boss: Session) -> None:
    """The job that it enqueues exists exactly if the task's transaction commits."""

    async def audit(ctx: JobContext | JobTransaction, call_next: CallNext) -> Any:
        if isinstance(ctx, JobTransaction):
            assert await ctx.fetch_value("SELECT current_setting('app.tenant')") == "a"
            await app.enqueue_by_name("add", {"a": ctx.attempt})
        return await call_next()

    app = make_app(middleware=[audit])

    @app.task(name="own")
    async def own(tx: JobTransaction) -> None:
        if tx.attempt == 1:
            raise RetryIn(0)

    async with app, app.worker():
        await (await own.options(tenant="a").enqueue()).result(30)
    assert await boss.rows("SELECT payload FROM aioqueue.job WHERE task = 'add'") == [({"a": 2},)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_session_is_what_it_is_given_too_and_its_writes_are_one_with_the_tasks(
    make_app: MakeApp, shop: Session, worker_dsn: str, driver: str
) -> None:
    async def audit(ctx: JobFacts, call_next: CallNext) -> Any:
        if isinstance(ctx, JobSession):
            ctx.add(Note(body=f"attempt {ctx.attempt}"))
        return await call_next()

    engine = make_engine(worker_dsn, driver)
    app = make_app(middleware=[audit], session=async_sessionmaker(engine))

    @app.task(name="own")
    async def own(session: JobSession) -> None:
        await session.flush()
        if session.attempt == 1:
            raise RetryIn(0)

    async with app, app.worker():
        await (await own.options(tenant="a").enqueue()).result(30)
    await engine.dispose()
    assert await notes(shop) == [("a", "attempt 2")]


async def test_what_the_outermost_returns_is_the_result_and_must_be_of_the_tasks_type(make_app: MakeApp) -> None:
    async def change(ctx: JobFacts, call_next: CallNext) -> Any:
        value = await call_next()
        return {"double": 2 * value, "text": "two", "forgets": None}[ctx.tenant or ""]

    app = make_app(middleware=[change])
    add = app.get("add")
    async with app, app.worker():
        assert await (await add.options(tenant="double").enqueue(3)).result(30) == 8
        for tenant in ("text", "forgets"):
            with pytest.raises(JobFailed, match="result of task 'add' cannot be stored"):
                await (await add.options(tenant=tenant).enqueue(3)).result(30)


async def test_it_may_answer_without_the_task(make_app: MakeApp) -> None:
    async def switched_off(ctx: JobFacts, call_next: CallNext) -> Any:
        return -1

    app = make_app(middleware=[switched_off])
    async with app, app.worker():
        assert await (await app.get("add").enqueue(3)).result(30) == -1


async def test_what_it_raises_counts_as_the_tasks(make_app: MakeApp, seen: Seen) -> None:
    raised: dict[str, BaseException] = {
        "retry": RetryIn(0),
        "snooze": Snooze(0),
        "error": ValueError("refused"),
        "cancel": Cancel("not now"),
    }

    async def refuse(ctx: JobFacts, call_next: CallNext) -> Any:
        if ctx.attempt == 1:
            raise raised[ctx.tenant or ""]
        return await call_next()

    app = make_app(middleware=[refuse])
    add = app.get("add")
    async with app, app.worker():
        for tenant in ("retry", "snooze"):
            assert await (await add.options(tenant=tenant).enqueue(1)).result(30) == 2
        with pytest.raises(JobFailed, match="ValueError: refused"):
            await (await add.options(tenant="error", max_attempts=1).enqueue(1)).result(30)
        with pytest.raises(JobCancelled, match="not now"):
            await (await add.options(tenant="cancel").enqueue(1)).result(30)
    reasons = {event.tenant: event.reason for event in seen.all(JobRecorded) if event.reason is not None}
    assert reasons["snooze"] == "snoozed"


async def test_it_may_make_a_failure_a_success_and_the_other_way_round(make_app: MakeApp) -> None:
    async def turn(ctx: JobFacts, call_next: CallNext) -> Any:
        try:
            await call_next()
        except ValueError:
            return "saved"
        raise LookupError("spoilt")

    app = make_app(middleware=[turn])

    @app.task(name="fails")
    def fails() -> str:
        raise ValueError

    @app.task(name="works")
    async def works() -> str:
        return "fine"

    async with app, app.worker():
        assert await (await fails.enqueue()).result(30) == "saved"
        with pytest.raises(JobFailed, match="LookupError: spoilt"):
            await (await works.options(max_attempts=1).enqueue()).result(30)


@pytest.mark.parametrize("where", ["before", "after"])
async def test_it_is_within_the_time_limit_and_cancelled_once(make_app: MakeApp, where: str) -> None:
    cancelled: Log = []

    async def hangs(ctx: JobFacts, call_next: CallNext) -> Any:
        if where == "after":
            await call_next()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("once")
            await asyncio.sleep(0)
            cancelled.append("and goes on")
            raise

    app = make_app(middleware=[hangs])

    @app.task(name="quick", timeout=0.1)
    async def quick() -> None: ...

    async with app, app.worker():
        with pytest.raises(JobFailed, match=r"time limit of 0\.1 s"):
            await (await quick.options(max_attempts=1).enqueue()).result(30)
    assert cancelled == ["once", "and goes on"]


async def test_a_stop_reaches_it_too(make_app: MakeApp, boss: Session) -> None:
    inside = asyncio.Event()

    async def hangs(ctx: JobFacts, call_next: CallNext) -> Any:
        inside.set()
        await asyncio.Event().wait()

    app = make_app(middleware=[hangs])
    async with app:
        async with app.worker(grace=0):
            await app.get("add").enqueue(1)
            await passed(inside)
        assert await boss.rows("SELECT worker, attempt, spared FROM aioqueue.live") == [(None, 1, 1)]


async def test_it_may_call_the_task_again_within_the_attempt(make_app: MakeApp) -> None:
    async def again(ctx: JobFacts, call_next: CallNext) -> Any:
        with contextlib.suppress(ConnectionError):
            return await call_next()
        return await call_next()

    app = make_app(middleware=[again])
    calls: Log = []

    @app.task(name="flaky")
    def flaky() -> int:
        calls.append("call")
        if len(calls) == 1:
            raise ConnectionError
        return len(calls)

    async with app, app.worker():
        assert await (await flaky.options(max_attempts=1).enqueue()).result(30) == 2


async def test_its_time_out_asks_a_thread_to_stop_and_waits_for_it(make_app: MakeApp) -> None:
    """Otherwise the thread would go on beside the next call, or the next attempt of its job, and outside of any slot."""
    log: Log = []
    over: list[Callable[[], None]] = []
    stopped = threading.Event()
    loop = asyncio.get_running_loop()

    async def impatient(ctx: JobFacts, call_next: CallNext) -> Any:
        try:
            async with asyncio.timeout(30) as patience:
                over.append(partial(patience.reschedule, 0.0))
                return await call_next()
        except TimeoutError:
            log.append("timed out")
            assert stopped.is_set()
            return await call_next()

    app = make_app(middleware=[impatient])

    @app.task(name="slow")
    def slow(ctx: JobContext) -> str:
        if "timed out" in log:
            return "stop" if ctx.should_stop else "go on"
        loop.call_soon_threadsafe(over.pop())
        while not ctx.should_stop:
            stopped.wait(0.001)
        log.append("stopped")
        stopped.set()
        return "too late"

    async with app, app.worker():
        assert await (await slow.options(max_attempts=1).enqueue()).result(30) == "go on"
    assert log == ["stopped", "timed out"]


async def test_the_time_limit_counts_while_its_time_out_waits_for_a_thread(make_app: MakeApp) -> None:
    goes_on = threading.Event()
    over: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()

    async def impatient(ctx: JobFacts, call_next: CallNext) -> Any:
        async with asyncio.timeout(30) as patience:
            over.append(partial(patience.reschedule, 0.0))
            return await call_next()

    app = make_app(middleware=[impatient], limits=LimitSettings(abandon=0.05))

    @app.task(name="stuck", timeout=0.2)
    def stuck() -> None:
        loop.call_soon_threadsafe(over.pop())
        goes_on.wait(30)

    async with app, app.worker(grace=0):
        job = await stuck.options(max_attempts=1).enqueue()
        try:
            with pytest.raises(JobFailed, match=r"time limit of 0\.2 s"):
                await job.result(30)
        finally:
            goes_on.set()


def test_what_is_no_middleware_is_refused_where_it_is_given(make_app: MakeApp) -> None:
    class Timed:
        async def __call__(self, ctx: JobFacts, call_next: CallNext) -> Any:
            return await call_next()

    async def named(name: str, ctx: JobFacts, call_next: CallNext) -> Any:
        return await call_next()

    def not_async(ctx: JobFacts, call_next: CallNext) -> Any: ...

    async def takes_one(ctx: JobFacts) -> Any: ...

    assert len(make_app(middleware=[Timed(), functools.partial(named, "x")]).middleware) == 2
    for wrong in (not_async, takes_one, Timed, 7):
        with pytest.raises(ConfigurationError, match="middleware: "):
            make_app(middleware=[wrong])
    with pytest.raises(ConfigurationError, match="expected a list"):
        make_app(middleware=Timed())


def test_a_refused_one_is_named_as_it_is_written() -> None:
    named = r"got test_a_refused_one_is_named_as_it_is_written\.<lambda> \(test_middleware\.py:\d+\)$"
    with pytest.raises(ConfigurationError, match=named):
        AioQueue(middleware=[lambda ctx, call_next: 1])  # type: ignore[arg-type, return-value]  # pyright: ignore
