"""tick: virtual time, then the snapshot, then the floors' questions; losses, requests to cancel, what is due next."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from aioqueue.job import Position, lane, new_job_ids
from aioqueue.maintenance_store import LaneQuestion
from aioqueue.new_jobs import NewJobs
from aioqueue.store import LOWEST_ID
from tests.sql.conftest import Connect
from tests.sql.engine import GATE, GATED, LANE, NO_XID, Floors, Session, changed, entry

pytestmark = pytest.mark.anyio


async def test_it_publishes_what_was_claimed_and_reads_each_lanes_virtual_time(one: Session) -> None:
    """The next tick reads what this one published: V is read before anything else."""
    worker = await one.register()
    lanes = [lane("a", 0), lane("b", 0)]
    questions = [LaneQuestion(lanes[0], 4_000, (0, LOWEST_ID), None), LaneQuestion(lanes[1], 0, (0, LOWEST_ID), None)]
    for vts in ([0, 0], [4_000, 0]):
        assert (await one.store.tick(one.conn, worker=worker, questions=questions)).vts == vts
    for claimed, expected in ((3_000, 4_000), (5_000, 4_000), (0, 5_000)):
        assert (await one.tick(worker, claimed, number=lanes[0])).vts == [expected]
    assert (await one.store.tick(one.conn, worker=worker, questions=[])).vts == []


async def test_it_finds_the_first_ready_job_of_the_stretch(one: Session) -> None:
    jobs = await one.enqueue(5)
    worker = await one.register()
    first = await one.claim_one(worker)

    async def ask(start: tuple[int, UUID], upto: int | None) -> Position | None:
        seen = await one.store.tick(one.conn, worker=worker, questions=[LaneQuestion(LANE, 0, start, upto)])
        return seen.firsts[0]

    assert first.vt == 1_000
    assert await ask((0, LOWEST_ID), 10_000) == Position(2_000, jobs[1])
    assert await ask((0, LOWEST_ID), 2_000) == Position(2_000, jobs[1])
    assert await ask((0, LOWEST_ID), 1_999) is None
    assert await ask((2_000, jobs[1]), 10_000) == Position(2_000, jobs[1])
    assert await ask((2_000, UUID(int=jobs[1].int + 1)), 10_000) == Position(3_000, jobs[2])
    assert await ask((0, LOWEST_ID), None) is None, "not asked"


async def test_a_job_claimed_by_a_transaction_in_flight_still_counts_as_ready(one: Session, two: Session) -> None:
    (job_id,) = await one.enqueue()
    worker = await one.register()
    await one.begin()
    await one.claim_one(worker)
    assert (await two.tick(worker, upto=10_000)).firsts == [Position(1_000, job_id)]
    await one.commit()
    assert (await two.tick(worker, upto=10_000)).firsts == [None]


async def test_a_transaction_that_runs_is_in_the_snapshot_and_ended_ones_are_not(one: Session, two: Session) -> None:
    worker = await one.register()
    await two.begin()
    await two.enqueue()
    xid = int(str(await two.value("SELECT pg_current_xact_id()")))
    seen = (await one.tick(worker)).snapshot
    assert xid in seen.running
    assert xid < seen.xmax
    await two.commit()
    assert xid not in (await one.tick(worker)).snapshot.running


async def test_the_job_of_a_transaction_that_starts_between_virtual_time_and_snapshot_is_found(
    boss: Session, one: Session, two: Session, three: Session, connect: Connect
) -> None:
    """The order of the tick: with the snapshot first, that job would lie below the floor for ever."""
    gate = await connect("owner")

    async def scenario(moment: str) -> int:
        worker = await one.register()
        floors = Floors(one, worker)
        await gate.value("SELECT pg_advisory_lock(%s)", GATE)
        await one.rows(f"SET test.gate = '{moment}'")
        ticking = asyncio.create_task(floors.tick())
        await boss.wait_blocked(one, gate)
        # It takes its XID and its position now, and others move on past it before it commits.
        await two.begin()
        await two.enqueue(tenant="late")
        await boss.publish(await boss.value("SELECT aioqueue.virtual_time(%s)", LANE) + 100_000)
        await gate.value("SELECT pg_advisory_unlock(%s)", GATE)
        await ticking
        await one.rows("RESET test.gate; SELECT pg_advisory_unlock_all()")
        await floors.ticks()
        await two.commit()
        await floors.ticks()
        found = await floors.claim()
        await boss.rows("TRUNCATE aioqueue.live")
        return len(found)

    first = "    FOR i IN 1..cardinality(p_lanes) LOOP\n        vts :="
    taken = "    own := pg_current_xact_id()::text::bigint;\n    seen := pg_current_snapshot();\n"
    async with changed(boss, "virtual_time", *GATED):
        async with changed(boss, "tick", (taken, ""), (first, taken + first)):
            assert await scenario("before") == 0, "sabotaged: the job is lost"
        assert await scenario("after") == 1
        assert await scenario("before") == 1


@pytest.mark.parametrize("seconds", [0.0, 5.0])
async def test_a_transaction_that_has_the_newest_xid_of_all_is_waited_for(
    boss: Session, one: Session, two: Session, seconds: float
) -> None:
    """A snapshot's xmax is one above the last XID that ENDED: the newest ones may run, unnamed, from there on."""

    async def scenario() -> int:
        start = await boss.value("SELECT aioqueue.virtual_time(%s)", LANE)
        await one.enqueue(50, tenant="big")
        worker = await one.register()
        floors = Floors(one, worker)
        await floors.claim(50)
        await two.begin()
        await two.enqueue(tenant="late")
        await floors.ticks(4)
        floors.now += seconds
        await floors.ticks(4)
        if seconds:
            assert floors.floor.value > start + 1_000, "a long transaction holds no floor back"
        await two.commit()
        await floors.ticks(1)
        found = await floors.claim()
        await boss.rows("TRUNCATE aioqueue.live")
        return len(found)

    # As one that reads V after it has published what was claimed, and takes the snapshot as it is.
    published = "        PERFORM aioqueue.publish(p_lanes[i], p_claimed_vts[i]);\n"
    reads = "        vts :="
    async with changed(
        boss, "tick", (published, "NULL;"), (reads, published + reads),
        ("':' || own || ':'", "':' || pg_snapshot_xmax(seen)::text || ':'"),
        ("own - 1)", "-1)"),
    ):  # fmt: skip
        assert await scenario() == 0, "sabotaged: the job is lost"
    assert await scenario() == 1


async def test_a_job_whose_transaction_took_its_position_before_its_xid_would_be_lost(
    boss: Session, one: Session, connect: Connect
) -> None:
    """XID before position: make_ready with and without its first line, held up after it has read virtual time."""
    gate, owner = await connect("owner"), await connect("owner")

    async def scenario() -> int:
        worker = await one.register()
        floors = Floors(one, worker)
        await owner.begin()
        await owner.rows("SET LOCAL test.gate = 'after'")
        await gate.value("SELECT pg_advisory_lock(%s)", GATE)
        making = asyncio.create_task(
            owner.rows(
                "SELECT aioqueue.make_ready(%s::bigint[], ARRAY[gen_random_uuid()], ARRAY['T'], ARRAY[0], ARRAY[0])", [LANE]
            )
        )
        await boss.wait_blocked(owner, gate)
        await boss.publish(await boss.value("SELECT aioqueue.virtual_time(%s)", LANE) + 100_000)
        await floors.ticks()
        await gate.value("SELECT pg_advisory_unlock(%s)", GATE)
        await making
        await owner.commit()
        await owner.rows("SELECT pg_advisory_unlock_all()")
        await floors.ticks()
        found = await boss.value("SELECT count(*) FROM aioqueue.live WHERE (vt, job_id) >= (%s, %s)", *floors.floor.start)
        await boss.rows("TRUNCATE aioqueue.live")
        return int(found)

    async with changed(boss, "virtual_time", *GATED):
        async with changed(boss, "make_ready", ("    PERFORM pg_catalog.pg_current_xact_id();\n", "")):
            assert await scenario() == 0, "sabotaged: the job lies below the floor"
        assert await scenario() == 1


async def test_every_way_into_live_takes_its_xid_before_it_reads_virtual_time(boss: Session, one: Session) -> None:
    worker = await one.register()
    async with changed(boss, "virtual_time", *NO_XID):
        with pytest.raises(Exception, match="position before XID"):
            await boss.value("SELECT aioqueue.virtual_time(1)")
        await one.enqueue(4)
        await one.enqueue(delay=60)
        jobs = await one.claim(worker)
        await one.record(worker, entry(jobs[0], "error", d=0), entry(jobs[1], "interrupted", d=0, s=True))
        await boss.rows("UPDATE aioqueue.scheduled SET run_at = '2020-01-01Z'")
        assert await one.store.promote(one.conn, limit=10) == 1
        await boss.end_lease(worker)
        assert await one.rescue(limit=1) == (worker, 1)
        await boss.rows("DELETE FROM aioqueue.worker")
        assert await one.store.rescue_orphans(one.conn, limit=1) == 1
        await one.rows("SELECT aioqueue.enqueue('t')")
        for number in (1, 100):
            jobs_alike = NewJobs(task="t", ids=new_job_ids(number), payloads=["1"] * number)
            await one.store.enqueue_alike(one.conn, jobs_alike)
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 107


async def test_every_way_into_scheduled_takes_its_xid_before_it_reads_the_clock(boss: Session, one: Session) -> None:
    """A row is never due before the moment its transaction had its XID; see the floor of scheduled."""
    task: dict[str, object] = {"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}

    async def moment() -> datetime:
        await one.begin()
        await one.rows("SELECT pg_current_xact_id()")
        at: datetime = await one.value("SELECT clock_timestamp()")
        return at

    await one.enqueue(3)
    worker = await one.register()
    jobs = await one.claim(worker)
    at = await moment()
    await one.enqueue(run_at=at + timedelta(microseconds=1))
    await one.enqueue(delay=1e-6)
    await one.store.enqueue_alike(one.conn, NewJobs(task="t", ids=new_job_ids(2), payloads=["1"] * 2, delay=1e-6))
    await one.record(worker, entry(jobs[0], "error", d=1e-6), entry(jobs[1], "unknown task", d=1e-6, s=True, u="t"))
    await one.commit()
    assert await boss.value("SELECT count(*) FROM aioqueue.scheduled WHERE run_at <= %s", at) == 0
    at = await moment()
    await one.register(tasks=[task])
    await one.commit()
    assert await boss.value("SELECT count(*) FROM aioqueue.scheduled WHERE run_at > %s", at) == 1
    assert await boss.value("SELECT count(*) FROM aioqueue.scheduled WHERE unknown_task IS NOT NULL") == 0


async def test_losses(boss: Session, one: Session) -> None:
    mine, other = await one.register(), await one.register()
    assert not (await one.tick(mine)).losses
    await boss.end_lease(mine)
    assert not (await one.tick(mine)).losses, "not its own"
    assert (await one.tick(other)).losses
    await one.rescue()
    assert not (await one.tick(other)).losses


async def test_a_request_to_cancel_goes_once_its_job_is_gone(boss: Session, one: Session) -> None:
    await one.enqueue(2)
    worker = await one.register()
    ended, running = await one.claim(worker)
    for job in (ended, running):
        await one.cancel(job.job_id)
    await one.record(worker, entry(ended))
    assert set((await one.tick(worker)).cancelled) == {ended.job_id, running.job_id}
    assert (await one.tick(worker)).cancelled == [running.job_id]
    assert await boss.rows("SELECT job_id FROM aioqueue.cancel") == [(running.job_id,)]


async def test_what_is_due_first_and_next(boss: Session, one: Session) -> None:
    worker = await one.register()

    async def ask(since: datetime, upto: datetime | None) -> tuple[datetime | None, datetime | None]:
        seen = await one.store.tick(one.conn, worker=worker, questions=[], due_from=since, due_to=upto)
        return seen.first_due, seen.next_due

    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)
    long_ago = datetime(1970, 1, 1, tzinfo=UTC)
    assert await ask(long_ago, late) == (None, None)
    for at in (late, early):
        await one.enqueue(run_at=at)
    assert await ask(long_ago, late) == (early, early)
    assert await ask(long_ago, None) == (None, early)
    assert await ask(early + timedelta(microseconds=1), late) == (late, late)
    assert await ask(long_ago, early - timedelta(microseconds=1)) == (None, early)


async def test_the_server_is_named_by_timeline_and_start(one: Session) -> None:
    worker = await one.register()
    first, again = await one.tick(worker), await one.tick(worker)
    assert first.server == again.server
    assert first.server[0] == "00000001"
    assert first.server[1] < first.clock <= again.clock


async def test_nothing_of_it_outlives_its_transaction(one: Session) -> None:
    worker = await one.register()
    names = "synchronous_commit", "enable_seqscan", "plan_cache_mode", "jit", "search_path"
    before = [await one.value(f"SHOW {name}") for name in names]
    await one.tick(worker, 50_000)
    assert [await one.value(f"SHOW {name}") for name in names] == before


async def test_two_ticks_at_once_never_move_virtual_time_back(boss: Session, one: Session, two: Session) -> None:
    worker = await one.register()

    async def now() -> int:
        return int(await boss.value("SELECT aioqueue.virtual_time(%s)", LANE))

    await one.begin()
    await one.tick(worker, 9_000)
    assert await now() == 9_000, "a sequence is outside the transaction"
    await two.rows("SET lock_timeout = '1ms'")
    await two.tick(worker, 12_000)
    assert await now() == 9_000, "the cell is held: a later tick moves it"
    await one.rollback()
    await two.tick(worker, 5_000)
    assert await now() == 9_000
    await two.tick(worker, 12_000)
    assert await now() == 12_000


async def test_lanes_of_paused_queues_are_named_and_asked_about_all_the_same(one: Session) -> None:
    """Their ready rows hold the floor; they are no work."""
    await one.enqueue()
    worker = await one.register()
    await one.store.set_queue(one.conn, "default", paused=True)
    tick = await one.tick(worker, upto=10_000)
    assert LANE in tick.paused and tick.firsts != [None]
    await one.store.set_queue(one.conn, "default", paused=False)
    assert (await one.tick(worker)).paused == frozenset()
