"""Django beyond what all libraries share: other ways to name a connection, and hints from a process without an open app."""

from collections.abc import AsyncIterator

import pytest
from django.db import connections

from aioqueue import AioQueue, TransactionAborted, WorkerSettings
from aioqueue.callers import django as caller
from aioqueue.callers.caller import Statement
from aioqueue.events import ListenerConnected
from tests.callers.conftest import Open
from tests.callers.drivers import Django, atomic
from tests.kit import MakeApp, Seen
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
async def driver(open_driver: Open) -> AsyncIterator[Django]:
    async with open_driver(Django) as opened:
        assert isinstance(opened, Django)
        yield opened


async def test_a_connection_by_its_name(app: AioQueue, driver: Django, boss: Session) -> None:
    def enqueue() -> None:
        with atomic():
            app.get("add").options(on=connections["default"]).enqueue_sync(1)

    await driver.run(enqueue)
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 1


async def test_a_block_that_must_be_rolled_back_takes_no_job(app: AioQueue, driver: Django, boss: Session) -> None:
    def enqueue() -> None:
        with atomic():
            driver.on.set_rollback(True)
            app.get("add").options(on=driver.on).enqueue_sync(1)

    with pytest.raises(TransactionAborted):
        await driver.run(enqueue)
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 0


async def test_without_an_open_app_the_connection_gives_the_hint_itself(make_app: MakeApp, driver: Django, seen: Seen) -> None:
    """As in a process of Django's alone; the worker is another's and would not look for an hour."""
    app, closed = make_app(worker=WorkerSettings(poll=3600)), make_app()
    async with app, app.worker():
        await seen.wait(ListenerConnected)
        for n in range(3):
            await driver.begin()
            job = await driver.enqueue(closed, n)
            await driver.commit()
            assert await app.job(job.id).result(30) == n + 1
        job = await driver.enqueue(closed, 3)  # in autocommit
        assert await app.job(job.id).result(30) == 4


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_each_commit_gives_one_and_a_rollback_none(
    driver: Django, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """However soon after another: the worker that the first one woke may have looked before the second commit."""
    given: list[object] = []
    fetch = caller.Blocking.fetch

    def counted(self: caller.Blocking, statement: Statement, *params: str | None) -> str | None:
        given.extend(params if "notify" in statement.percent else ())
        return fetch(self, statement, *params)

    monkeypatch.setattr(caller.Blocking, "fetch", counted)
    app = make_app()
    for n in range(3):
        await driver.begin()
        await driver.enqueue(app, n)
        await (driver.commit() if ends == "commit" else driver.rollback())
    assert given == (["ready"] * 3 if ends == "commit" else [])
