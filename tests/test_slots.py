"""Slots: jobs beyond them wait for a moment, no more than will start soon; what does not is handed back."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from psycopg import AsyncConnection

from aioqueue import AioQueue, slots
from aioqueue.events import JobRecorded
from aioqueue.job import JobState
from tests.kit import MakeApp, Seen, passed, until, until_true
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

leaked: contextvars.ContextVar[int] = contextvars.ContextVar("leaked", default=0)


class Holding:
    """An app whose slots are all taken by jobs that wait, and that has claimed some more."""

    def __init__(self, app: AioQueue, seen: Seen) -> None:
        self.app, self.seen = app, seen
        self.goes_on, self.both = asyncio.Event(), asyncio.Event()
        self.started: list[int] = []

        @app.task(name="hold")
        async def hold(n: int) -> None:
            self.started.append(n)
            if len(self.started) == 2:
                self.both.set()
            await self.goes_on.wait()

        self.hold = hold


@pytest.fixture
async def holding(make_app: MakeApp, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Holding]:
    """As after a stretch of short jobs: ten more than the slots may be claimed."""
    monkeypatch.setattr(
        slots.Slots, "room", property(lambda s: max(0, s.concurrency + 10 - len(s.runner.runs) - len(s._waiting)))
    )
    app = make_app()
    async with app:
        yield Holding(app, seen)


async def claimed(boss: Session, number: int) -> None:
    await until(boss, f"SELECT count(*) = {number} FROM aioqueue.live WHERE worker IS NOT NULL")


async def test_jobs_claimed_ahead_run_as_slots_become_free_never_more_at_once(holding: Holding, boss: Session) -> None:
    jobs = await holding.hold.enqueue_many([(n,) for n in range(9)])
    async with holding.app.worker(concurrency=2):
        await claimed(boss, 9)
        await passed(holding.both)
        assert len(holding.started) == 2
        assert (await jobs[8].status()).state == JobState.RUNNING
        holding.goes_on.set()
        for job in jobs:
            await job.result(30)
    assert holding.started == list(range(9)), "in the order of their positions"
    assert {event.attempt for event in holding.seen.all(JobRecorded)} == {1}


async def test_a_stop_hands_back_what_waits_for_a_slot_spared(holding: Holding, boss: Session) -> None:
    jobs = await holding.hold.enqueue_many([(n,) for n in range(5)])
    async with holding.app.worker(concurrency=2) as worker:
        await claimed(boss, 5)
        await passed(holding.both)
        worker.stop()
        await holding.seen.wait(JobRecorded, 3)
        assert len(holding.started) == 2
        holding.goes_on.set()
    states = [await job.status() for job in jobs]
    assert sorted((s.state, s.attempt, s.spared) for s in states) == [("ready", 1, 1)] * 3 + [("succeeded", 1, 0)] * 2


async def test_what_waits_too_long_for_a_slot_is_handed_back_spared(
    holding: Holding, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "LATE", 0.05)
    await holding.hold.enqueue_many([(n,) for n in range(5)])
    async with holding.app.worker(concurrency=2):
        await holding.seen.wait(JobRecorded, 3)
        assert {(e.state, e.error) for e in holding.seen.all(JobRecorded)} == {("ready", "its worker had no slot for it")}
        assert len(holding.started) == 2
        holding.goes_on.set()


async def test_a_cancel_ends_a_job_that_waits_for_a_slot_without_starting_it(holding: Holding, boss: Session) -> None:
    jobs = await holding.hold.enqueue_many([(n,) for n in range(3)])
    async with holding.app.worker(concurrency=2):
        await claimed(boss, 3)
        await passed(holding.both)
        assert await jobs[2].cancel() == JobState.RUNNING
        await holding.seen.wait(JobRecorded, 1)
        assert (await jobs[2].status()).state == JobState.CANCELLED
        holding.goes_on.set()
    assert holding.started == [0, 1]


async def test_a_job_started_at_the_end_of_another_has_none_of_its_context(holding: Holding) -> None:
    found: list[int] = []

    @holding.app.task(name="look")
    async def look() -> None:
        found.append(leaked.get())
        leaked.set(1)
        await asyncio.sleep(0)

    jobs = await look.enqueue_many([()] * 6)
    async with holding.app.worker(concurrency=1):
        for job in jobs:
            await job.result(30)
    assert found == [0] * 6


async def test_more_than_the_slots_is_claimed_only_while_jobs_are_short(
    make_app: MakeApp, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    goes_on = asyncio.Event()
    most: list[int] = []

    @app.task(name="hold")
    async def hold() -> None:
        await goes_on.wait()

    async with app:
        claim = app.store.claim

        async def watch(conn: AsyncConnection[Any], **options: Any) -> Any:
            most.append(options["limit"])
            return await claim(conn, **options)

        monkeypatch.setattr(app.store, "claim", watch)
        await hold.enqueue_many([()] * 50)
        async with app.worker(concurrency=20):
            await claimed(boss, 20)
            assert await boss.rows("SELECT count(*) FROM aioqueue.live WHERE worker IS NULL") == [(30,)]
            goes_on.set()
    assert max(most) <= 20


async def test_jobs_that_end_together_as_they_began_have_none_claimed_ahead(
    make_app: MakeApp, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty answers that come within a moment say nothing of when the next fifty do."""
    monkeypatch.setattr(slots, "SHORT", 0.0)
    monkeypatch.setattr(slots, "LATE", 0.0)
    monkeypatch.setattr(slots, "WINDOW", 0.0)
    app = make_app()
    waiting: list[asyncio.Event] = []
    rounds = 3

    @app.task(name="hold")
    async def hold() -> None:
        waiting.append(asyncio.Event())
        if rounds:
            await waiting[-1].wait()

    async with app:
        await hold.enqueue_many([()] * 300)
        async with app.worker(concurrency=50):
            while rounds:
                await until_true(lambda: len(waiting) >= 50)
                await until(boss, f"SELECT count(*) = {50 * (3 - rounds)} FROM aioqueue.outcome")
                rounds -= 1
                ended, waiting[:] = waiting[:], []
                for goes_on in ended:
                    goes_on.set()
                    await asyncio.sleep(0.001)
            await until(boss, "SELECT count(*) = 300 FROM aioqueue.outcome")
    assert await boss.rows("SELECT count(*) FROM aioqueue.attempt") == [(0,)], "none was handed back"


@pytest.mark.parametrize(
    ("ends", "old", "room"), [(0, 0.0, 7), (100, 0.0, 12), (10_000, 0.0, 507), (100, slots.SHORT, 12), (10_000, 0.3, 7)]
)
async def test_room_is_the_free_slots_and_as_many_as_short_jobs_end_within_ahead(
    monkeypatch: pytest.MonkeyPatch, ends: int, old: float, room: int
) -> None:
    now = 100.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    monkeypatch.setattr(slots.time, "monotonic", clock)
    made = slots.Slots(7)

    class Runner:
        runs: dict[int, object] = {}  # noqa: RUF012
        given_up = 0

    made.runner = cast(Any, Runner())
    for _ in range(ends):
        made.freed(cast(Any, SimpleNamespace(claimed_at=now - old)))
    now += 1.0
    assert made.room == room


@pytest.mark.parametrize(("took", "room"), [(0.0, 107), (slots.AHEAD, 107), (0.2, 7)])
async def test_room_grows_with_the_quick_ones_that_have_ended_since_the_last_rate(
    monkeypatch: pytest.MonkeyPatch, took: float, room: int
) -> None:
    """The first hundred jobs of a worker say that the next hundred may come, before a rate is known; unless these last longer."""
    now = 100.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    monkeypatch.setattr(slots.time, "monotonic", clock)
    made = slots.Slots(7)
    made.runner = cast(Any, SimpleNamespace(runs={}, given_up=0))
    for _ in range(100):
        made.freed(cast(Any, SimpleNamespace(claimed_at=now - took)))
    assert made.room == room
    now += 2.0
    assert made.room == 7 + 2, "fifty a second by now"
