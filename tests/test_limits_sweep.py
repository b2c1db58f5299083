"""The sweeper: every key in steps, from any of them on; one that failed is not repeated at once."""

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
from tests.sql.engine import LANE, Session

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
