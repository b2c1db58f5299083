"""list_newest: the newest jobs with their states, a bounded look, the next page."""

from typing import Any
from uuid import UUID

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_newest_first_with_every_state(boss: Session, one: Session) -> None:
    running, dead, done = await one.enqueue(3)
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker)}
    await one.record(worker, entry(jobs[dead], "error", m="broken", t="ValueError"), entry(jobs[done]))
    later, ready = await one.enqueue_one(delay=60), await one.enqueue_one(tenant="a", queue="q", priority=1)
    page = await one.store.list_jobs(one.conn, window=10, limit=10)
    assert {job["id"]: job["state"] for job in page.jobs} == {
        running: "running", dead: "dead", done: "succeeded", later: "scheduled", ready: "ready"
    }  # fmt: skip
    assert [job["id"] for job in page.jobs] == sorted(jobs.keys() | {later, ready}, reverse=True)
    assert (page.scanned, page.last) == (5, min(jobs.keys() | {later, ready}))
    shown = {job["id"]: job for job in page.jobs}
    assert (shown[dead]["error_type"], shown[dead]["error"]) == ("ValueError", "broken")
    assert (shown[ready]["tenant"], shown[ready]["queue"], shown[ready]["priority"]) == ("a", "q", 1)


async def test_filters_look_at_the_window_only(one: Session) -> None:
    old = await one.enqueue_one(id=UUID(int=1), task="rare", tenant="a", queue="q")
    await one.enqueue(3)
    every: dict[str, Any] = {"task": "rare", "tenant": "a", "queue": "q"}
    for filters in ({name: value} for name, value in every.items()):
        page = await one.store.list_jobs(one.conn, window=4, limit=2, **filters)
        assert [job["id"] for job in page.jobs] == [old]
    page = await one.store.list_jobs(one.conn, window=4, limit=2, **every)
    assert [job["id"] for job in page.jobs] == [old]
    page = await one.store.list_jobs(one.conn, window=3, limit=2, task="rare")
    assert (page.jobs, page.scanned) == ([], 3)
    page = await one.store.list_jobs(one.conn, window=3, limit=2, task="rare", before=page.last)
    assert [job["id"] for job in page.jobs] == [old]


async def test_only_those_that_succeeded(one: Session) -> None:
    await one.enqueue(3)
    worker = await one.register()
    job, other, _ = await one.claim(worker)
    await one.record(worker, entry(job), entry(other, "error"))
    page = await one.store.list_jobs(one.conn, state="succeeded", window=10, limit=10)
    assert [found["id"] for found in page.jobs] == [job.job_id]


async def test_tenant_none(one: Session) -> None:
    await one.enqueue_one(tenant="a")
    plain = await one.enqueue_one()
    page = await one.store.list_jobs(one.conn, tenant="", window=10, limit=10)
    assert [found["id"] for found in page.jobs] == [plain]
    empty = await one.store.list_jobs(one.conn, tenant="b", window=10, limit=10)
    assert (empty.jobs, empty.scanned) == ([], 2)
