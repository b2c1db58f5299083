"""retry_job: a dead or cancelled job is run again as a new one; the old one keeps its end."""

from uuid import uuid4

import psycopg
import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_the_new_job_is_as_the_old_one_was(boss: Session, one: Session, guest: Session) -> None:
    old = await one.enqueue_one(task="mail", payload='{"a": 1}', tenant="T", max_attempts=3)
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), "error", d=None, m="broken"))
    new = await guest.store.retry_job(guest.conn, old, tenant="T")
    facts = "SELECT task, payload, tenant, queue, priority, max_attempts, state, retry_of FROM aioqueue.jobs WHERE id = %s"
    assert await boss.rows(facts, old) == [("mail", {"a": 1}, "T", "default", 0, 3, "dead", None)]
    assert await boss.rows(facts, new) == [("mail", {"a": 1}, "T", "default", 0, 3, "ready", old)]
    job = await one.claim_one(worker)
    assert (job.job_id, job.attempt) == (new, 1)


@pytest.mark.parametrize("state", ["ready", "scheduled", "running", "succeeded"])
async def test_other_states_are_refused(one: Session, state: str) -> None:
    job_id = await one.enqueue_one(delay=60 if state == "scheduled" else None)
    worker = await one.register()
    if state in ("running", "succeeded"):
        job = await one.claim_one(worker)
        if state == "succeeded":
            await one.record(worker, entry(job))
    shown = "succeeded" if state == "succeeded" else "unfinished"
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"neither dead nor cancelled but {shown}"):
        await one.store.retry_job(one.conn, job_id)


async def test_unknown_and_another_tenants_are_none(one: Session, guest: Session) -> None:
    job_id = await one.enqueue_one(tenant="A")
    await one.cancel(job_id)
    assert await guest.store.retry_job(guest.conn, uuid4()) is None
    assert await guest.store.retry_job(guest.conn, job_id, tenant="B") is None


async def test_the_new_job_has_the_key(one: Session) -> None:
    job_id = await one.enqueue_one(key="printer 7")
    await one.cancel(job_id)
    again = await one.store.retry_job(one.conn, job_id)
    assert await one.value("SELECT key FROM aioqueue.jobs WHERE id = %s", again) == "printer 7"
