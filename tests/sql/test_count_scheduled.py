"""count_scheduled: what is not due yet, and when the next is."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_counts_up_to_the_cap(one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), "error", d=1000))
    await one.enqueue(3, delay=5000)
    found = await one.store.count_scheduled(one.conn, cap=3)
    assert (found["scheduled"], found["retrying"]) == (3, 1)
    assert 0 < found["next_due_seconds"] <= 1000
    assert found["next_due"] == await one.value("SELECT min(run_at) FROM aioqueue.scheduled")


async def test_nothing(one: Session) -> None:
    found = await one.store.count_scheduled(one.conn, cap=3)
    assert found == {"scheduled": 0, "retrying": 0, "next_due": None, "next_due_seconds": None}
