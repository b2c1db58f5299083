"""list_handed_back: jobs that were spared more than 20 times in a row."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def turn(one: Session, worker: int, reason: str) -> None:
    """Claim the one job, and hand it back."""
    await one.record(worker, entry(await one.claim_one(worker), reason, d=0, s=True))


async def test_more_than_twenty_in_a_row(one: Session) -> None:
    job_id = await one.enqueue_one(task="u", tenant="a")
    worker = await one.register()
    for _ in range(20):
        await turn(one, worker, "interrupted")
    assert await one.store.list_handed_back(one.conn, cap=100, limit=20) == []
    await turn(one, worker, "no connection")
    (found,) = await one.store.list_handed_back(one.conn, cap=100, limit=20)
    assert (found["id"], found["task"], found["tenant"], found["spared"]) == (job_id, "u", "a", 21)
    assert found["reason"] == "no connection"


async def test_a_snooze_ends_the_row(one: Session) -> None:
    await one.enqueue_one()
    worker = await one.register()
    for number in range(21):
        await turn(one, worker, "snoozed" if number == 10 else "interrupted")
    assert await one.store.list_handed_back(one.conn, cap=100, limit=20) == []
