"""A cancel on a caller's connection is part of the caller's transaction."""

from collections.abc import AsyncIterator

import pytest

from aioqueue import AioQueue, InvalidOption, JobCancelled, JobNotFound, TransactionAborted, WorkerSettings
from aioqueue.job import new_job_id
from tests.callers.conftest import Open
from tests.callers.drivers import AWAITED, BLOCKING, Driver
from tests.kit import MakeApp
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture(params=AWAITED, ids=lambda kind: kind.__name__)
async def driver(open_driver: Open, request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    async with open_driver(request.param) as opened:
        yield opened


async def test_it_is_committed_or_rolled_back_with_the_rest(app: AioQueue, driver: Driver, boss: Session) -> None:
    job = await app.get("add").options(tenant="42").enqueue(1)
    for commits, after in ((False, "ready"), (True, "cancelled")):
        await driver.begin()
        assert await job.cancel(on=driver.on) == "cancelled"
        assert (await job.status()).state == "ready"
        await (driver.commit() if commits else driver.rollback())
        assert (await job.status()).state == after
    await driver.begin()
    assert await job.cancel(on=driver.on) == "cancelled"
    with pytest.raises(JobNotFound):
        await app.job(job.id, tenant="43").cancel(on=driver.on)
    with pytest.raises(JobNotFound):
        await app.job(new_job_id()).cancel(on=driver.on)
    await driver.rollback()


async def test_of_a_job_of_the_same_transaction(app: AioQueue, driver: Driver, boss: Session) -> None:
    await driver.begin()
    job = await driver.enqueue(app, 1)
    assert await job.cancel(on=driver.on) == "cancelled"
    await driver.commit()
    assert await boss.state(job.id) == "cancelled"


async def test_who_waits_for_the_result_is_told_with_the_commit_and_without_a_poll(make_app: MakeApp, driver: Driver) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app:
        job = await app.get("add").enqueue(1)
        await driver.begin()
        await job.cancel(on=driver.on)
        await driver.commit()
        with pytest.raises(JobCancelled):
            await job.result(30)


async def test_in_an_aborted_transaction(app: AioQueue, driver: Driver) -> None:
    job = await app.get("add").enqueue(1)
    await driver.begin()
    with pytest.raises(Exception, match="division by zero"):
        await driver.execute("SELECT 1 / 0")
    with pytest.raises(TransactionAborted):
        await job.cancel(on=driver.on)
    await driver.rollback()


@pytest.mark.parametrize("kind", BLOCKING, ids=lambda kind: kind.__name__)
async def test_a_library_that_blocks_can_only_enqueue(app: AioQueue, open_driver: Open, kind: type[Driver]) -> None:
    job = await app.get("add").enqueue(1)
    async with open_driver(kind) as driver:
        with pytest.raises(InvalidOption, match="blocks"):
            await job.cancel(on=driver.on)
