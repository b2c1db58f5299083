"""The recorder: mixed batches, refused content, lost answers, and no effect twice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue.database import Database, sever
from aioqueue.events import DatabaseLost, JobLost, JobRecorded, Observers
from aioqueue.job import Claimed
from aioqueue.outcome import Cancelled, ErrorText, Failed, Outcome, Reason, Released, Snoozed, Succeeded
from aioqueue.record import BATCH, Recorder
from aioqueue.settings import PoolSettings
from aioqueue.store import Store
from tests.kit import PATIENCE, Seen, session
from tests.postgres import Database as PlainDatabase
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

ERROR = ErrorText("ValueError", "no", "Traceback …")
RETRY = Failed(Reason.ERROR, ERROR, 60.0)
DEAD = Failed(Reason.ERROR, ERROR, None)
TOO_BIG = "1e400000"
"""A number that JSON allows and PostgreSQL refuses."""


class CountingStore(Store):
    """The real store; remembers the sizes of the batches and may do something after each write."""

    def __init__(self, schema: str) -> None:
        super().__init__(schema)
        self.batches: list[int] = []
        self.after: Callable[[AsyncConnection[Any]], None] | None = None

    async def record(self, conn: AsyncConnection[Any], *, worker: int, outcomes: str) -> dict[Any, str]:
        self.batches.append(outcomes.count('{"j":'))
        states = await super().record(conn, worker=worker, outcomes=outcomes)
        if self.after is not None:
            self.after(conn)
            await conn.execute("SELECT 1")
        return states


@dataclass
class Bench:
    engine: Session
    recorder: Recorder
    store: CountingStore
    database: Database
    seen: Seen
    worker: int

    async def claim(self, number: int) -> list[Claimed]:
        await self.engine.enqueue(number)
        return await self.engine.claim(self.worker, number)

    async def state(self, job: Claimed) -> str | None:
        return await self.engine.state(job.job_id)

    @contextlib.asynccontextmanager
    async def writing(self, recorders: int = 1) -> AsyncIterator[None]:
        """Let recorders run; leaving the block waits until everything is written."""
        tasks = [asyncio.create_task(self.recorder.run()) for _ in range(recorders)]
        try:
            yield
            async with asyncio.timeout(PATIENCE):
                await self.recorder.wait_idle()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def write(self, *outcomes: tuple[Claimed, Outcome]) -> None:
        for job, outcome in outcomes:
            self.recorder.put(job, outcome)
        async with self.writing():
            pass


@pytest.fixture
async def at(database: PlainDatabase, schema: str) -> AsyncIterator[Bench]:
    async with session(database.dsn("owner"), schema) as engine:
        pool = Database(database.dsn("worker"), PoolSettings())
        await pool.open()
        seen = Seen()
        store = CountingStore(schema)
        recorder = Recorder(pool, store, Observers([seen]), capacity=300, recorded=lambda: None)
        yield Bench(engine, recorder, store, pool, seen, await engine.register(lease=600))
        await pool.close()


async def test_outcomes_of_every_kind_are_one_write(at: Bench) -> None:
    outcomes: list[tuple[Outcome, str]] = [
        (Succeeded('{"n": 1}'), "succeeded"),
        (RETRY, "scheduled"),
        (DEAD, "dead"),
        (Failed(Reason.ERROR, ERROR, 0.0), "ready"),
        (Cancelled("not wanted"), "cancelled"),
        (Snoozed(60), "scheduled"),
        (Released(Reason.INTERRUPTED, "its worker stopped"), "ready"),
        (Released(Reason.UNKNOWN_TASK, "unknown", 1.0), "scheduled"),
        (Succeeded("null"), "succeeded"),
    ]
    jobs = await at.claim(len(outcomes))
    await at.write(*zip(jobs, [outcome for outcome, _ in outcomes], strict=True))
    assert [await at.state(job) for job in jobs] == [state for _, state in outcomes]
    assert at.store.batches == [len(outcomes)]
    assert [(e.job_id, e.state) for e in at.seen.all(JobRecorded)] == [
        (job.job_id, state) for job, (_, state) in zip(jobs, outcomes, strict=True)
    ]
    spared = await at.engine.rows("SELECT spared FROM aioqueue.scheduled ORDER BY job_id")
    assert sorted(n for (n,) in spared) == [0, 1, 1]


async def test_an_error_s_text_is_kept_and_what_cannot_be_stored_of_it_is_replaced(at: Bench) -> None:
    (job,) = await at.claim(1)
    await at.write((job, Failed(Reason.ERROR, ErrorText.of(ValueError("a\0b\ud800c")), None)))
    assert await at.engine.attempts(job.job_id) == [(1, "error", "a\\x00b\\ud800c")]


@pytest.mark.parametrize("place", [0, 1, 100, BATCH - 1])
async def test_a_refused_outcome_stands_alone_and_gets_a_minimal_write(at: Bench, place: int) -> None:
    jobs = await at.claim(BATCH)
    await at.write(*((job, Succeeded(TOO_BIG if n == place else "1")) for n, job in enumerate(jobs)))
    states = [await at.state(job) for job in jobs]
    assert states.pop(place) == "dead"
    assert set(states) == {"succeeded"}
    ((_, reason, message),) = await at.engine.attempts(jobs[place].job_id)
    assert reason == "invalid result" and "22003" in message
    assert at.store.batches[0] == BATCH and at.store.batches.count(1) >= 2


async def test_many_refused_outcomes_hold_up_no_other(at: Bench) -> None:
    jobs = await at.claim(40)
    await at.write(*((job, Succeeded(TOO_BIG if n % 2 else '"fine"')) for n, job in enumerate(jobs)))
    assert [await at.state(job) for job in jobs] == ["succeeded", "dead"] * 20


async def test_a_write_whose_answer_is_lost_is_repeated_without_a_second_effect(at: Bench) -> None:
    jobs = await at.claim(4)
    cuts = [sever, sever]

    def cut(conn: AsyncConnection[Any]) -> None:
        if cuts:
            cuts.pop()(conn)

    at.store.after = cut
    await at.write(
        (jobs[0], Succeeded("1")),
        (jobs[1], RETRY),
        (jobs[2], Released(Reason.INTERRUPTED, "stopped")),
        (jobs[3], Failed(Reason.ERROR, ERROR, None)),
    )
    assert [await at.state(job) for job in jobs] == ["succeeded", "scheduled", "ready", "dead"]
    assert [len(await at.engine.attempts(job.job_id)) for job in jobs] == [0, 1, 1, 1]
    assert len(at.seen.all(DatabaseLost, loop="recorder")) == 1
    assert [e.job_id for e in at.seen.all(JobRecorded)] == [jobs[0].job_id]
    assert not at.seen.all(JobLost)


async def test_a_late_outcome_changes_nothing_and_is_said_to_be_lost(at: Bench) -> None:
    jobs = await at.claim(2)
    await at.engine.end_lease(at.worker)
    assert await at.engine.rescue() == (at.worker, 2)
    await at.write((jobs[0], Succeeded("1")), (jobs[1], DEAD))
    assert [await at.state(job) for job in jobs] == ["ready", "ready"]
    assert {e.job_id for e in at.seen.all(JobLost)} == {job.job_id for job in jobs}


async def test_jobs_of_an_earlier_identity_are_written_under_it(at: Bench) -> None:
    first = await at.claim(2)
    other = await at.engine.register(lease=600)
    await at.engine.enqueue(2)
    second = await at.engine.claim(other, 2)
    await at.write(*((job, Succeeded("1")) for pair in zip(first, second, strict=True) for job in pair))
    assert [await at.state(job) for job in (*first, *second)] == ["succeeded"] * 4


async def test_outcomes_wait_out_an_outage(at: Bench) -> None:
    jobs = await at.claim(5)
    await at.engine.rows("REVOKE EXECUTE ON FUNCTION aioqueue.record FROM aioqueue_worker")
    for job in jobs:
        at.recorder.put(job, Succeeded("1"))
    async with at.writing(recorders=2):
        try:
            await at.seen.wait(DatabaseLost, loop="recorder")
            assert at.recorder.pending == 5
            assert sorted(at.recorder.jobs()) == sorted(job.job_id for job in jobs)
        finally:
            await at.engine.rows("GRANT EXECUTE ON FUNCTION aioqueue.record TO aioqueue_worker")
    assert [await at.state(job) for job in jobs] == ["succeeded"] * 5


async def test_a_write_that_is_cut_off_is_kept_for_the_next(at: Bench) -> None:
    """A recorder that is cancelled in mid-write loses nothing."""
    jobs = await at.claim(3)
    for job in jobs:
        at.recorder.put(job, RETRY)
    writing = asyncio.create_task(at.recorder.run())
    begun = asyncio.Event()

    def hold(conn: AsyncConnection[Any]) -> None:
        begun.set()
        raise psycopg.OperationalError("for the test")

    at.store.after = hold
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
    writing.cancel()
    await asyncio.wait([writing])
    assert at.recorder.pending == 3
    at.store.after = None
    async with at.writing():
        pass
    assert [await at.state(job) for job in jobs] == ["scheduled"] * 3
    assert [len(await at.engine.attempts(job.job_id)) for job in jobs] == [1] * 3


async def test_the_claimer_waits_while_more_is_pending_than_the_database_takes(at: Bench) -> None:
    jobs = await at.claim(301)
    room = asyncio.create_task(at.recorder.wait_room())
    async with asyncio.timeout(PATIENCE):
        await room
    for job in jobs:
        at.recorder.put(job, Succeeded("1"))
    room = asyncio.create_task(at.recorder.wait_room())
    await asyncio.wait([room], timeout=0)
    assert not room.done()
    async with at.writing():
        async with asyncio.timeout(PATIENCE):
            await room
    assert await at.engine.value("SELECT count(*) FROM aioqueue.outcome") == 301
    assert max(at.store.batches) <= BATCH
