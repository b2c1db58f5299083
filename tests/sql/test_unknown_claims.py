"""unknown_claims: all that a worker runs, what a claim without an answer gave it too."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_only_this_workers_and_with_their_keys(one: Session) -> None:
    await one.store.set_tenant(one.conn, "T", max_running=10)
    await one.enqueue(5, tenant="T")
    worker, other = await one.register(), await one.register()
    await one.claim(other, 1)
    claimed = [*await one.claim(worker, 2), *await one.claim(worker, 2)]
    found = await one.store.unknown_claims(one.conn, worker=worker)
    assert sorted(job.fence for job in found) == sorted(job.fence for job in claimed)
    assert {job.tenant for job in found} == {"T"}
    assert all(job.keys == claimed[0].keys != [] for job in found)
    states = await one.record(worker, *(entry(job, "interrupted", d=0, s=True) for job in found))
    assert set(states.values()) == {"ready"}
    assert await one.store.unknown_claims(one.conn, worker=worker) == []
