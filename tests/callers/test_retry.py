"""A retry on a caller's connection is part of the caller's transaction."""

from collections.abc import AsyncIterator

import pytest

from aioqueue import AioQueue, JobNotFound, NotCommitted, RetryRefused, WorkerSettings
from aioqueue.job import new_job_id
from tests.callers.conftest import Open
from tests.callers.drivers import AWAITED, Driver
from tests.kit import MakeApp
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture(params=AWAITED, ids=lambda kind: kind.__name__)
async def driver(open_driver: Open, request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    async with open_driver(request.param) as opened:
        yield opened


async def test_the_new_job_exists_exactly_if_the_transaction_commits(app: AioQueue, driver: Driver, boss: Session) -> None:
    old = await app.get("add").options(tenant="42").enqueue(1)
    await old.cancel()
    for commits in (False, True):
        await driver.begin()
        new = await old.retry(on=driver.on)
        assert new.tenant == "42"
        with pytest.raises(NotCommitted):
            await new.status()
        await (driver.commit() if commits else driver.rollback())
    assert await boss.rows("SELECT id, retry_of FROM aioqueue.jobs WHERE retry_of IS NOT NULL") == [(new.id, old.id)]


async def test_what_cannot_be_retried_is_refused(app: AioQueue, driver: Driver) -> None:
    job = await app.get("add").options(tenant="42").enqueue(1)
    await driver.begin()
    with pytest.raises(JobNotFound):
        await app.job(job.id, tenant="43").retry(on=driver.on)
    with pytest.raises(JobNotFound):
        await app.job(new_job_id()).retry(on=driver.on)
    with pytest.raises(RetryRefused, match="neither dead nor cancelled but unfinished; only such jobs can be run again"):
        await job.retry(on=driver.on)
    await driver.rollback()


async def test_it_starts_with_the_commit_and_without_a_poll(make_app: MakeApp, driver: Driver) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app:
        old = await app.get("add").enqueue(1)
        await old.cancel()
        async with app.worker():
            await driver.begin()
            new = await old.retry(on=driver.on)
            await driver.commit()
            assert await new.result(30) == 2
