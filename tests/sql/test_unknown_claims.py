"""unknown_claims: what a claim without an answer gave to a worker."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_only_this_workers_and_only_what_it_does_not_know(one: Session) -> None:
    await one.enqueue(5, tenant="T")
    worker, other = await one.register(), await one.register()
    await one.claim(other, 1)
    known = await one.claim(worker, 2)
    unknown = await one.claim(worker, 2)
    found = await one.store.unknown_claims(one.conn, worker=worker, known=[job.job_id for job in known])
    assert sorted(job.fence for job in found) == sorted(job.fence for job in unknown)
    assert {job.tenant for job in found} == {"T"}
    states = await one.record(worker, *(entry(job, "interrupted", d=0, s=True) for job in found))
    assert set(states.values()) == {"ready"}
    assert await one.store.unknown_claims(one.conn, worker=worker, known=[job.job_id for job in known]) == []
    everything = await one.store.unknown_claims(one.conn, worker=worker, known=[])
    assert {job.job_id for job in everything} == {job.job_id for job in known}
