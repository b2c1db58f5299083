"""The sweeper: every key in steps, from any of them on; one that failed is not repeated at once."""

import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.maintenance import sweep
from aioqueue.maintenance.sweep import Sweeper
from aioqueue.settings import PoolSettings
from aioqueue.store import LOWEST_ID
from tests.kit import session
from tests.sql.engine import LANE, Session, entry

pytestmark = pytest.mark.anyio
PARK = (
    "INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)"
    " SELECT hashint8extended({key}, 0), n, gen_random_uuid(), 0, %s, '', 0, 0 FROM generate_series(1, %s) n"
)


@pytest.fixture
async def sweeper(worker_dsn: str, boss: Session) -> AsyncIterator[Sweeper]:
    database = Database(worker_dsn, PoolSettings(size=3))
    await database.open()
    try:
        yield Sweeper(database, boss.store, Floors([], LOWEST_ID))
    finally:
        await database.close()


async def test_all_keys_and_all_jobs_of_one(boss: Session, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "BATCH", 40)
    await boss.rows(PARK.format(key="n"), LANE, 180)
    await boss.rows(PARK.format(key="0"), LANE, 100)
    assert await sweeper.sweep() >= 180
    sweeper._next = 0.0
    await sweeper.sweep()
    assert await boss.parked() == []
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 280


async def test_after_a_failure_too_it_waits(boss: Session, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def refuse(conn: AsyncConnection[Any], **options: Any) -> Any:
        asked.append(options)
        raise psycopg.errors.QueryCanceled("too long")

    await boss.rows(PARK.format(key="n"), LANE, 1)
    monkeypatch.setattr(boss.store, "sweep_parked", refuse)
    monkeypatch.setattr(sweep, "SHARE", 1_000_000)
    monkeypatch.setattr(sweep, "EVERY", 0.0)
    with pytest.raises(psycopg.errors.QueryCanceled):
        await sweeper.sweep()
    assert await sweeper.sweep() == 0 and len(asked) == 1


async def test_while_jobs_are_parked_the_next_sweep_comes_soon(
    boss: Session, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    sweep_parked = boss.store.sweep_parked

    async def ask(conn: AsyncConnection[Any], **options: Any) -> Any:
        asked.append(options)
        return await sweep_parked(conn, **options)

    monkeypatch.setattr(boss.store, "sweep_parked", ask)
    monkeypatch.setattr(sweep, "SOON", 0.0)
    monkeypatch.setattr(sweep, "SHARE", 0)
    monkeypatch.setattr(sweep, "EVERY", 1_000_000.0)
    await sweeper.sweep()
    number = len(asked)
    assert await sweeper.sweep() == 0 and len(asked) == number, "none was found"
    sweeper._floors.parked_at = time.monotonic()  # as a claim says that has parked some
    await sweeper.sweep()
    assert len(asked) > number
    await boss.limit("T", 1)
    worker = await boss.register()
    await boss.enqueue(3, tenant="T")
    assert len(await boss.claim(worker)) == 1
    sweeper._next = 0.0
    await sweeper.sweep()
    number = len(asked)
    await sweeper.sweep()
    assert len(asked) > number, "two wait for room"


async def test_room_that_a_cancelled_job_was_given_goes_to_the_next(boss: Session, sweeper: Sweeper) -> None:
    """It was made ready for a job that has ended, and is cancelled before its claim: no end of it is ever recorded."""
    key = await boss.limit("T", 1)
    worker = await boss.register()
    await boss.enqueue(4, tenant="T")
    (first,) = await boss.claim(worker)
    await boss.record(worker, entry(first))
    await boss.store.unpark(boss.conn, {key: 1})
    (given,) = await boss.rows("SELECT job_id FROM aioqueue.live")
    assert await boss.store.cancel_job(boss.conn, given[0]) == "cancelled"
    assert len(await boss.parked()) == 2
    assert await sweeper.sweep() == 1
    (next_one,) = await boss.claim(worker)
    assert next_one.job_id not in (first.job_id, given[0])


async def test_parked_jobs_that_somebody_held_when_there_was_room_go_later(
    boss: Session, sweeper: Sweeper, worker_dsn: str
) -> None:
    """A cancel in a transaction left open keeps nobody waiting, and what it leaves is not forgotten."""
    key = await boss.limit("T", 1)
    worker = await boss.register()
    await boss.enqueue(2, tenant="T")
    (first,) = await boss.claim(worker)
    ((_, second),) = await boss.parked()
    async with session(worker_dsn, boss.store.schema) as other:
        await other.begin()
        assert await other.store.cancel_job(other.conn, second) == "cancelled"
        await boss.record(worker, entry(first))
        assert (await boss.store.unpark(boss.conn, {key: 1}))[0] == 0
        await other.conn.execute("ROLLBACK")
    assert await sweeper.sweep() == 1
    assert [job.job_id for job in await boss.claim(worker)] == [second]
