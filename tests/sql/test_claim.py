"""claim: ready → running, once, by a living worker, in the order of positions, from the floor."""

from uuid import UUID

import psycopg
import pytest

from aioqueue.job import lane
from aioqueue.store import LOWEST_ID, WORKER_DEAD, LaneScan
from tests.sql.engine import LANE, Session, blocked, changed, entry

pytestmark = pytest.mark.anyio


async def refused(session: Session, worker: int) -> bool:
    try:
        await session.claim(worker)
    except psycopg.Error as error:
        assert error.sqlstate == WORKER_DEAD
        return True
    return False


async def test_a_claimed_job_is_running_with_all_that_the_worker_needs(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(task="mail", payload='{"to": "a"}', queue="q", priority=2, tenant="T", max_attempts=3)
    number = lane("q", 2)
    worker = await one.register()
    (job,) = await one.claim(worker, lanes=[number])
    assert (job.job_id, job.lane, job.attempt, job.spared) == (job_id, number, 1, 0)
    assert (job.task, job.queue, job.priority, job.tenant, job.max_attempts) == ("mail", "q", 2, "T", 3)
    assert job.payload == '{"to": "a"}'
    assert await one.state(job_id) == "running"
    assert await boss.rows("SELECT vt, worker, attempt, claimed_at IS NOT NULL FROM aioqueue.live") == [(job.vt, worker, 1, True)]
    assert await one.claim(worker, lanes=[number]) == []


async def test_the_attempt_counts_in_the_committed_claim_and_a_rollback_undoes_the_whole_claim(
    one: Session, two: Session
) -> None:
    worker = await one.register()
    await one.enqueue()
    await one.begin()
    first = await one.claim_one(worker)
    assert await two.claim(worker) == []
    await one.rollback()
    again = await two.claim_one(worker)
    assert (first.attempt, again.attempt, first.vt) == (1, 1, again.vt)


async def test_two_claims_at_once_share_the_jobs_and_neither_waits(one: Session, two: Session) -> None:
    jobs = set(await one.enqueue(10))
    a, b = await one.register(), await two.register()
    await one.begin()
    mine = await one.claim(a, 4)
    await two.rows("SET lock_timeout = '1ms'")
    theirs = await two.claim(b, 10)
    await one.commit()
    assert (len(mine), len(theirs)) == (4, 6)
    assert {job.job_id for job in mine + theirs} == jobs


async def test_jobs_are_claimed_in_the_order_of_their_positions(one: Session) -> None:
    jobs = await one.enqueue(20)
    worker = await one.register()
    claimed = [(await one.claim_one(worker)).job_id for _ in jobs]
    assert claimed == jobs


async def test_nothing_below_the_floor_is_claimed_and_the_floor_itself_is(boss: Session, one: Session) -> None:
    jobs = await one.enqueue(5)
    vts = dict(await boss.rows("SELECT job_id, vt FROM aioqueue.live"))
    worker = await one.register()
    found = await one.claim(worker, floor=(vts[jobs[2]], jobs[2]))
    assert {job.job_id for job in found} == set(jobs[2:])
    above = UUID(int=jobs[1].int + 1)
    found = await one.claim(worker, floor=(vts[jobs[1]], above))
    assert found == []
    assert {job.job_id for job in await one.claim(worker)} == set(jobs[:2])


async def test_lanes_of_a_group_share_before_one_of_them_fills_the_rest(one: Session) -> None:
    a, b, low = lane("a", 0), lane("b", 0), lane("a", -1)
    await one.enqueue(20, queue="a")
    await one.enqueue(3, queue="b")
    await one.enqueue(20, queue="a", priority=-1)
    worker = await one.register()
    scans = [
        LaneScan(a, (0, LOWEST_ID), 6, 0),
        LaneScan(b, (0, LOWEST_ID), 6, 0),
        LaneScan(low, (0, LOWEST_ID), 6, -1),
    ]

    async def take(limit: int) -> dict[int, int]:
        jobs = (await one.store.claim(one.conn, worker=worker, lanes=scans, limit=limit)).jobs
        return {number: sum(job.lane == number for job in jobs) for number in (a, b, low)}

    assert await take(12) == {a: 9, b: 3, low: 0}, "b has three, so that a fills the rest before a lower group"
    assert await take(12) == {a: 11, b: 0, low: 1}, "what a group leaves goes to the next"
    assert await take(30) == {a: 0, b: 0, low: 19}
    assert await take(30) == {a: 0, b: 0, low: 0}


async def test_jobs_of_several_lanes_come_lane_by_lane_in_the_order_of_their_positions(one: Session) -> None:
    numbers = [lane("q", 1), lane("p", 0), lane("q", 0)]
    given = {number: await one.enqueue(5, queue=q, priority=p) for q, p, number in (("q", 0, numbers[2]), ("p", 0, numbers[1]))}
    given[numbers[0]] = await one.enqueue(5, queue="q", priority=1)
    scans = [LaneScan(numbers[0], (0, LOWEST_ID), 9, 1), *(LaneScan(n, (0, LOWEST_ID), 2, 0) for n in numbers[1:])]
    found = (await one.store.claim(one.conn, worker=await one.register(), lanes=scans, limit=12)).jobs
    # Of the two that share, each has given its two before the first fills the rest.
    assert [job.job_id for job in found] == [*given[numbers[0]], *given[numbers[1]], *given[numbers[2]][:2]]


async def test_no_lanes_and_no_room_claim_nothing(one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    assert await one.claim(worker, lanes=[]) == []
    assert await one.claim(worker, 0) == []


async def test_an_unknown_a_dead_and_a_late_worker_claim_nothing(boss: Session, one: Session) -> None:
    await one.enqueue()
    assert await refused(one, 12345)
    late, resigned = await one.register(), await one.register()
    await boss.end_lease(late)
    await one.store.resign(one.conn, worker=resigned)
    assert await refused(one, late)
    assert await refused(one, resigned)
    assert len(await one.claim(await one.register())) == 1


async def test_a_claim_in_flight_is_out_of_rescues_way_and_its_job_is_rescued_later(
    boss: Session, one: Session, two: Session
) -> None:
    async def scenario() -> tuple[tuple[int, int] | None, str | None]:
        job_id = await one.enqueue_one()
        worker = await one.register()
        await one.begin()
        await one.claim_one(worker)
        await boss.end_lease(worker)
        during = await two.rescue()
        await one.commit()
        while await two.rescue() is not None:
            pass
        state = await two.state(job_id)
        await boss.rows("TRUNCATE aioqueue.live, aioqueue.worker")
        return during and (0, during[1]), state

    async with changed(boss, "claim", (" FOR KEY SHARE", "")):
        assert await scenario() == ((0, 0), "running"), "sabotaged: rescue saw no job of it, and it runs for ever"
    assert await scenario() == (None, "ready"), "the worker's row is locked by its claim"


async def test_a_zombie_claims_nothing_while_or_after_it_is_declared_dead(boss: Session, one: Session, two: Session) -> None:
    async def scenario() -> tuple[bool, str | None]:
        job_id = await one.enqueue_one()
        worker = await one.register()
        await boss.end_lease(worker)
        await two.begin()
        await two.rescue()
        answer = await refused(one, worker)
        await two.commit()
        assert await two.rescue() is None
        state = await two.state(job_id)
        await boss.rows("TRUNCATE aioqueue.live, aioqueue.worker")
        return answer, state

    fence = " AND NOT w.dead AND w.lease_until > clock_timestamp() FOR KEY SHARE"
    async with changed(boss, "claim", (fence, "")):
        assert await scenario() == (False, "running"), "sabotaged: its job runs for ever"
    assert await scenario() == (True, "ready")


async def test_a_claim_that_began_before_the_lease_ended_waits_for_rescue_and_is_refused(
    boss: Session, one: Session, two: Session
) -> None:
    await one.enqueue()
    worker = await one.register()
    await two.begin()
    # As rescue does, seen at the moment between its lock and its mark.
    await boss.begin()
    await boss.rows("SELECT 1 FROM aioqueue.worker WHERE id = %s FOR UPDATE", worker)
    async with blocked(two, one, refused(one, worker), by=boss) as answer:
        await boss.rows("UPDATE aioqueue.worker SET dead = true WHERE id = %s", worker)
        await boss.commit()
    await two.commit()
    assert answer.result()


async def test_a_beat_does_not_wait_for_a_claim_nor_a_claim_for_a_beat(one: Session, two: Session) -> None:
    await one.enqueue(2)
    worker = await one.register()
    for session in (one, two):
        await session.rows("SET lock_timeout = '1ms'")
    await one.begin()
    await one.claim_one(worker)
    assert await two.store.beat(two.conn, worker=worker, lease=30, running=1)
    await one.commit()
    await two.begin()
    assert await two.store.beat(two.conn, worker=worker, lease=30, running=1)
    assert len(await one.claim(worker)) == 1
    await two.commit()


async def test_no_claim_is_lost_where_a_row_moved_meanwhile(boss: Session, one: Session, two: Session) -> None:
    """A job handed back between two claims has a new position and a new attempt, and is nobody else's."""
    job_id = await one.enqueue_one()
    a, b = await one.register(), await two.register()
    first = await one.claim_one(a)
    await boss.publish(first.vt)
    await one.record(a, entry(first, "interrupted", d=0, s=True))
    second = await two.claim_one(b)
    assert (second.job_id, second.attempt, second.spared) == (job_id, 2, 1)
    assert second.vt > first.vt
    assert await one.record(a, entry(first)) == {}
    assert await one.places(job_id) == ["live"]


async def test_the_claim_is_the_only_update_of_live(boss: Session) -> None:
    """Anything else that changed a row in place could make a finish come back with nothing."""
    writers = await boss.rows(
        "SELECT proname FROM pg_proc WHERE pronamespace = trim(trailing '.' from 'aioqueue.')::regnamespace"
        r" AND prosrc ~* ('(update|merge\s+into)\s+(only\s+)?' "
        r" || regexp_replace('aioqueue.live', '([\".])', '\\\1', 'g') || '\M')"
    )
    assert sorted(writers) == [("claim",), ("claim_limited",)]


async def test_a_claim_changes_no_indexed_column(boss: Session, one: Session) -> None:
    """So that it can be a HOT update; another index on what a claim changes would end that."""
    indexed = {
        column
        for (column,) in await boss.rows(
            "SELECT attname FROM pg_index JOIN pg_attribute ON attrelid = indexrelid WHERE indrelid = 'aioqueue.live'::regclass"
        )
    }
    assert indexed == {"lane", "vt", "job_id", "tenant"}
    await one.enqueue(50)
    worker = await one.register()
    await one.begin()
    await one.claim(worker, 50)
    # Of this transaction alone: nobody else's late report is in it.
    counted = (
        "SELECT pg_stat_get_xact_tuples_updated(live), pg_stat_get_xact_tuples_hot_updated(live)"
        " FROM CAST('aioqueue.live'::regclass AS oid) live"
    )
    ((updated, hot),) = await one.rows(counted)
    await one.commit()
    assert updated == 50
    assert hot >= 45, "all but those whose page was full"


async def test_a_tenantless_and_another_lanes_job(one: Session) -> None:
    await one.enqueue(queue="elsewhere")
    job_id = await one.enqueue_one()
    worker = await one.register()
    jobs = await one.claim(worker, lanes=[LANE])
    assert [(job.job_id, job.tenant) for job in jobs] == [(job_id, None)]
