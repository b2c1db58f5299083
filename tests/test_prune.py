"""Pruning: partitions are made ahead and dropped when their jobs are old; the workers do it beside their work."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from aioqueue import AioQueue, JobNotFound, LeaseSettings, RetentionSettings
from aioqueue.database import Database as Pool
from aioqueue.events import JobsPruned, Observers
from aioqueue.maintenance import prune
from aioqueue.maintenance.prune import Pruner
from aioqueue.settings import PoolSettings
from aioqueue.store import Store
from tests.kit import PATIENCE, Seen, session
from tests.postgres import Database
from tests.sql.engine import Session
from tests.sql.ranges import THEN, drop_ranges, enqueue_then, make_old_ranges, run

pytestmark = pytest.mark.anyio


@pytest.fixture
async def boss(own_database: Database, schema: str) -> AsyncIterator[Session]:
    async with session(own_database.dsn("owner"), schema) as made:
        await drop_ranges(made)
        yield made


@pytest.fixture
async def pool(own_database: Database) -> AsyncIterator[Pool]:
    database = Pool(own_database.dsn("worker"), PoolSettings())
    await database.open()
    yield database
    await database.close()


async def test_it_makes_what_is_to_come_and_drops_what_is_old(pool: Pool, boss: Session, schema: str) -> None:
    seen = Seen()
    await make_old_ranges(boss, ahead=2)
    for day in range(3):
        await enqueue_then(boss, 2, day=day)
    await boss.enqueue()
    await run(boss, boss, ended=THEN)
    pruner = Pruner(pool, Store(schema), Observers([seen]), RetentionSettings())
    # Today's job is above all old ones, and moves from DEFAULT into its range; it is old by its end, but its range is not.
    assert await pruner.prune() == 6
    assert seen.all(JobsPruned) == [JobsPruned(6)]
    assert await boss.value("SELECT count(*) FROM aioqueue.id_range") == prune.AHEAD + 1
    assert await pruner.prune() == 0


async def test_what_outlived_its_range_is_deleted_later(pool: Pool, boss: Session, schema: str) -> None:
    await make_old_ranges(boss)
    await enqueue_then(boss, 3)
    await run(boss, boss, number=1, ended=THEN)
    pruner = Pruner(pool, Store(schema), Observers(), RetentionSettings())
    assert await pruner.prune() == 1
    await run(boss, boss, ended=datetime.now(UTC) - timedelta(days=8), number=1)
    assert await pruner.prune() == 1
    assert await boss.value("SELECT count(*) FROM aioqueue.jobs WHERE state = 'ready'") == 1


async def test_for_ever_means_that_nothing_is_deleted(pool: Pool, boss: Session, schema: str) -> None:
    await make_old_ranges(boss)
    await enqueue_then(boss, 2, max_attempts=1)
    await run(boss, boss, number=1, ended=THEN)
    await run(boss, boss, "failed", ended=THEN)
    assert await Pruner(pool, Store(schema), Observers(), RetentionSettings(succeeded=None, unsuccessful=None)).prune() == 0
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 2
    assert await Pruner(pool, Store(schema), Observers(), RetentionSettings(unsuccessful=None)).prune() == 1
    assert await boss.value("SELECT state FROM aioqueue.jobs") == "dead"


async def test_it_gives_way_to_an_open_transaction_and_comes_back(
    pool: Pool, boss: Session, own_database: Database, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "EVERY", 0.01)
    monkeypatch.setattr(prune, "AGAIN", 0.01)
    seen = Seen()
    await make_old_ranges(boss)
    await enqueue_then(boss, 1)
    await run(boss, boss, ended=THEN)
    pruner = Pruner(pool, Store(schema), Observers([seen]), RetentionSettings())
    async with session(own_database.dsn("worker"), schema) as caller:
        await caller.begin()
        await caller.enqueue()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await pruner.prune()
        loop = asyncio.create_task(pruner.run())
        await caller.commit()
        await seen.wait(JobsPruned)
        loop.cancel()
        await asyncio.wait([loop])


async def test_a_worker_prunes_beside_its_work(
    own_database: Database, boss: Session, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "EVERY", 0.05)
    seen = Seen()
    app = AioQueue(own_database.dsn("worker"), schema=schema, observers=[seen], lease=LeaseSettings(lease=5))

    @app.task(name="t")
    async def t() -> int:
        return 1

    await make_old_ranges(boss)
    (old,) = await enqueue_then(boss, 1)
    await run(boss, boss, ended=THEN)
    async with app, app.worker():
        await seen.wait(JobsPruned)
        jobs = await app.get("t").enqueue_many([()] * 100)
        assert [await job.result(PATIENCE) for job in jobs] == [1] * 100
        with pytest.raises(JobNotFound, match="retention"):
            await app.job(old).result(PATIENCE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"succeeded": 3599}, "an hour at least"),
        ({"succeeded": timedelta(days=31)}, "at least as long"),
        ({"succeeded": None}, "at least as long"),
    ],
)
def test_nonsense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        RetentionSettings(**settings)


def test_a_week_is_seven_partitions() -> None:
    settings = RetentionSettings(succeeded=timedelta(days=7), unsuccessful=timedelta(days=30))
    assert (settings.width, settings.succeeded_seconds, settings.unsuccessful_seconds) == (86_400, 7 * 86_400, 30 * 86_400)
    assert RetentionSettings().width == settings.width
