"""prune_default: ended jobs in DEFAULT are deleted once they are old, in batches."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session
from tests.sql.ranges import DAY, run

pytestmark = pytest.mark.anyio


async def prune(session: Session, limit: int = 100) -> int:
    found: int = await session.value("SELECT aioqueue.prune_default(%s, %s, %s)", 7 * DAY, 30 * DAY, limit)
    return found


async def test_old_ends_go_with_all_their_rows_and_young_ones_stay(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    now = datetime.now(UTC)
    kept, gone = [], []
    for reason, days, stays in (
        ("succeeded", 6, True), ("succeeded", 8, False), ("failed", 29, True), ("failed", 31, False),
        ("cancelled", 29, True), ("cancelled", 31, False),
    ):  # fmt: skip
        await one.enqueue()
        (kept if stays else gone).extend(await run(one, boss, reason, ended=now - timedelta(days=days)))
    assert await prune(one) == 3
    assert await prune(one) == 0
    for job_id in gone:
        assert await one.state(job_id) is None and await boss.attempts(job_id) == []
    assert [await one.state(job_id) for job_id in kept] == ["succeeded", "dead", "cancelled"]
    assert [len(await boss.attempts(job_id)) for job_id in kept] == [0, 1, 1]


async def test_unfinished_jobs_stay_however_old(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    job_id = await one.enqueue_one()
    await boss.rows("UPDATE aioqueue.job SET created_at = '2020-01-01Z'")
    assert await prune(one) == 0
    assert await one.state(job_id) == "ready"


async def test_in_batches_side_by_side(own: Connect) -> None:
    boss, one, two = await own("owner"), await own("worker"), await own("worker")
    await one.enqueue(5)
    await run(one, boss, ended=datetime(2026, 1, 1, tzinfo=UTC))
    await one.begin()
    assert await prune(one, 2) == 2
    assert await prune(two, 100) == 3, "those that another deletes are passed over"
    await one.commit()
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 0
