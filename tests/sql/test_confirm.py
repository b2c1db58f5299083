"""confirm: a transaction on the way commits only while the job is this worker's; see also test_finish.py."""

import pytest

from aioqueue.transaction_store import NOT_OWNED
from tests.sql.engine import Session, blocked
from tests.sql.test_finish import sqlstate

pytestmark = pytest.mark.anyio


async def test_confirm_changes_nothing(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(tenant="T")
    job = await one.claim_one(await one.register())
    before = await boss.rows("SELECT * FROM aioqueue.live")
    await one.open_job(job)
    await one.confirm(job)
    await one.commit()
    assert await boss.rows("SELECT * FROM aioqueue.live") == before
    assert await one.state(job_id) == "running"


async def test_the_job_stays_this_workers_until_the_commit(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.open_job(job)
    await one.confirm(job)
    await boss.end_lease(worker)
    assert await two.rescue() == (worker, 0), "rescue passes over it"
    await one.commit()
    assert await two.rescue() == (worker, 1)


async def test_confirm_waits_for_rescue_and_is_refused(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await boss.end_lease(worker)
    await two.begin()
    await two.rescue()
    await one.open_job(job)
    async with blocked(boss, one, sqlstate(one, job, call="confirm"), by=two) as answer:
        await two.commit()
    await one.rollback()
    assert answer.result() == NOT_OWNED


async def test_two_transactions_of_one_job_do_not_wait_for_each_other(one: Session, two: Session) -> None:
    await one.enqueue()
    job = await one.claim_one(await one.register())
    for session in (one, two):
        await session.open_job(job)
        await session.rows("SET LOCAL lock_timeout = '1ms'")
        await session.confirm(job)
    for session in (one, two):
        await session.commit()
