"""The claimer: which lanes come first and how many slots each gets, claims without an answer, bounds on what is asked for."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue import JobTransaction, LimitSettings, PoolSettings, WorkerSettings, suspect
from aioqueue.claim import Claimer
from aioqueue.claimed import Claimed, Fence
from aioqueue.database import AHEAD, Database
from aioqueue.events import DatabaseLost, DatabaseRecovered, JobClaimed, JobRecorded, ListenerConnected, Observers
from aioqueue.floor import Floors
from aioqueue.job import SUSPECT, lane
from aioqueue.lanes import LOWEST_FIRST, Lanes
from aioqueue.one_claim import OneClaim
from aioqueue.pool_connection import sever
from aioqueue.slots import AHEAD as QUICK
from aioqueue.store import LOWEST_ID, LaneScan
from aioqueue.suspect import SuspectTurn
from tests.kit import MakeApp, Seen, passed
from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


# -- lanes -----------------------------------------------------------------------------------------------------------------


def lanes_of(queues: dict[str, int]) -> tuple[Lanes, Floors]:
    lanes = Lanes(queues)
    return lanes, Floors(lanes.all(), LOWEST_ID)


def test_lanes_are_visited_by_priority_and_within_one_the_queues_in_turn() -> None:
    lanes, floors = lanes_of({"a": 1, "b": 1, "c": 1})
    names = {lane(queue, priority): (queue, priority) for queue in "abc" for priority in range(-2, 3)}
    firsts = []
    for _ in range(3):
        visited = [names[scan.lane] for scan in lanes.scans(floors, 10)]
        assert [priority for _, priority in visited] == [p for p in (2, 1, 0, -1, -2) for _ in range(3)]
        assert sorted(visited) == sorted(names.values())
        firsts.append(visited[0][0])
    assert sorted(firsts) == ["a", "b", "c"]


def test_queues_share_by_weight_and_each_has_at_least_one() -> None:
    lanes, floors = lanes_of({"a": 6, "b": 3, "c": 1})

    def shares(limit: int) -> dict[int, int]:
        return {scan.lane: scan.share for scan in lanes.scans(floors, limit)}

    of_100, of_2 = shares(100), shares(2)
    for priority in range(-2, 3):
        assert [of_100[lane(queue, priority)] for queue in "abc"] == [60, 30, 10]
        assert [of_2[lane(queue, priority)] for queue in "abc"] == [1, 1, 1]


def test_one_claim_in_twenty_starts_at_the_lowest_priority() -> None:
    lanes, floors = lanes_of({"a": 1})
    low = lane("a", -2)
    lowest_first = [lanes.scans(floors, 10)[0].lane == low for _ in range(10 * LOWEST_FIRST)]
    assert sum(lowest_first) == 10


def test_scans_begin_at_the_floor() -> None:
    lanes, floors = lanes_of({"a": 1})
    floors[lane("a", 0)].value = 7
    (scan,) = [scan for scan in lanes.scans(floors, 10) if scan.lane == lane("a", 0)]
    assert scan == LaneScan(lane("a", 0), (7, LOWEST_ID), 10, 0)


async def test_higher_priorities_run_first(make_app: MakeApp, seen: Seen) -> None:
    app = make_app()

    @app.task(name="long")
    async def long() -> None:
        # Of short ones the next are claimed ahead, by two claims at once, whose answers may come in either order.
        await asyncio.sleep(2 * QUICK)

    async with app:
        made = {p: await long.options(priority=p).enqueue() for p in (-2, 0, 2, -1, 1)}
        async with app.worker(concurrency=1):
            for job in made.values():
                await job.result(30)
    assert [e.job_id for e in seen.all(JobClaimed)] == [made[p].id for p in (2, 1, 0, -1, -2)]


async def test_the_lowest_priority_is_not_starved_by_a_steady_stream(make_app: MakeApp, seen: Seen) -> None:
    app = make_app(worker=WorkerSettings(claim_batch=1))
    async with app:
        low = await app.get("add").options(priority=-2).enqueue(0)
        await app.get("add").options(priority=2).enqueue_many([{"a": n} for n in range(200)])
        async with app.worker(concurrency=1):
            await seen.wait(JobRecorded, 201)
    assert [e.job_id for e in seen.all(JobClaimed)].index(low.id) <= LOWEST_FIRST


async def test_a_busy_queue_leaves_the_other_its_share_of_the_slots(make_app: MakeApp, seen: Seen) -> None:
    app = make_app()
    goes_on = asyncio.Event()

    @app.task(name="hold")
    async def hold() -> None:
        await goes_on.wait()

    async with app:
        await hold.options(queue="big").enqueue_many([()] * 50)
        small = await hold.options(queue="small").enqueue_many([()] * 50)
        async with app.worker(queues=["big:3", "small:1"], concurrency=20):
            await seen.wait(JobClaimed, 20)
            ids = {job.id for job in small}
            assert sum(e.job_id in ids for e in seen.all(JobClaimed)) == 5
            goes_on.set()
            await seen.wait(JobRecorded, 100)


async def test_a_queue_that_is_not_served_is_left_alone(make_app: MakeApp, seen: Seen) -> None:
    app = make_app()
    async with app:
        other = await app.get("add").options(queue="other").enqueue(1)
        async with app.worker():
            await (await app.get("add").enqueue(1)).result(30)
        assert not seen.all(JobClaimed, job_id=other.id)


async def test_a_backlog_is_claimed_in_batches(make_app: MakeApp, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    sizes: list[int] = []
    async with app:
        claim = app.store.claim

        async def count(conn: AsyncConnection[Any], **options: Any) -> Any:
            found = await claim(conn, **options)
            sizes.append(len(found.jobs))
            assert len(found.jobs) <= options["limit"]
            return found

        monkeypatch.setattr(app.store, "claim", count)
        await app.get("add").enqueue_many([{"a": n} for n in range(1_000)])
        await app.worker(drain=True).run()
    assert sum(sizes) == 1_000
    filled = [size for size in sizes if size]  # none are asked for on a new connection
    assert len(filled) <= 60
    assert filled[0] == 100, "one for each slot"
    assert max(sizes) <= 250


async def test_no_more_is_claimed_than_there_are_slots(make_app: MakeApp, seen: Seen) -> None:
    app = make_app()
    running = 0
    most = 0

    @app.task(name="count")
    async def count() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    async with app:
        await count.enqueue_many([()] * 200)
        await app.worker(drain=True, concurrency=7).run()
    assert most <= 7


# -- claims without an answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poll", [0.1, 3600.0])
async def test_a_claim_whose_answer_is_lost_is_handed_back_spared_and_run(
    make_app: MakeApp, seen: Seen, boss: Session, monkeypatch: pytest.MonkeyPatch, poll: float
) -> None:
    """The connection dies right after the server has committed the claim."""
    app = make_app(worker=WorkerSettings(poll=poll, tick=0.05))
    async with app:
        claim = app.store.claim
        lost: list[Any] = []
        warm = 0

        async def lose_the_answer(conn: AsyncConnection[Any], **options: Any) -> Any:
            found = await claim(conn, **options)
            if found.jobs and warm and not lost:
                lost.extend(found.jobs)
                sever(conn)
                await conn.execute("SELECT 1")
            return found

        monkeypatch.setattr(app.store, "claim", lose_the_answer)
        async with app.worker():
            # Once the listener stands, nothing but the enqueue itself wakes the claimer.
            await seen.wait(ListenerConnected)
            warm = await (await app.get("add").options(priority=2).enqueue(1)).result(30)
            jobs = await app.get("add").enqueue_many([{"a": n} for n in range(10)])
            assert [await job.result(60) for job in jobs] == list(range(1, 11))
    assert len(lost) == 10
    assert await boss.rows("SELECT attempt, spared, count(*) FROM aioqueue.outcome GROUP BY 1, 2 ORDER BY 1") == [
        (1, 0, 1), (2, 1, 10),
    ]  # fmt: skip
    assert await boss.rows("SELECT DISTINCT reason FROM aioqueue.attempt") == [("interrupted",)]
    assert seen.all(DatabaseLost, loop="claimer")
    assert seen.all(DatabaseRecovered, loop="claimer")


async def test_a_job_that_runs_is_not_taken_for_one_of_a_lost_claim(
    make_app: MakeApp, seen: Seen, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(worker=WorkerSettings(poll=0.1))
    goes_on, inside = asyncio.Event(), asyncio.Event()

    @app.task(name="hold")
    async def hold() -> str:
        inside.set()
        await goes_on.wait()
        return "once"

    async with app, app.worker():
        held = await hold.enqueue()
        await passed(inside)
        claim, unknown = app.store.claim, app.store.unknown_claims
        looked = asyncio.Event()
        cuts = [1]

        async def cut(conn: AsyncConnection[Any], **options: Any) -> Any:
            if cuts and options["limit"]:  # none are asked for on a new connection, which may be opened meanwhile
                cuts.pop()
                sever(conn)
            return await claim(conn, **options)

        async def look(conn: AsyncConnection[Any], **options: Any) -> Any:
            found = await unknown(conn, **options)
            looked.set()
            return found

        monkeypatch.setattr(app.store, "claim", cut)
        monkeypatch.setattr(app.store, "unknown_claims", look)
        await passed(looked)
        await (await app.get("add").enqueue(1)).result(30)
        goes_on.set()
        assert await held.result(30) == "once"
    assert await boss.rows("SELECT DISTINCT attempt, spared FROM aioqueue.outcome") == [(1, 0)]


async def test_a_claim_without_an_answer_is_found_beside_an_earlier_attempt_of_the_same_job(
    worker_dsn: str, boss: Session
) -> None:
    """The first attempt ignores its cancellation and still runs here; its outcome is recorded."""
    worker = await boss.register()
    await boss.enqueue_one()
    first = await boss.claim_one(worker)
    await boss.record(worker, entry(first, "time limit", d=0, t="T", m="m", b=None))
    second = await boss.claim_one(worker)
    assert (second.job_id, second.attempt) == (first.job_id, 2)
    for known, found in (({first.fence}, [second.fence]), ({first.fence, second.fence}, [])):
        async with claimer_of(worker_dsn, boss, worker, known) as (claimer, put):
            claimer._one_claim.unanswered = time.monotonic() + 60
            await claimer._one_claim.hand_back_unknown()
        assert [job.fence for job in put] == found


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (psycopg.errors.LockNotAvailable("busy"), False),
        (psycopg.errors.QueryCanceled("too long"), False),
        (psycopg.errors.AdminShutdown("gone"), True),
        (psycopg.OperationalError("gone"), True),
    ],
)
async def test_a_claim_that_the_server_refuses_took_nothing(
    worker_dsn: str, boss: Session, monkeypatch: pytest.MonkeyPatch, error: psycopg.Error, unknown: bool
) -> None:
    worker = await boss.register()
    claim, errors = boss.store.claim, [error]

    async def refuse(conn: AsyncConnection[Any], **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return await claim(conn, **options)

    monkeypatch.setattr(boss.store, "claim", refuse)
    async with claimer_of(worker_dsn, boss, worker, set()) as (claimer, _):
        await claimer._claim(1)
        assert (claimer._one_claim.unanswered is not None) is unknown


class Standing:
    """A lease that holds, and slots in which nothing runs but what is known."""

    def __init__(self, worker: int, known: set[Fence]) -> None:
        self.worker = worker
        self.room, self.busy, self.waiting = 1, 0, 0
        self.empty = asyncio.Event()
        self.known = known.copy

    async def wait_proven(self) -> None:
        pass

    def refused(self, worker: int) -> None:
        raise AssertionError(worker)

    def longest_left(self) -> float:
        return 0.0

    async def wait_for_room(self) -> None:
        pass

    async def wait_freed(self) -> None:
        pass

    def start(self, job: Claimed) -> None:
        raise AssertionError(job)


@asynccontextmanager
async def claimer_of(dsn: str, boss: Session, worker: int, known: set[Fence]) -> AsyncIterator[tuple[Claimer, list[Claimed]]]:
    """A claimer that does not run, and what it hands back."""
    database = Database(dsn, PoolSettings())
    await database.open()
    lanes, put = Lanes({"default": 1}), list[Claimed]()
    standing = Standing(worker, known)
    try:
        floors = Floors(lanes.all(), LOWEST_ID)
        one_claim = OneClaim(
            database,
            boss.store,
            Observers(),
            lanes=lanes,
            floors=floors,
            lease=standing,
            known=standing.known,
            put=lambda job, _: put.append(job),
            claimed=lambda: None,
            passed=lambda _: None,
        )
        yield (
            Claimer(
                database,
                one_claim,
                settings=WorkerSettings(),
                lanes=lanes,
                floors=floors,
                lease=standing,
                slots=standing,
                wait_room=standing.wait_for_room,
            ),
            put,
        )
    finally:
        await database.close()


# -- suspects --------------------------------------------------------------------------------------------------------------


async def make_suspect(boss: Session, job_id: UUID) -> None:
    """As after the second loss (sql/functions/rescue_job.sql)."""
    await boss.rows("UPDATE aioqueue.live SET lane = %s WHERE job_id = %s", lane("default", SUSPECT), job_id)


async def test_a_busy_worker_goes_on_beside_a_ready_suspect_and_runs_it_alone_in_the_end(
    make_app: MakeApp, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspect, "PATIENCE", (0.0, 0.0))
    monkeypatch.setattr(suspect, "SPELL", 0.2)
    app = make_app()
    inside, goes_on, drains = asyncio.Event(), asyncio.Event(), asyncio.Event()
    beside: list[int] = []
    seconds = SuspectTurn.seconds

    def spy(turn: SuspectTurn, now: float, **facts: float) -> float:
        found = seconds(turn, now, **facts)
        if found:
            drains.set()
        return found

    monkeypatch.setattr(SuspectTurn, "seconds", spy)

    @app.task(name="long")
    async def long() -> None:
        inside.set()
        await goes_on.wait()

    @app.task(name="bomb")
    async def bomb() -> None:
        beside.append(worker.running)

    async with app:
        lonely = await bomb.options(delay=3600).enqueue()
        async with app.worker() as worker:
            await long.enqueue()
            await passed(inside)
            await boss.rows("DELETE FROM aioqueue.scheduled")
            await boss.rows(
                "INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared) VALUES (%s, 1, %s, '', 2, 0)",
                lane("default", SUSPECT),
                lonely.id,
            )
            await passed(drains)
            for n in range(20):
                assert await (await app.get("add").enqueue(n)).result(30) == n + 1
            assert beside == []
            goes_on.set()
            await lonely.result(60)
    assert beside == [1]


async def test_an_idle_worker_runs_suspects_one_after_the_other_without_a_poll(make_app: MakeApp, boss: Session) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app, app.worker():
        jobs = await app.get("add").options(delay=3600).enqueue_many([{"a": n} for n in range(5)])
        await boss.rows(
            "WITH gone AS (DELETE FROM aioqueue.scheduled RETURNING job_id)"
            " INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared) SELECT %s, 1, job_id, '', 2, 0 FROM gone",
            lane("default", SUSPECT),
        )
        assert [await job.result(30) for job in jobs] == [1, 2, 3, 4, 5]


async def test_drain_does_not_end_before_the_suspects_are_run(make_app: MakeApp, boss: Session, seen: Seen) -> None:
    app = make_app()
    async with app:
        jobs = await app.get("add").enqueue_many([{"a": n} for n in range(5)])
        for job in jobs[2:]:
            await make_suspect(boss, job.id)
        await app.worker(drain=True).run()
        assert [await job.result(0) for job in jobs] == [1, 2, 3, 4, 5]


async def test_drain_ends_without_a_poll_also_when_its_wake_up_comes_before_the_last_jobs(
    make_app: MakeApp, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    monkeypatch.setattr(app, "on_ready", lambda _: None)  # a hint's wake-up would do as well as the poll
    woken = asyncio.Event()
    wake, claim = Claimer.wake, app.store.claim
    looks = 0

    def note(self: Claimer) -> None:
        wake(self)
        woken.set()

    async def look(conn: AsyncConnection[Any], **asked: Any) -> Any:
        nonlocal looks
        looks += asked["limit"] > 0  # none are asked for on a new connection
        claims = await claim(conn, **asked)
        if looks == 1 and asked["limit"]:
            await boss.rows("SELECT aioqueue.enqueue('add', '{\"a\": 1}')")
            await passed(woken)  # the drain asks for a look, which is the next one, and that has a job
            claims.more = True
        return claims

    monkeypatch.setattr(Claimer, "wake", note)
    monkeypatch.setattr(app.store, "claim", look)
    async with app, asyncio.timeout(30):
        await app.worker(drain=True).run()
    assert await boss.rows("SELECT state FROM aioqueue.outcome") == [("succeeded",)]


# -- connections -----------------------------------------------------------------------------------------------------------


async def test_jobs_that_would_wait_for_a_connection_for_long_are_not_claimed(
    make_app: MakeApp, seen: Seen, boss: Session
) -> None:
    app = make_app(pool=PoolSettings(size=4), limits=LimitSettings(transaction_wait=60))
    goes_on = asyncio.Event()

    @app.task(name="own")
    async def own(tx: JobTransaction) -> None:
        await goes_on.wait()

    async with app, app.worker(concurrency=100):
        await own.enqueue_many([()] * 6)
        await seen.wait(JobClaimed, 6)
        # Four of them wait for a connection now, and none is free, nor comes back in the time that others may wait.
        while app.database.waiting < 4 or app.database.bounded(100, busy=6, coming=0):
            await boss.value("SELECT 1")
        more = await own.enqueue_many([()] * 20)
        assert app.database.free_for_jobs == 0
        before = await boss.value("SELECT clock_timestamp()")
        while await boss.value("SELECT clock_timestamp() < %s::timestamptz + interval '0.3 s'", before):
            assert len(seen.all(JobClaimed)) == 6
        goes_on.set()
        for job in more:
            await job.result(60)
    assert await boss.rows("SELECT DISTINCT attempt, spared FROM aioqueue.outcome") == [(1, 0)]


async def test_of_short_transactions_a_few_for_each_connection_are_claimed_at_once(
    make_app: MakeApp, seen: Seen, boss: Session
) -> None:
    app = make_app(pool=PoolSettings(size=4), limits=LimitSettings(transaction_wait=60))  # the first ones' on a busy machine
    under_way: list[int] = []

    @app.task(name="own")
    async def own(tx: JobTransaction) -> None:
        under_way.append(app.database.waiting)

    async with app:
        await own.enqueue_many([()] * 300)
        await app.worker(concurrency=100, drain=True).run()
    assert len(under_way) == 300
    # What the first claims took, not knowing what jobs these are, is over by then.
    assert median(under_way[150:]) <= 2 * (1 + AHEAD)
    # Two claims at once, and what others have begun meanwhile without being counted yet.
    assert max(under_way[200:]) <= 2.5 * 2 * (1 + AHEAD), "all the slots' without the bound"
    assert await boss.rows("SELECT DISTINCT attempt, spared FROM aioqueue.outcome") == [(1, 0)]
