"""show_job: one job with all that is known of it."""

import json
from uuid import uuid4

import psycopg
import pytest

from tests.sql.engine import Session, entry, progress

pytestmark = pytest.mark.anyio


async def test_a_job_with_payload_and_result(one: Session) -> None:
    job_id = await one.enqueue_one(payload='{"a": [1, "ü"]}', tenant="x")
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), r={"total": 3}))
    found = await one.store.show_job(one.conn, job_id)
    assert found is not None
    assert (found["state"], found["payload"], found["result"]) == ("succeeded", {"a": [1, "ü"]}, {"total": 3})
    assert (found["tenant"], found["attempt"], found["retry_of"]) == ("x", 1, None)


async def test_how_far_a_running_job_is(one: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.store.report(one.conn, json.dumps([progress(job, 0.5, m="half")]))
    found = await one.store.show_job(one.conn, job_id)
    assert found is not None
    assert (found["progress"]["value"], found["progress"]["message"]) == (0.5, "half")
    await one.record(worker, entry(job))
    found = await one.store.show_job(one.conn, job_id)
    assert found is not None
    assert found["progress"] is None


async def test_another_tenants_is_unknown(one: Session) -> None:
    theirs, nobodys = await one.enqueue_one(tenant="x"), await one.enqueue_one()
    assert await one.store.show_job(one.conn, theirs, tenant="x")
    assert await one.store.show_job(one.conn, nobodys, tenant="")
    for job_id, tenant in ((theirs, "y"), (theirs, ""), (nobodys, "x")):
        assert await one.store.show_job(one.conn, job_id, tenant=tenant) is None


async def test_unknown(one: Session) -> None:
    assert await one.store.show_job(one.conn, uuid4()) is None


async def test_not_for_the_client(guest: Session) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await guest.store.show_job(guest.conn, uuid4())
