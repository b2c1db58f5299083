"""wait_for_claims: returns once the claims in flight have ended, and says which limits are to be settled."""

import json

import pytest

from tests.sql.engine import LANE, Session, blocked

pytestmark = pytest.mark.anyio


async def test_a_pause_waits_for_claims_in_flight_although_no_limit_is_new(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue(4)
    worker = await one.register()
    await one.begin()
    await one.claim(worker, 2)
    await two.store.set_queue(two.conn, "default", paused=True)
    async with blocked(boss, two, two.store.wait_for_claims(two.conn), by=one) as waiting:
        await one.commit()
        assert await waiting is None
    await one.begin()
    assert await one.claim(worker, lanes=[LANE]) == []
    await two.rows("SET lock_timeout = '1ms'")
    assert await two.store.wait_for_claims(two.conn, always=False) is None
    await one.commit()


async def test_a_limit_that_comes_while_it_waits_is_among_those_to_settle(boss: Session, one: Session, two: Session) -> None:
    first = await boss.limit("T", 1)
    worker = await one.register()
    await boss.limit("T", 2)
    await one.begin()
    await one.claim(worker)
    async with blocked(boss, two, two.store.wait_for_claims(two.conn, always=False), by=one) as waiting:
        second = await boss.limit("U", 1)
        await one.commit()
        assert set(json.loads(str(await waiting))) == {str(first), str(second)}
