"""list_scheduled: what is not due yet, by its time."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_by_time_and_filtered(one: Session) -> None:
    late, soon = await one.enqueue_one(delay=120, tenant="a"), await one.enqueue_one(delay=60)
    await one.enqueue()
    page = await one.store.list_jobs(one.conn, state="scheduled", window=10, limit=10)
    assert [(job["id"], job["state"]) for job in page.jobs] == [(soon, "scheduled"), (late, "scheduled")]
    page = await one.store.list_jobs(one.conn, state="scheduled", window=10, limit=10, tenant="a")
    assert [job["id"] for job in page.jobs] == [late]
    page = await one.store.list_jobs(one.conn, state="scheduled", window=1, limit=10, tenant="a")
    assert (page.jobs, page.scanned) == ([], 1)
