"""prune_range: a whole range goes when its jobs ended long ago; what must stay falls into DEFAULT; nobody waits for it."""

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import GATE, Session, blocked, changed, entry
from tests.sql.ranges import DAY, THEN, enqueue_then, id_of, make_old_ranges, partition_of, run

pytestmark = pytest.mark.anyio
KEEP = 7 * DAY, 30 * DAY
SUFFIX = "_20260301t000000"


async def prune(session: Session, succeeded: float = KEEP[0], unsuccessful: float = KEEP[1]) -> int | None:
    found: int | None = await session.value("SELECT aioqueue.prune_range(%s, %s)", succeeded, unsuccessful)
    return found


async def ranges(boss: Session) -> list[str]:
    return [suffix for (suffix,) in await boss.rows("SELECT suffix FROM aioqueue.id_range ORDER BY starts_at")]


async def rows(boss: Session) -> tuple[int, int, int]:
    """Rows of job, outcome and attempt."""
    counts = [await boss.value(f"SELECT count(*) FROM aioqueue.{table}") for table in ("job", "outcome", "attempt")]
    return counts[0], counts[1], counts[2]


async def test_a_range_of_jobs_that_ended_long_ago_is_dropped_and_the_next_stays(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss, ahead=1)
    await enqueue_then(one, 3)
    await run(one, boss, ended=THEN + timedelta(hours=1))
    (dead,) = await one.enqueue(id=id_of(THEN + timedelta(hours=9)))
    await run(one, boss, "failed", ended=THEN + timedelta(hours=10))
    (tomorrow,) = await enqueue_then(one, 1, day=1)
    await run(one, boss, ended=datetime.now(UTC))
    assert await rows(boss) == (5, 5, 1)
    assert await prune(one) == 4
    assert await ranges(boss) == ["_20260302t000000"]
    assert await boss.value("SELECT to_regclass(format('%%I.%%I', %s::text, %s::text))", one.store.schema, "job" + SUFFIX) is None
    assert await rows(boss) == (1, 1, 0)
    assert await one.state(tomorrow) == "succeeded" and await one.state(dead) is None


async def test_nothing_due(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    assert await prune(one) is None
    await one.value("SELECT aioqueue.make_ranges(%s, 1)", DAY)
    assert await prune(one, 0, 0) is None, "the present range never goes"
    assert len(await ranges(boss)) == 2


async def test_unfinished_jobs_stay_where_they_are_in_their_life(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss)
    done, running, ready = await enqueue_then(one, 3)
    (scheduled,) = await one.enqueue(id=id_of(THEN + timedelta(hours=5)), delay=3600)
    worker = await one.register()
    first, second = await one.claim(worker, 2)
    assert [first.job_id, second.job_id] == [done, running]
    await one.record(worker, entry(first))
    await boss.rows("UPDATE aioqueue.outcome SET finished_at = %s", THEN)
    assert await prune(one) == 1
    assert [await one.state(j) for j in (done, running, ready, scheduled)] == [None, "running", "ready", "scheduled"]
    assert await partition_of(boss, "job", running) == "job_default"
    assert await one.record(worker, entry(second)) == {running: "succeeded"}
    assert await partition_of(boss, "outcome", running) == "outcome_default"
    assert (await one.claim_one(worker)).job_id == ready


async def test_a_running_jobs_earlier_attempts_stay_with_it(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss)
    (job_id,) = await enqueue_then(one, 1)
    worker = await one.register()
    await one.record(worker, entry(await one.claim_one(worker), "failed", m="first", d=0))
    await one.claim_one(worker)
    assert await prune(one) == 0
    assert [message for _, _, message in await boss.attempts(job_id)] == ["first"]
    assert await ranges(boss) == []


async def test_dead_and_cancelled_jobs_stay_longer(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss)
    now = datetime.now(UTC)
    old = await enqueue_then(one, 1)
    await run(one, boss, "failed", ended=now - timedelta(days=31))
    (young,) = await one.enqueue(id=id_of(THEN + timedelta(hours=2)))
    await run(one, boss, "failed", ended=now - timedelta(days=29))
    (cancelled,) = await one.enqueue(id=id_of(THEN + timedelta(hours=3)))
    await one.cancel(cancelled)
    await boss.rows("UPDATE aioqueue.outcome SET finished_at = %s WHERE job_id = %s", now - timedelta(days=8), cancelled)
    assert await prune(one) == 1
    assert [await one.state(job_id) for job_id in (*old, young, cancelled)] == [None, "dead", "cancelled"]
    assert len(await boss.attempts(young)) == 1


async def test_a_late_success_keeps_its_range_until_it_is_old_enough(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss)
    await enqueue_then(one, 2)
    ended = datetime.now(UTC) - timedelta(days=6)
    await run(one, boss, ended=ended, number=1)
    await run(one, boss, ended=THEN, number=1)
    assert await prune(one) == 0
    assert await boss.value("SELECT look_at FROM aioqueue.id_range") == ended + timedelta(days=7)
    assert await prune(one) is None, "it is not looked at again before"
    assert (await rows(boss))[0] == 2
    assert await prune(one, 5 * DAY) is None
    await boss.rows("UPDATE aioqueue.id_range SET look_at = NULL")
    assert await prune(one, 5 * DAY) == 2


async def test_many_that_must_stay_keep_their_range_for_a_day_and_more_of_them_for_longer(own: Connect) -> None:
    boss, one = await own("owner"), await own("worker")
    await make_old_ranges(boss)
    await enqueue_then(one, 3)
    kept = (datetime.now(UTC) - THEN - timedelta(days=1.5)).total_seconds()
    async with changed(boss, "prune_range", ("most := 5000 *", "most := 2 *")):
        assert await prune(one, kept) == 0
        assert await prune(one, kept) is None
        assert await ranges(boss) == [SUFFIX] and (await rows(boss))[0] == 3
        await boss.rows("UPDATE aioqueue.id_range SET look_at = NULL")
        assert await prune(one, kept - DAY) == 0
    assert await ranges(boss) == [] and (await rows(boss))[0] == 3


async def test_a_job_that_ends_while_the_range_is_looked_at_keeps_its_end(own: Connect) -> None:
    boss, one, two, watcher = await own("owner"), await own("worker"), await own("worker"), await own("superuser")
    await make_old_ranges(boss)
    (job_id,) = await enqueue_then(one, 1)
    worker = await two.register()
    job = await two.claim_one(worker)
    await boss.rows(f"SELECT pg_advisory_lock({GATE})")
    lock = "END IF;\n    LOCK TABLE ONLY aioqueue.job"
    wait = f"PERFORM set_config('lock_timeout', '0', true); PERFORM pg_advisory_xact_lock({GATE});"
    gate = lock.replace("LOCK TABLE", f"{wait} LOCK TABLE")
    async with changed(boss, "prune_range", (lock, gate)):
        async with blocked(watcher, one, prune(one), by=boss) as pruned:
            assert await two.record(worker, entry(job)) == {job_id: "succeeded"}
            await boss.rows(f"SELECT pg_advisory_unlock({GATE})")
            assert await pruned == 0
    assert await one.state(job_id) == "succeeded"
    assert await ranges(boss) == []


async def test_a_job_enqueued_into_the_range_meanwhile_waits_and_is_not_lost(own: Connect) -> None:
    boss, one, two, watcher = await own("owner"), await own("worker"), await own("worker"), await own("superuser")
    await make_old_ranges(boss)
    await enqueue_then(one, 1)
    await run(one, boss, ended=THEN)
    late = id_of(THEN + timedelta(hours=1))
    await one.begin()
    assert await prune(one) == 1
    async with blocked(watcher, two, two.enqueue(id=late), by=one) as enqueue:
        await one.commit()
        assert await enqueue == [late]
    assert await two.state(late) == "ready"
    assert (await two.claim_one(await two.register())).job_id == late


async def test_a_claim_that_waited_for_it_has_its_job(own: Connect) -> None:
    boss, one, two, watcher = await own("owner"), await own("worker"), await own("worker"), await own("superuser")
    await make_old_ranges(boss)
    (job_id,) = await enqueue_then(one, 1)
    worker = await two.register()
    await one.begin()
    assert await prune(one) == 0
    async with blocked(watcher, two, two.claim_one(worker), by=one) as claim:
        await one.commit()
        assert (await claim).job_id == job_id


async def test_it_gives_way_to_an_open_transaction_and_no_claim_waits_long(own: Connect) -> None:
    boss, one, two, caller = await own("owner"), await own("worker"), await own("worker"), await own("worker")
    await make_old_ranges(boss)
    await enqueue_then(one, 1)
    await run(one, boss, ended=THEN)
    await caller.begin()
    await caller.enqueue(50, priority=1)
    worker = await two.register()
    await one.enqueue(50)
    await two.rows("SET lock_timeout = '1s'")

    async def pruning() -> None:
        for _ in range(10):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await prune(one)

    async def claiming() -> None:
        for _ in range(50):
            await two.claim_one(worker)  # raises LockNotAvailable if it has to wait for longer

    await asyncio.gather(pruning(), claiming())
    await caller.commit()
    assert await prune(one) == 1


async def test_one_process_at_a_time_and_never_the_client(own: Connect) -> None:
    boss, one, two, guest = await own("owner"), await own("worker"), await own("worker"), await own("client")
    await make_old_ranges(boss)
    await one.begin()
    assert await prune(one) == 0
    assert await prune(two) is None
    await one.commit()
    for call in ("prune_range(1, 1)", "prune_default(1, 1, 1)", "make_ranges(1, 1)"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await guest.rows(f"SELECT aioqueue.{call}")
