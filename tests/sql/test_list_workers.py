"""list_workers: the living and the dead, and what they hold."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_the_living_the_dead_and_the_lost(boss: Session, one: Session) -> None:
    await one.enqueue(6)
    living, silent, gone = await one.register(), await one.register(), await one.register()
    await one.claim(living, 1)
    await one.claim(silent, 2)
    await one.claim(gone, 3)
    await boss.end_lease(silent)
    await boss.rows("DELETE FROM aioqueue.worker WHERE id = %s", gone)
    found = await one.store.list_workers(one.conn, cap=100)
    seen = {worker["id"]: (worker["dead"], worker["holds"], worker["host"]) for worker in found}
    assert seen == {living: (False, 1, "host"), silent: (True, 2, "host"), gone: (True, 3, None)}
    assert found[0]["id"] == living
    assert (found[0]["queues"], found[0]["concurrency"]) == (["default"], 10)
    assert 0 <= found[0]["beat_seconds"] < 3600


async def test_without_jobs(one: Session) -> None:
    worker = await one.register()
    (found,) = await one.store.list_workers(one.conn, cap=100)
    assert (found["id"], found["holds"], found["dead"]) == (worker, 0, False)
