"""list_attempts: why each attempt did not succeed, the latest first."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_the_latest_first(one: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    for number in (1, 2, 3):
        job = await one.claim_one(worker)
        await one.record(worker, entry(job, "error", d=0, t="ValueError", m=f"number {number}", b="a traceback"))
    found = await one.store.list_attempts(one.conn, job_id, limit=2)
    assert [(a["attempt"], a["error_message"]) for a in found] == [(3, "number 3"), (2, "number 2")]
    assert (found[0]["reason"], found[0]["error_type"], found[0]["traceback"]) == ("error", "ValueError", "a traceback")
    assert found[0]["worker"] == worker
