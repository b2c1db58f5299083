"""sweep_progress: what dead processes have left goes, what counts stays."""

import json

import psycopg
import pytest

from tests.sql.engine import Session, entry, progress

pytestmark = pytest.mark.anyio


async def test_what_counts_no_more_goes_and_what_counts_stays(boss: Session, one: Session) -> None:
    ids = sorted(await one.enqueue(4))
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker)}
    await one.store.report(one.conn, json.dumps([progress(job) for job in jobs.values()]))
    await one.store.report(one.conn, json.dumps([progress(jobs[ids[3]], 0.75, 2)]))  # the one before was not named
    await one.record(worker, entry(jobs[ids[0]]), entry(jobs[ids[1]], "error", d=60))
    assert await one.store.sweep_progress(one.conn, limit=1) == 1
    assert await one.store.sweep_progress(one.conn, limit=10) == 2
    assert await one.store.sweep_progress(one.conn, limit=10) == 0
    assert await boss.rows("SELECT job_id, number FROM aioqueue.progress ORDER BY job_id") == [(ids[2], 1), (ids[3], 2)]


async def test_the_client_may_not_call_it(guest: Session) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await guest.store.sweep_progress(guest.conn, limit=1)
