"""next_tag: max(virtual time, the tenant's last tag), and k steps for those whose rows cannot be seen yet."""

import pytest

from aioqueue.job import new_job_id
from aioqueue.new_jobs import NewJobs
from tests.sql.conftest import Connect
from tests.sql.engine import LANE, Session, changed

pytestmark = pytest.mark.anyio


async def tags(boss: Session) -> list[int]:
    return [vt for (vt,) in await boss.rows("SELECT vt FROM aioqueue.live ORDER BY vt")]


async def ten_open_transactions(connect: Connect, level: str) -> None:
    sessions = [await connect("client") for _ in range(10)]
    for session in sessions:
        await session.begin(level)
        await session.enqueue(tenant="T")
    for session in sessions:
        await session.commit()


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
async def test_ten_open_transactions_of_one_tenant_do_not_tie(boss: Session, connect: Connect, level: str) -> None:
    async with changed(boss, "next_tag", ("k := k + 1;", "EXIT;")):
        await ten_open_transactions(connect, level)
        assert await tags(boss) == [1_000] * 10, "sabotaged: they tie"
    await boss.rows("TRUNCATE aioqueue.live")
    await ten_open_transactions(connect, level)
    assert await tags(boss) == [1_000 * n for n in range(1, 11)]


async def test_open_batches_of_one_tenant_do_not_overlap(boss: Session, connect: Connect) -> None:
    """Nor do their weights matter; batches of another size may tie, one of each power of two."""
    await boss.limit("T", None, weight=2)
    sessions = [await connect("client") for _ in range(6)]
    for session in sessions:
        await session.begin()
        await session.enqueue(25, tenant="T")
    await boss.enqueue(3, tenant="T")
    for session in sessions:
        await session.commit()
    found = await tags(boss)
    assert len(found) == 153 and len(set(found)) == 150 and max(found) <= 500 * 6 * 32


async def test_one_transaction_takes_its_lock_once_per_tenant(boss: Session, one: Session, two: Session) -> None:
    await one.begin()
    for _ in range(5):
        await one.enqueue(tenant="T")
    await two.enqueue(tenant="U")
    locks = await one.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
    await one.commit()
    assert locks == 1
    assert await tags(boss) == [1_000, 1_000, 2_000, 3_000, 4_000, 5_000]


async def test_a_batch_of_many_tenants_takes_a_bounded_number_of_locks(one: Session) -> None:
    await one.begin()
    for batch in range(3):
        jobs = ",".join(f'{{"task": "t", "tenant": "{batch} {n}"}}' for n in range(200))
        await one.rows(f"SELECT aioqueue.enqueue_many('[{jobs}]')")
    locks = await one.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
    await one.rollback()
    assert 0 < locks <= 64


async def test_the_parts_of_a_batch_go_on_behind_the_first_which_left_room_for_all(
    boss: Session, one: Session, two: Session
) -> None:
    await two.begin()
    await two.enqueue(6, tenant="T")
    await one.begin()
    for total in (5, 0, 0):
        part = NewJobs(task="t", tenant="T", queue="default", priority=0, ids=[new_job_id()], payloads=["1"], total=total)
        await one.store.enqueue_alike(one.conn, part)
    await two.commit()
    await one.commit()
    assert await tags(boss) == [*range(1_000, 7_000, 1_000), 9_000, 10_000, 11_000]


async def test_a_savepoint_rolled_back_gives_its_locks_back(one: Session, two: Session, boss: Session) -> None:
    await one.begin()
    await one.rows("SAVEPOINT s")
    await one.enqueue(tenant="T")
    await one.rows("ROLLBACK TO s")
    await two.enqueue(tenant="T")
    await one.enqueue(tenant="T")
    await one.commit()
    assert await tags(boss) == [1_000, 2_000]


async def test_taken_jobs_behind_virtual_time_do_not_count(boss: Session, one: Session) -> None:
    await one.enqueue(3, tenant="T")
    await boss.publish(10_000)
    await one.enqueue(tenant="T")
    assert await tags(boss) == [1_000, 2_000, 3_000, 11_000]


async def test_a_tenant_that_enqueues_one_by_one_follows_itself(boss: Session, one: Session) -> None:
    for _ in range(5):
        await one.enqueue(tenant="T")
    await one.enqueue(tenant="U")
    assert await tags(boss) == [1_000, 1_000, 2_000, 3_000, 4_000, 5_000]


async def test_jobs_without_a_tenant_are_one_line(boss: Session, one: Session) -> None:
    await one.enqueue(2)
    await one.enqueue()
    assert await tags(boss) == [1_000, 2_000, 3_000]
    assert await boss.value("SELECT aioqueue.next_tag(%s, '')", LANE) == 3_000
