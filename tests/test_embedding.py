"""A worker inside an application leaves the process to the application."""

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from aioqueue import AioQueue, JobFailed, ResourcesFailed
from tests.kit import MakeApp, until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_it_changes_neither_signals_nor_logging_nor_hooks_nor_the_threads_of_others(app: AioQueue) -> None:
    loop = asyncio.get_running_loop()

    def state() -> list[object]:
        root = logging.getLogger()
        return [
            *(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
            (root.level, tuple(root.handlers), logging.getLogger("aioqueue").level, logging.getLogger("aioqueue").handlers),
            (sys.excepthook, threading.excepthook, sys.unraisablehook, loop.get_exception_handler(), loop.get_debug()),
            loop.__dict__.get("_default_executor"),
        ]

    before = state()
    async with app.worker():
        assert await (await app.get("add").enqueue(1)).result(30) == 2
        assert state() == before
    assert state() == before


async def test_one_that_ends_by_itself_leaves_the_application_running_and_says_so(make_app: MakeApp, boss: Session) -> None:
    fails = asyncio.Event()

    async def refresh() -> None:
        await fails.wait()
        raise ConnectionError("the token cannot be renewed")

    @contextlib.asynccontextmanager
    async def resources(_app: AioQueue) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(refresh())
            yield

    app = make_app(resources=resources)
    async with app:
        job = None
        with pytest.raises(ResourcesFailed):
            async with app.worker() as worker:
                fails.set()
                with pytest.raises(ResourcesFailed):
                    await worker.wait()
                assert "the worker has ended: ResourcesFailed" in worker.problems()[0]
                job = await app.get("add").enqueue(1)  # the application goes on, and another worker has its jobs
                await until(boss, "SELECT NOT EXISTS (SELECT FROM aioqueue.worker)")
        async with make_app().worker():
            assert job is not None and await job.result(30) == 2


async def test_a_job_that_fails_in_an_embedded_worker_is_a_line_in_the_log(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    for log_events in (True, False):
        caplog.clear()
        app = make_app(log_events=log_events)

        @app.task(name="break_down")
        async def break_down() -> None:
            raise ValueError("broken")

        async with app, app.worker():
            job = await break_down.options(tenant="42", max_attempts=1).enqueue()
            with pytest.raises(JobFailed):
                await job.result(30)
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        said = [line for line in warnings if "break_down" in line]
        line = f"dead break_down {job.id} (attempt 1 of 1, tenant 42): ValueError: broken"
        assert said == ([line] if log_events else [])
