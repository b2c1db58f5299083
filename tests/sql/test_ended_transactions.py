"""ended_transactions: which transactions have ended, by commit or by rollback."""

import pytest

from aioqueue.job import new_job_id
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_open_ones_and_those_to_come_have_not_ended(one: Session, two: Session, guest: Session) -> None:
    xids = []
    for session in (one, two):
        await session.begin()
        xids.append(int(await session.value("SELECT pg_current_xact_id()::text")))
    future = 2**62

    async def ended() -> list[bool]:
        found = await guest.store.ended_transactions(guest.conn, [*xids, future])
        return [xid in found for xid in (*xids, future)]

    assert await ended() == [False, False, False]
    await two.rollback()
    assert await ended() == [False, True, False]
    await one.commit()
    assert await ended() == [True, True, False]
    assert await guest.store.ended_transactions(guest.conn, []) == set()


async def test_the_xid_that_an_enqueue_gives_is_its_transactions(one: Session, guest: Session) -> None:
    await one.begin()
    xid = await enqueue_many(one.store, one.conn, [NewJob(id=new_job_id(), task="t", payload="{}")])
    assert xid == int(await one.value("SELECT pg_current_xact_id()::text"))
    assert await guest.store.ended_transactions(guest.conn, [xid]) == set()
    await one.commit()
    assert await guest.store.ended_transactions(guest.conn, [xid]) == {xid}
