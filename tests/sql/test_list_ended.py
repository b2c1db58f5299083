"""list_ended: dead and cancelled jobs, those that ended last first."""

from typing import Any

import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, Session, entry

pytestmark = pytest.mark.anyio


async def test_last_ended_first_and_filtered(one: Session) -> None:
    first, second = await one.enqueue_one(), await one.enqueue_one(tenant="a", task="u", queue="q")
    cancelled = await one.enqueue_one()
    worker = await one.register()
    await one.cancel(cancelled)
    jobs = {job.job_id: job for job in await one.claim(worker, lanes=[LANE, lane("q", 0)])}
    await one.record(worker, entry(jobs[second], "error", m="broken"))
    await one.record(worker, entry(jobs[first], "error", m="broken"))

    async def ids(state: str, **filters: Any) -> list[object]:
        page = await one.store.list_jobs(one.conn, state=state, window=10, limit=10, **filters)
        assert all(job["state"] == state for job in page.jobs)
        return [job["id"] for job in page.jobs]

    assert await ids("dead") == [first, second]
    assert await ids("cancelled") == [cancelled]
    for filters in ({"tenant": "a"}, {"task": "u"}, {"queue": "q"}):
        assert await ids("dead", **filters) == [second]
    page = await one.store.list_jobs(one.conn, state="dead", tenant="a", window=1, limit=10)
    assert (page.jobs, page.scanned, page.last) == ([], 1, None)
