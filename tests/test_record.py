"""The recorder: mixed batches, refused content, lost answers, and no effect twice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import AsyncConnection, sql

from aioqueue import record
from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.events import DatabaseLost, JobLost, JobRecorded, Observers
from aioqueue.listen import channel
from aioqueue.outcome import Cancelled, ErrorText, Failed, Outcome, Reason, Released, Snoozed, Succeeded
from aioqueue.pool_connection import sever
from aioqueue.record import BATCH, Recorder
from aioqueue.settings import PoolSettings
from aioqueue.store import Store
from aioqueue.testing.engine import Unheard
from tests.kit import PATIENCE, Seen, session, turn_until, until
from tests.postgres import Database as PlainDatabase
from tests.sql.engine import Session, changed, entry

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
        self.trouble: Exception | None = None
        self.troubled = ""
        """Raise the trouble for batches that contain this text."""

    async def record(self, conn: AsyncConnection[Any], **batch: Any) -> dict[UUID, str] | None:
        self.batches.append(len(batch["outcomes"]) + len(batch["succeeded"]))
        if self.trouble is not None and any(self.troubled in text for text in (*batch["outcomes"], *batch["results"])):
            raise self.trouble
        states = await super().record(conn, **batch)
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


def recorded(at: Bench) -> list[tuple[UUID, str]]:
    return [(event.job_id, event.state) for event in at.seen.all(JobRecorded)]


@pytest.fixture
async def at(database: PlainDatabase, schema: str) -> AsyncIterator[Bench]:
    async with session(database.dsn("owner"), schema) as engine:
        pool = Database(database.dsn("worker"), PoolSettings())
        await pool.open()
        seen = Seen()
        store = CountingStore(schema)
        recorder = Recorder(pool, store, Observers([seen]), capacity=300, hints=Unheard())
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
    assert recorded(at) == [
        (job.job_id, state) for job, state in zip(jobs, ["succeeded", "scheduled", "ready", "dead"], strict=True)
    ]
    assert not at.seen.all(JobLost)


async def test_an_attempt_whose_answer_is_lost_is_told_from_one_that_others_ended(at: Bench) -> None:
    """The same write twice: the first time it is taken and its answer lost, the second time nothing is left of the job."""
    mine, theirs, cancelled = jobs = await at.claim(3)
    assert await at.engine.cancel(cancelled.job_id) == "running"
    await at.engine.record(at.worker, entry(mine, "error", d=60), entry(cancelled, "error", d=60))
    await at.engine.end_lease(at.worker)
    assert await at.engine.rescue() == (at.worker, 1)
    await at.write(*((job, RETRY) for job in jobs))
    assert sorted(recorded(at)) == sorted([(mine.job_id, "scheduled"), (cancelled.job_id, "cancelled")])
    assert [e.job_id for e in at.seen.all(JobLost)] == [theirs.job_id]


async def test_a_time_out_that_came_after_the_job_s_own_commit_is_recorded_as_its_success(at: Bench) -> None:
    (job,) = await at.claim(1)
    await at.engine.open_job(job)
    await at.engine.finish(job)
    await at.engine.commit()
    await at.write((job, Failed(Reason.TIME_LIMIT, ERROR, 60.0)))
    assert recorded(at) == [(job.job_id, "succeeded")]
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
    at.store.trouble = psycopg.OperationalError("the server is away, for the test")
    for job in jobs:
        at.recorder.put(job, Succeeded("1"))
    async with at.writing(recorders=2):
        await at.seen.wait(DatabaseLost, loop="recorder")
        assert at.recorder.pending == 5
        assert sorted(job.job_id for job in at.recorder.jobs()) == sorted(job.job_id for job in jobs)
        at.store.trouble = None
    assert set(at.store.batches) == {5}
    assert [await at.state(job) for job in jobs] == ["succeeded"] * 5


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
async def test_a_write_that_lost_to_others_is_repeated_as_it_is(at: Bench, state: str) -> None:
    jobs = await at.claim(5)
    with_state = f"BEGIN\n    RAISE 'for the test' USING ERRCODE = '{state}';\n    PERFORM pg_current_xact_id();"
    async with changed(at.engine, "record", ("BEGIN\n    PERFORM pg_current_xact_id();", with_state)):
        for job in jobs:
            at.recorder.put(job, Succeeded("1"))
        writing = at.writing()
        await writing.__aenter__()
        await at.seen.wait(DatabaseLost, loop="recorder")
    await writing.__aexit__(None, None, None)
    assert set(at.store.batches) == {5}
    assert [await at.state(job) for job in jobs] == ["succeeded"] * 5


async def test_a_write_that_is_cut_off_is_kept_for_the_next(at: Bench) -> None:
    """A recorder that is cancelled once the server has committed its write loses nothing, and says it once."""
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
    assert recorded(at) == [(job.job_id, "scheduled") for job in jobs]
    assert not at.seen.all(JobLost)


# -- the hint that jobs have ended -----------------------------------------------------------------------------------------


class Hints:
    """What the recorder says and takes, and what a listening session hears."""

    def __init__(self, ears: AsyncConnection[Any]) -> None:
        self.due = True
        self.said: list[str] = []
        self._ears = ears

    def hint(self, kind: str) -> None:
        self.said.append(kind)

    def take(self, kind: str) -> bool:
        return self.due and kind == "done"

    async def heard(self) -> int:
        """How many notifications have come, by now."""
        await self._ears.execute("SELECT 1")
        return len([notify async for notify in self._ears.notifies(timeout=0)])


@pytest.fixture
async def hints(at: Bench, database: PlainDatabase, schema: str) -> AsyncIterator[Hints]:
    async with await AsyncConnection.connect(database.dsn("worker"), autocommit=True) as ears:
        await ears.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel(schema, "done"))))
        hints = at.recorder._hints = Hints(ears)
        yield hints


async def test_a_write_carries_the_hint_that_is_due(at: Bench, hints: Hints) -> None:
    for due in (True, False, True):
        hints.due = due
        (job,) = await at.claim(1)
        await at.write((job, Succeeded("1")))
        assert await at.state(job) == "succeeded"
        assert (await hints.heard(), hints.said) == ((1, []) if due else (0, ["done"]))
        hints.said.clear()


@pytest.mark.parametrize(
    "broken", [b"SELECT pg_notify('', $1)", b"SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(60), $1::text"]
)
async def test_a_hint_that_could_not_be_sent_is_left_to_others(
    at: Bench, hints: Hints, monkeypatch: pytest.MonkeyPatch, broken: bytes
) -> None:
    monkeypatch.setitem(at.store.wired, "notify", broken)
    (job,) = await at.claim(1)
    await at.write((job, Succeeded("1")))
    assert await at.state(job) == "succeeded"
    assert (await hints.heard(), hints.said) == (0, ["done"])


async def test_a_write_that_loses_its_connection_leaves_its_hint_to_the_next(at: Bench, hints: Hints) -> None:
    (job,) = await at.claim(1)
    lost: list[bool] = []

    def lose_once(conn: AsyncConnection[Any]) -> None:
        if not lost:
            lost.append(True)
            hints.due = False  # it was taken
            sever(conn)

    at.store.after = lose_once
    await at.write((job, Succeeded("1")))
    assert await at.state(job) == "succeeded"
    assert lost and hints.said == ["done"], "whoever took it does not know whether it was heard"


# -- refused, but not for their content --------------------------------------------------------------------------------------


async def test_one_poisoned_outcome_waits_apart_and_is_never_dropped(at: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A row planted by hand refuses one job's success (23505) for ever; its neighbours and who comes later are recorded."""
    jobs = await at.claim(BATCH)
    later = await at.claim(3)
    poisoned = jobs.pop(77)
    plant = "INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, finished_at) VALUES (%s, 'dead', 9, 0, now())"
    await at.engine.rows(plant, poisoned.job_id)
    for job in (*jobs[:77], poisoned, *jobs[77:]):
        at.recorder.put(job, Succeeded("1"))
    async with at.writing(recorders=2):
        await at.seen.wait(JobRecorded, BATCH - 1)
        for job in later:
            at.recorder.put(job, Succeeded("1"))
        await at.seen.wait(JobRecorded, BATCH + 2)
        assert [job.job_id for job in at.recorder.jobs()] == [poisoned.job_id]
        await until(at.engine, "SELECT count(*) = 1 FROM aioqueue.live")
        await turn_until(lambda: at.recorder.refused == 1)
        await at.engine.rows("DELETE FROM aioqueue.outcome WHERE job_id = %s", poisoned.job_id)
    assert {state for _, state in recorded(at)} == {"succeeded"}
    assert len(recorded(at)) == BATCH + 3
    assert (at.recorder.pending, at.recorder.refused) == (0, 0)
    assert [str(poisoned.job_id) in message for message in caplog.messages] == [True]


async def test_a_large_outcome_has_as_much_more_time_as_a_slow_way_to_the_database_takes(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    runtime = at.database.runtime

    def lend(seconds: float | None = None) -> Any:
        limits.append(seconds)
        return runtime(seconds)

    monkeypatch.setattr(at.database, "runtime", lend)
    for size in (1, 5_000_000):
        (job,) = await at.claim(1)
        await at.write((job, Succeeded(f'"{"x" * size}"')))
    small, large = limits
    assert small is not None and large is not None
    assert small < at.database.settings.deadline + 1 and large > at.database.settings.deadline + 9


async def test_a_batch_over_the_statement_timeout_is_written_in_parts(at: Bench) -> None:
    jobs = await at.claim(BATCH)
    too_much = "BEGIN\n    IF cardinality(p_ids) > 60 THEN RAISE 'too much' USING ERRCODE = '57014'; END IF;\n    PERFORM"
    async with changed(at.engine, "record", ("BEGIN\n    PERFORM", too_much)):
        await at.write(*((job, Succeeded("1")) for job in jobs))
    assert [await at.state(job) for job in jobs] == ["succeeded"] * BATCH
    assert sorted(at.store.batches) == [50, 50, 50, 50, 100, 100, 200]


@pytest.mark.parametrize("state", ["42501", "XX000", "P0001", "23514", "54000"])
async def test_a_refusal_of_everything_keeps_everything_and_all_is_written_once_it_ends(at: Bench, state: str) -> None:
    """Also where the minimal write is refused (54000): a job never stays running without somebody who tries again."""
    jobs = await at.claim(5)
    refuse = f"BEGIN\n    RAISE 'for the test' USING ERRCODE = '{state}';\n    PERFORM pg_current_xact_id();"
    async with changed(at.engine, "record", ("BEGIN\n    PERFORM pg_current_xact_id();", refuse)):
        for job in jobs:
            at.recorder.put(job, Succeeded("1"))
        writing = at.writing(recorders=2)
        await writing.__aenter__()
        await turn_until(lambda: at.recorder.refused == 5)
        assert at.recorder.pending == 5
        assert [await at.state(job) for job in jobs] == ["running"] * 5
    await writing.__aexit__(None, None, None)
    assert [await at.state(job) for job in jobs] == ["dead" if state == "54000" else "succeeded"] * 5
    assert not at.seen.all(JobLost)


@pytest.mark.parametrize("trouble", [UnicodeEncodeError("latin-1", "☃", 0, 1, "for the test"), RuntimeError("for the test")])
async def test_an_error_that_is_not_the_database_s_keeps_to_its_outcome_and_ends_no_recorder(
    at: Bench, trouble: Exception
) -> None:
    jobs = await at.claim(8)
    at.store.trouble, at.store.troubled = trouble, '"snow"'
    for n, job in enumerate(jobs):
        at.recorder.put(job, Succeeded('"snow"' if n == 5 else '"fine"'))
    async with at.writing():
        await at.seen.wait(JobRecorded, 7, state="succeeded")
        await turn_until(lambda: at.recorder.refused == at.recorder.pending)
        at.store.trouble = None
    states = [await at.state(job) for job in jobs]
    # What cannot be encoded is a matter of its content.
    assert states.pop(5) == ("dead" if isinstance(trouble, UnicodeError) else "succeeded")
    assert states == ["succeeded"] * 7


async def test_what_waits_apart_is_tried_at_once_when_somebody_waits_for_everything(
    at: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stopping worker does, which has less time than the longest pause."""
    monkeypatch.setattr(record, "REFUSED_PAUSES", (3600.0, 3600.0))
    (job,) = await at.claim(1)
    at.store.trouble = RuntimeError("for the test")
    at.recorder.put(job, Succeeded("1"))
    async with at.writing():
        await turn_until(lambda: at.recorder.refused == 1)
        at.store.trouble = None
    assert await at.state(job) == "succeeded"


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
