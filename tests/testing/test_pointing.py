"""use(): an app that exists already, pointed at a test's database and put back; its workers stand still meanwhile."""

from typing import Any

import pytest

from aioqueue import AioQueue, JobContext, JobState, PoolSettings, testing
from aioqueue.contrib.fastapi import lifespan
from aioqueue.running import RunningWorker
from tests.kit import MakeApp

pytestmark = pytest.mark.anyio

ELSEWHERE = "postgresql://nobody@nowhere.invalid/none"


@pytest.fixture
def app(make_app: MakeApp) -> AioQueue[Any]:
    return make_app(ELSEWHERE, listen_dsn=ELSEWHERE, pool=PoolSettings(start_timeout=0))


async def test_an_app_is_pointed_and_put_back(app: AioQueue[Any], worker_dsn: str) -> None:
    with testing.use(app, worker_dsn) as used:
        assert used is app
        async with app:
            await app.get("add").enqueue(1)
    assert (app.dsn, app.listen_dsn) == (ELSEWHERE, ELSEWHERE)


async def test_it_is_put_back_after_an_error(app: AioQueue[Any], worker_dsn: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with testing.queue(app, worker_dsn):
            _ = 1 / 0
    assert app.dsn == ELSEWHERE
    assert not app.is_open
    assert app.worker_class is RunningWorker


async def test_an_environment_for_wake_ups_leads_nowhere_else(
    app: AioQueue[Any], worker_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOQUEUE_LISTEN_DSN", ELSEWHERE)
    async with testing.queue(app, worker_dsn) as queue:
        job = await app.get("add").enqueue(1)
        await queue.drain()
        assert await job.result(timeout=30) == 2


async def test_an_open_app_is_refused(make_app: MakeApp, worker_dsn: str) -> None:
    async with make_app() as app:
        with pytest.raises(testing.TestingError, match="open already"):
            async with testing.queue(app, worker_dsn):
                raise AssertionError
        async with testing.queue(app) as queue:  # where it is
            await app.get("add").enqueue(1)
            assert (await queue.drain()).states == ["succeeded"]
        assert app.is_open


async def test_workers_claim_nothing(app: AioQueue[Any], worker_dsn: str) -> None:
    async with testing.queue(app, worker_dsn) as queue, app.worker(grace=1) as worker:
        assert worker.problems() == []
        job = await app.get("add").enqueue(1)
        assert (await queue.run_job(job)).result == 2
        worker.stop()
        await worker.wait()


async def test_a_lifespan_with_a_worker_is_run_as_it_is(app: AioQueue[Any], worker_dsn: str) -> None:
    with testing.use(app, worker_dsn):
        async with lifespan(app, grace=1)(None):
            assert app.is_open
            async with testing.queue(app) as queue:
                job = await app.get("add").enqueue(1)
                assert (await job.status()).state is JobState.READY
                assert (await queue.drain()).states == ["succeeded"]
    assert not app.is_open


async def test_workers_work_if_asked(app: AioQueue[Any], worker_dsn: str) -> None:
    async with testing.queue(app, worker_dsn, workers=True), app.worker():
        assert await (await app.get("add").enqueue(1)).result(timeout=30) == 2


async def test_resources_are_opened_once_and_closed(make_app: MakeApp) -> None:
    events: list[str] = []

    class Resources:
        def __init__(self, _app: object) -> None: ...

        async def __aenter__(self) -> str:
            events.append("open")
            return "held"

        async def __aexit__(self, *_: object) -> None:
            events.append("close")

    app = make_app(resources=Resources)

    @app.task(name="holds")
    async def holds(ctx: JobContext[str]) -> str:
        return ctx.resources

    async with testing.queue(app) as queue:
        assert events == []
        assert (await queue.run_job(holds.enqueue())).result == "held"
        assert (await queue.run_job(holds.enqueue())).result == "held"
        assert events == ["open"]
    assert events == ["open", "close"]
