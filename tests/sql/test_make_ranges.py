"""make_ranges: partitions made ahead, beside open transactions; DEFAULT takes what no range covers."""

from datetime import timedelta

import psycopg
import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session, blocked, entry
from tests.sql.ranges import DAY, THEN, as_if_then, id_of, make_old_ranges, partition_of

pytestmark = pytest.mark.anyio


async def ranges(boss: Session) -> list[str]:
    return [suffix for (suffix,) in await boss.rows("SELECT suffix FROM aioqueue.id_range ORDER BY starts_at")]


async def test_the_present_range_and_those_ahead_are_made_once(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    assert await one.value("SELECT aioqueue.make_ranges(%s, 2)", DAY) == 3
    assert await one.value("SELECT aioqueue.make_ranges(%s, 2)", DAY) == 0
    assert await one.value("SELECT aioqueue.make_ranges(%s, 3)", DAY) == 1
    made = await ranges(boss)
    job_id = await one.enqueue_one()
    assert await partition_of(boss, "job", job_id) == "job" + made[0]
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), "failed", m="x"))
    assert await partition_of(boss, "outcome", job_id) == "outcome" + made[0]
    assert await partition_of(boss, "attempt", job_id) == "attempt" + made[0]


async def test_parts_have_the_indexes_checks_and_owner_of_their_parent(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    assert await one.value("SELECT aioqueue.make_ranges(%s, 0)", DAY) == 1
    facts = (
        "SELECT c.relkind, c.relowner, (SELECT count(*) FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid),"
        " (SELECT array_agg(k.conname ORDER BY k.conname) FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'c')"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"
    )
    (made,) = await ranges(boss)
    for table in ("job", "attempt"):
        part = await boss.rows(facts, boss.store.schema, table + made)
        assert part == await boss.rows(facts, boss.store.schema, table + "_default") and len(part) == 1


async def test_ids_outside_of_the_ranges_fall_into_default(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss)
    for moment in (THEN - timedelta(seconds=1), THEN + timedelta(days=1)):
        (job_id,) = await one.enqueue(id=id_of(moment))
        assert await partition_of(boss, "job", job_id) == "job_default"
    (job_id,) = await one.enqueue(id=id_of(THEN))
    assert await partition_of(boss, "job", job_id) == "job_20260301t000000"


async def test_what_stands_in_default_moves_into_its_range(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    (early,) = await one.enqueue(id=id_of(THEN + timedelta(hours=1)))
    (other,) = await one.enqueue(id=id_of(THEN - timedelta(hours=1)))
    worker = await one.register()
    await one.record(worker, *(entry(job, "failed", m="x", d=0) for job in await one.claim(worker)))
    await make_old_ranges(boss)
    assert await partition_of(boss, "job", early) == "job_20260301t000000"
    assert await partition_of(boss, "attempt", early) == "attempt_20260301t000000"
    assert await partition_of(boss, "job", other) == "job_default"
    assert [await one.state(job_id) for job_id in (early, other)] == ["ready", "ready"]


async def test_a_range_with_too_many_rows_in_default_is_left_out(own: Connect) -> None:
    boss = await own("owner")
    await boss.rows(
        "INSERT INTO aioqueue.job_default (id, task, queue, tenant, priority, max_attempts, payload, created_at)"
        " SELECT aioqueue.first_id(%s + n * interval '1 ms'), 't', 'q', '', 0, 1, '{}', now()"
        " FROM generate_series(1, 10001) AS n",
        THEN,
    )
    async with as_if_then(boss):
        assert await boss.value("SELECT aioqueue.make_ranges(%s, 1)", DAY) == 1
    assert await ranges(boss) == ["_20260302t000000"], "the next day's is made"


async def test_ranges_of_another_width_do_not_overlap(own: Connect) -> None:
    boss = await own("owner")
    await make_old_ranges(boss)
    async with as_if_then(boss):
        assert await boss.value("SELECT aioqueue.make_ranges(%s, 1)", 2 * DAY) == 1
        assert await boss.value("SELECT aioqueue.make_ranges(%s, 5)", 3600.0) == 0
    found = await boss.rows("SELECT starts_at, ends_at FROM aioqueue.id_range ORDER BY starts_at")
    assert [end for _, end in found][:-1] == [start for start, _ in found][1:]


async def test_an_open_transaction_that_enqueued_into_a_range_hinders_nobody(own: Connect) -> None:
    boss, one, two = await own("owner"), await own("worker"), await own("worker")
    await make_old_ranges(boss)
    await one.begin()
    (job_id,) = await one.enqueue(id=id_of(THEN))
    assert await two.value("SELECT aioqueue.make_ranges(%s, 2)", DAY) == 2, "those to come; the present one waits for it"
    await one.commit()
    assert await two.value("SELECT aioqueue.make_ranges(%s, 2)", DAY) == 1
    assert await partition_of(boss, "job", job_id) == "job_20260301t000000"


async def test_it_gives_way_to_a_transaction_that_holds_default(own: Connect) -> None:
    boss, one, two = await own("owner"), await own("worker"), await own("worker")
    await one.begin()
    await one.enqueue()
    with pytest.raises(psycopg.errors.LockNotAvailable):
        await two.value("SELECT aioqueue.make_ranges(%s, 2)", DAY)
    await one.commit()
    assert await two.value("SELECT aioqueue.make_ranges(%s, 2)", DAY) == 3
    assert len(await ranges(boss)) == 3


async def test_one_process_at_a_time(own: Connect) -> None:
    one, two = await own("worker"), await own("worker")
    await one.begin()
    assert await one.value("SELECT aioqueue.make_ranges(%s, 0)", DAY) == 1
    assert await two.value("SELECT aioqueue.make_ranges(%s, 0)", DAY) == 0
    await one.commit()


async def test_an_enqueue_waits_for_it_and_goes_to_the_new_range(own: Connect) -> None:
    boss, one, two, watcher = await own("owner"), await own("worker"), await own("worker"), await own("superuser")
    await two.enqueue()
    await one.begin()
    assert await one.value("SELECT aioqueue.make_ranges(%s, 0)", DAY) == 1
    async with blocked(watcher, two, two.enqueue_one(), by=one) as enqueue:
        await one.commit()
        job_id = await enqueue
    assert await partition_of(boss, "job", job_id) != "job_default"


async def test_a_claim_waits_for_it_and_then_sees_everything(own: Connect) -> None:
    boss, one, two, watcher = await own("owner"), await own("worker"), await own("worker"), await own("superuser")
    job_id = await one.enqueue_one()
    worker = await two.register()
    await one.begin()
    assert await one.value("SELECT aioqueue.make_ranges(%s, 0)", DAY) == 1
    async with blocked(watcher, two, two.claim_one(worker), by=one) as claim:
        await one.commit()
        assert (await claim).job_id == job_id
    assert await partition_of(boss, "job", job_id) != "job_default"


async def test_those_that_are_missing_are_made_one_by_one_if_wanted(own: Connect) -> None:
    one = await own("worker")
    assert [await one.value("SELECT aioqueue.make_ranges(%s, 2, 1)", DAY) for _ in range(4)] == [1, 1, 1, 0]


async def test_a_large_default_is_not_read_with_its_lock_in_hand(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await one.enqueue(1_000)
    assert await one.value("SELECT aioqueue.make_ranges(%s, 1, 100, 8192)", DAY) == 0
    assert await ranges(boss) == []
    assert await one.value("SELECT aioqueue.make_ranges(%s, 1, 100, NULL)", DAY) == 2


@pytest.mark.parametrize("arguments", ["0, 1", "NULL, 1", "10, -1", "10, 101"])
async def test_nonsense_is_refused(own: Connect, arguments: str) -> None:
    one = await own("worker")
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await one.rows(f"SELECT aioqueue.make_ranges({arguments})")
