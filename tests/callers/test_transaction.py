"""A job enqueued on a caller's connection is part of the caller's transaction, whichever library holds it."""

import datetime
from typing import Any

import pytest
from psycopg import AsyncConnection

from aioqueue import AioQueue, DuplicateJob, InvalidOption, NotCommitted, SchemaError, TransactionAborted, WorkerSettings
from aioqueue.events import JobClaimed, JobRecorded
from tests.callers.conftest import Open
from tests.callers.drivers import Driver
from tests.kit import MakeApp, Seen
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Shop = AsyncConnection[Any]


async def both(boss: Session) -> tuple[list[int], list[int]]:
    """The orders and the jobs that are committed."""
    orders = await boss.rows("SELECT n FROM shop.orders ORDER BY n")
    jobs = await boss.rows("SELECT (payload ->> 'a')::int FROM aioqueue.job ORDER BY 1")
    return [n for (n,) in orders], [n for (n,) in jobs]


async def order(driver: Driver, n: int) -> None:
    await driver.execute(f"INSERT INTO shop.orders (n) VALUES ({n})")


async def test_commit_brings_both_and_nothing_is_there_before(app: AioQueue, driver: Driver, shop: Shop, boss: Session) -> None:
    await driver.begin()
    await order(driver, 1)
    job = await driver.enqueue(app, 1, tenant="42")
    assert await both(boss) == ([], [])
    with pytest.raises(NotCommitted):
        await job.result(30)
    with pytest.raises(NotCommitted):
        await job.status()
    await driver.commit()
    assert await both(boss) == ([1], [1])
    status = await job.status()
    assert (status.tenant, status.state) == ("42", "ready")


async def test_rollback_leaves_neither(app: AioQueue, driver: Driver, shop: Shop, boss: Session) -> None:
    await driver.begin()
    await order(driver, 1)
    await driver.enqueue(app, 1)
    await driver.rollback()
    assert await both(boss) == ([], [])
    await driver.begin()
    await order(driver, 2)
    await driver.enqueue(app, 2)
    await driver.commit()
    assert await both(boss) == ([2], [2])


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
async def test_an_enqueue_before_the_first_statement(
    app: AioQueue, driver: Driver, shop: Shop, boss: Session, commits: bool
) -> None:
    """Where a library begins with its first statement, the enqueue is that."""
    await driver.begin()
    await driver.enqueue(app, 1)
    await order(driver, 1)
    await (driver.commit() if commits else driver.rollback())
    assert await both(boss) == (([1], [1]) if commits else ([], []))


async def test_an_enqueue_that_is_all_there_is(app: AioQueue, driver: Driver, shop: Shop, boss: Session) -> None:
    await driver.begin()
    await driver.enqueue(app, 1)
    await driver.rollback()
    assert await both(boss) == ([], [])


async def test_a_savepoint_that_is_rolled_back_takes_its_job_with_it(
    app: AioQueue, driver: Driver, shop: Shop, boss: Session
) -> None:
    await driver.begin()
    await driver.enqueue(app, 1)
    with pytest.raises(ZeroDivisionError):
        async with driver.savepoint():
            await order(driver, 2)
            await driver.enqueue(app, 2)
            raise ZeroDivisionError
    async with driver.savepoint():
        await order(driver, 3)
        await driver.enqueue(app, 3)
    await driver.commit()
    assert await both(boss) == ([3], [1, 3])


async def test_a_database_without_the_schema_is_an_error_of_its_own(driver: Driver) -> None:
    app = AioQueue(schema="nowhere")

    @app.task(name="add")
    async def add(a: int) -> int:
        return a

    await driver.begin()
    with pytest.raises(SchemaError, match=r'schema "nowhere" does not exist in this database.*aioqueue migrate'):
        await driver.enqueue(app, 1)
    await driver.rollback()


async def test_an_aborted_transaction_is_an_error_of_its_own(app: AioQueue, driver: Driver, shop: Shop, boss: Session) -> None:
    await driver.begin()
    with pytest.raises(Exception, match="division by zero"):
        await driver.execute("SELECT 1 / 0")
    with pytest.raises(TransactionAborted):
        await driver.enqueue(app, 1)
    await driver.rollback()
    await driver.begin()
    await order(driver, 1)
    await driver.enqueue(app, 1)
    await driver.commit()
    assert await both(boss) == ([1], [1])


async def test_in_autocommit_the_job_is_there_at_once(
    app: AioQueue, open_driver: Open, kind: type[Driver], shop: Shop, boss: Session
) -> None:
    async with open_driver(kind, autocommit=True) as driver:
        job = await driver.enqueue(app, 1)
        assert await both(boss) == ([], [1])
        assert (await job.status()).state == "ready"
        await order(driver, 1)
    assert await both(boss) == ([1], [1])


async def test_the_callers_own_codecs_of_json_have_no_say(app: AioQueue, driver: Driver, shop: Shop, boss: Session) -> None:
    await driver.set_codec()
    await driver.begin()
    await driver.enqueue(app, 1)
    await driver.commit()
    assert await both(boss) == ([], [1])


async def test_many_are_written_all_or_none(app: AioQueue, driver: Driver, shop: Shop, boss: Session) -> None:
    await driver.begin()
    jobs = await driver.enqueue_many(app, [(n,) for n in range(200)], tenant="ü:%s\\")
    with pytest.raises(NotCommitted):
        await jobs[-1].status()
    await driver.commit()
    assert await both(boss) == ([], list(range(200)))
    assert (await jobs[-1].status()).tenant == "ü:%s\\"
    assert await driver.enqueue_many(app, []) == []


async def test_what_the_server_refuses_is_the_same_error(
    app: AioQueue, driver: Driver, shop: Shop, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = (await app.get("add").enqueue(0)).id
    await driver.begin()
    with monkeypatch.context() as patch:
        patch.setattr("aioqueue.options.new_job_ids", lambda number: [taken] * number)
        with pytest.raises(DuplicateJob, match=str(taken)) as duplicate:
            await driver.enqueue(app, 1)
        assert duplicate.value.job_id == taken
    await driver.rollback()
    await driver.begin()
    late = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
    with pytest.raises(InvalidOption, match=r"run_at, delay: expected a time of the years 1 to 9999"):
        await driver.enqueue(app, 1, run_at=late)
    await driver.rollback()
    assert await both(boss) == ([], [0])


async def test_the_job_starts_with_the_commit_and_without_a_poll(make_app: MakeApp, driver: Driver, seen: Seen) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app, app.worker():
        await driver.begin()
        job = await driver.enqueue(app, 1)
        await app.get("add").enqueue(1)
        await seen.wait(JobRecorded)
        assert not seen.all(JobClaimed, job_id=job.id)
        await driver.commit()
        assert await job.result(30) == 2


async def test_in_autocommit_the_job_starts_without_a_poll(make_app: MakeApp, open_driver: Open, kind: type[Driver]) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app, app.worker(), open_driver(kind, autocommit=True) as driver:
        assert await (await app.get("add").enqueue(0)).result(30) == 1
        assert await (await driver.enqueue(app, 1)).result(30) == 2


async def test_no_app_need_be_open(make_app: MakeApp, driver: Driver, shop: Shop, boss: Session) -> None:
    app = make_app()
    await driver.begin()
    await driver.enqueue(app, 1)
    await driver.rollback()
    await driver.begin()
    await driver.enqueue(app, 2)
    await driver.commit()
    assert await both(boss) == ([], [2])
