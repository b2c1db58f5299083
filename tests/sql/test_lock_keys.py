"""lock_keys: waits in one order whatever the order of the keys, takes only what is free when told not to wait, few locks."""

import asyncio

import psycopg
import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session, blocked, changed

pytestmark = pytest.mark.anyio
LOCK = "SELECT aioqueue.lock_keys(%s::bigint[], %s)"


async def test_one_waits_for_the_other_and_the_try_does_not(boss: Session, connect: Connect) -> None:
    other = await connect("owner")
    watcher = await connect("owner")
    await boss.begin()
    assert await boss.value(LOCK, [3, 1, 3], True) == []
    await other.begin()
    assert await other.value(LOCK, [2, 3, 1, 4], False) == [1, 3]
    async with blocked(watcher, other, other.value(LOCK, [1], True), by=boss) as waiting:
        await boss.commit()
        assert await waiting == []
    await other.commit()


async def test_a_thousand_keys_take_256_locks(boss: Session) -> None:
    await boss.begin()
    await boss.value(LOCK, list(range(-500, 500)), True)
    assert await boss.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()") == 256
    await boss.rollback()


async def test_opposite_orders_do_not_deadlock(boss: Session, connect: Connect) -> None:
    other, watcher = await connect("owner"), await connect("owner")

    async def both() -> None:
        """The first holds key 1 when the second begins: in one order it has none that the first waits for."""
        await boss.begin()
        await boss.value(LOCK, [1], True)
        await other.begin()
        async with blocked(watcher, other, other.value(LOCK, [2, 1], True), by=boss) as waiting:
            await boss.value(LOCK, [2], True)
            await boss.commit()
            await waiting
        await other.commit()

    await both()
    async with changed(boss, "lock_keys", ("ORDER BY 1", "ORDER BY 1 DESC")):
        with pytest.raises(psycopg.errors.DeadlockDetected):
            await asyncio.wait_for(both(), 30)
    await boss.rollback()
    await other.rollback()
