"""read_back: what became of a job whose COMMIT had no answer."""

import pytest

from tests.sql.engine import Session, blocked, entry

pytestmark = pytest.mark.anyio


async def test_ours_succeeded_and_lost(one: Session) -> None:
    await one.enqueue(3)
    worker = await one.register()
    a, b, c = await one.claim(worker)
    await one.record(worker, entry(b), entry(c, "error", d=0))
    assert [await one.store.read_back(one.conn, job) for job in (a, b, c)] == ["ours", "succeeded", "lost"]


async def test_another_attempts_success_is_not_ours(one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    first = await one.claim_one(worker)
    await one.record(worker, entry(first, "error", d=0))
    await one.record(worker, entry(await one.claim_one(worker)))
    assert await one.store.read_back(one.conn, first) == "lost"


@pytest.mark.parametrize(("end", "answer"), [("COMMIT", "succeeded"), ("ROLLBACK", "ours")])
async def test_it_waits_for_the_commit_under_way(boss: Session, one: Session, two: Session, end: str, answer: str) -> None:
    await one.enqueue()
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    await one.finish(job)
    async with blocked(boss, two, two.store.read_back(two.conn, job), by=one) as found:
        await one.rows(end)
    assert found.result() == answer
