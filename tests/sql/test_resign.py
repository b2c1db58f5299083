"""resign: a worker that stops is dead at once and what it left is rescued."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_what_it_left_is_rescued_at_once(one: Session) -> None:
    job_id = await one.enqueue_one()
    worker = await one.register()
    await one.claim_one(worker)
    await one.store.resign(one.conn, worker=worker)
    assert await one.rescue() == (worker, 1)
    assert await one.state(job_id) == "ready"


async def test_one_that_is_unknown_or_resigned_is_left_alone(boss: Session, one: Session) -> None:
    worker, other = await one.register(), await one.register()
    for _ in range(2):
        await one.store.resign(one.conn, worker=worker)
    await one.store.resign(one.conn, worker=3)
    assert await boss.rows("SELECT id FROM aioqueue.worker WHERE NOT dead") == [(other,)]
