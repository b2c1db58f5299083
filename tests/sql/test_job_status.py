"""job_status: where one job stands, to those who may know it."""

from uuid import uuid4

import pytest

from aioqueue.job import JobState
from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_every_state_of_a_life(boss: Session, one: Session, guest: Session) -> None:
    job_id = await one.enqueue_one(task="mail", tenant="T", queue="default", priority=0, max_attempts=2, delay=60)
    worker = await one.register()
    states = []

    async def look() -> None:
        status = await guest.store.job_status(guest.conn, job_id, tenant="T")
        assert status is not None
        assert (status.id, status.task, status.tenant, status.max_attempts) == (job_id, "mail", "T", 2)
        states.append((str(status.state), status.attempt, status.spared, status.error and status.error.reason))

    await look()
    await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
    await one.store.promote(one.conn, limit=1)
    await look()
    job = await one.claim_one(worker)
    await look()
    await one.record(worker, entry(job, "interrupted", d=0, s=True))
    await look()
    job = await one.claim_one(worker)
    await one.record(worker, entry(job, "error", d=None, t="ValueError", m="no", b="trace"))
    await look()
    assert states == [
        ("scheduled", 0, 0, None),
        ("ready", 0, 0, None),
        ("running", 1, 0, None),
        ("ready", 1, 1, "interrupted"),
        ("dead", 2, 1, "error"),
    ]
    status = await one.store.job_status(one.conn, job_id)
    assert status is not None and status.error is not None
    error = status.error
    assert (error.attempt, error.error_type, error.error_message, error.traceback) == (2, "ValueError", "no", "trace")
    assert error.worker == worker
    assert status.started_at is not None and status.finished_at is not None


async def test_another_tenants_and_unknown_jobs_are_none(one: Session, guest: Session) -> None:
    job_id, free = await one.enqueue_one(tenant="A"), await one.enqueue_one()
    for tenant, found in (("A", True), ("B", False), ("", False), (None, True)):
        status = await guest.store.job_status(guest.conn, job_id, tenant=tenant)
        assert (status is not None) is found
    assert await guest.store.job_status(guest.conn, free, tenant="A") is None
    assert await guest.store.job_status(guest.conn, uuid4()) is None
    status = await guest.store.job_status(guest.conn, free)
    assert status is not None and status.state is JobState.READY and status.tenant is None


async def test_a_retry_names_the_old_job(one: Session) -> None:
    job_id = await one.enqueue_one()
    await one.cancel(job_id)
    new = await one.store.retry_job(one.conn, job_id)
    assert new is not None
    status = await one.store.job_status(one.conn, new)
    assert status is not None and status.retry_of == job_id
