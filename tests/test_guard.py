"""The guard: a job that blocks the event loop past its limit is recorded once, whoever of guard and loop comes to it first.

The jobs here block the loop until the database, or a thread of the test, says so: no time decides.
"""

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from aioqueue import AioQueue, JobFailed, JobTransaction, LeaseSettings, LimitSettings, Retry, TimeLimitExceeded
from aioqueue.events import JobLost, JobRecorded, LeaseLost, LoopBlocked, Observers, WorkerStopping
from aioqueue.guard import Guard
from aioqueue.store import Store
from tests.kit import PATIENCE, Seen, turn_until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Record = Callable[..., dict[Any, str]]
LIMITS = LimitSettings(abandon=0.1)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def app(worker_dsn: str, schema: str, seen: Seen) -> AioQueue:
    return AioQueue(worker_dsn, schema=schema, observers=[seen], limits=LIMITS, lease=LeaseSettings(lease=6))


class Gate:
    """Stands around the guard's write: the test's threads meet it there."""

    def __init__(self, app: AioQueue, monkeypatch: pytest.MonkeyPatch, write: Callable[[Record], dict[Any, str]]) -> None:
        self.entered = threading.Event()
        record = app.store.record_in_thread

        def gated(conn: Connection[Any], **options: Any) -> dict[Any, str]:
            self.entered.set()
            return write(lambda: record(conn, **options))

        monkeypatch.setattr(app.store, "record_in_thread", gated)


@pytest.fixture
def written(app: AioQueue, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once the guard has written an outcome: a job waits for it in the loop's own thread, which blocks the loop."""
    over = threading.Event()

    def write(record: Record) -> dict[Any, str]:
        try:
            return record()
        finally:
            over.set()

    Gate(app, monkeypatch, write)
    return over


def block(until: threading.Event) -> None:
    assert until.wait(PATIENCE)


@pytest.mark.parametrize("kind", ["plain", "own"])
async def test_a_job_that_blocks_the_loop_past_its_limit_is_recorded_once_and_its_neighbours_keep_their_lease(
    app: AioQueue, boss: Session, seen: Seen, written: threading.Event, kind: str
) -> None:
    """With a transaction of its own, too: its late commit is refused, and that is not said a second time."""

    async def plain() -> str:
        block(written)
        return "late"

    async def own(tx: JobTransaction) -> str:
        block(written)
        return "late"

    work: Any = app.task(name="work", timeout=0.1, retry=Retry(base=3600, jitter=False))(own if kind == "own" else plain)
    async with app, app.worker():
        job = await work.enqueue()
        blocks = [await seen.wait(LoopBlocked, over=over) for over in (False, True)]
        event = await seen.wait(JobRecorded, job_id=job.id)
    assert {(block.job_id, block.task) for block in blocks} == {(job.id, "work")}
    # The line in this file, rather than the library's that it waits in.
    assert all(re.search(r"test_guard\.py:\d+ in block$", block.where) for block in blocks)
    assert len(seen.all(LoopBlocked)) == 2
    assert (event.state, len(seen.all(JobRecorded))) == ("scheduled", 1)
    assert "blocked the event loop" in (event.error or "") and event.reason == "time limit"
    assert not seen.all(JobLost) and not seen.all(LeaseLost)
    ((attempt, reason, _),) = await boss.attempts(job.id)
    assert (attempt, reason) == (1, "time limit")


async def test_a_time_out_of_the_guard_is_retried_by_the_task_s_policy(
    app: AioQueue, boss: Session, written: threading.Event
) -> None:
    @app.task(name="never", timeout=0.1, retry=Retry(on={TimeLimitExceeded: False}))
    async def never() -> None:
        block(written)

    async with app, app.worker():
        job = await never.enqueue()
        with pytest.raises(JobFailed):
            await job.result(PATIENCE)


@pytest.mark.parametrize("written", [False, True], ids=["before the write", "before the answer"])
async def test_what_the_guard_cannot_write_is_the_recorder_s(
    app: AioQueue, boss: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    over = threading.Event()

    def lose(record: Record) -> dict[Any, str]:
        if written:
            record()
        over.set()
        raise psycopg.OperationalError("the connection is lost, for the test")

    Gate(app, monkeypatch, lose)

    @app.task(name="work", timeout=0.1, retry=Retry(base=3600, jitter=False))
    async def work() -> None:
        over.wait(PATIENCE)

    async with app, app.worker():
        job = await work.enqueue()
        await seen.wait(JobRecorded, job_id=job.id)
    assert [event.state for event in seen.all(JobRecorded)] == ["scheduled"]
    assert not seen.all(JobLost)
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "time limit")]


async def test_a_job_whose_row_is_held_is_recorded_once_it_is_free(
    app: AioQueue, boss: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str] = []
    over = threading.Event()

    def note(record: Record) -> dict[Any, str]:
        found = record()
        answers.extend(found.values())
        over.set()
        return found

    Gate(app, monkeypatch, note)
    held = asyncio.Event()

    @app.task(name="work", timeout=0.1, retry=Retry(base=3600, jitter=False))
    async def work() -> None:
        await held.wait()
        over.wait(PATIENCE)

    async with app, app.worker():
        job = await work.options(max_attempts=2).enqueue()
        await boss.begin()
        async with asyncio.timeout(PATIENCE):
            while not await boss.rows("SELECT 1 FROM aioqueue.live WHERE job_id = %s AND worker IS NOT NULL FOR UPDATE", job.id):
                pass
        held.set()
        await seen.wait(LoopBlocked, over=True)
        assert not seen.all(JobRecorded)
        await boss.rollback()
        await seen.wait(JobRecorded, job_id=job.id)
    assert answers == ["locked"]
    assert [event.state for event in seen.all(JobRecorded)] == ["scheduled"]
    assert not seen.all(JobLost)


async def test_the_loop_wakes_while_the_guard_writes_and_the_worker_stops_without_losing_the_outcome(
    app: AioQueue, boss: Session, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop leaves the outcome to the guard, whose write then fails; the worker has stopped everything else by then."""
    go_on = threading.Event()

    def fail(record: Record) -> dict[Any, str]:
        go_on.wait(PATIENCE)
        raise psycopg.OperationalError("the connection is lost, for the test")

    gate = Gate(app, monkeypatch, fail)

    @app.task(name="work", timeout=0.1, retry=Retry(base=3600, jitter=False))
    async def work() -> str:
        gate.entered.wait(PATIENCE)
        return "late"

    async with app:
        running = app.worker()
        worker = await running.__aenter__()
        inner = worker._worker
        assert inner is not None
        job = await work.enqueue()
        await seen.wait(LoopBlocked)
        await turn_until(lambda: not inner.running)
        assert any(job.id in fence for fence in inner.slots.known()), "no claim's answer is looked for in its place"
        stopping = asyncio.create_task(running.__aexit__(None, None, None))
        await seen.wait(WorkerStopping)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not stopping.done()
        go_on.set()
        await stopping
    assert [(event.job_id, event.state) for event in seen.all(JobRecorded)] == [(job.id, "scheduled")]
    assert await boss.value("SELECT count(*) FROM aioqueue.worker") == 0


class Idle:
    """A lease and a recorder for a guard that has nothing to do."""

    worker = 0

    def renewed(self, sent: float) -> None: ...
    def refused(self, worker: int) -> None: ...
    def put(self, job: object, outcome: object) -> None: ...
    def recorded_by_guard(self, job: object, state: str, outcome: object) -> None: ...


async def test_stopping_waits_for_no_thread_of_the_loop_s_own_executor(worker_dsn: str, schema: str, seen: Seen) -> None:
    """Those may all stand in user code that hangs."""
    idle = Idle()
    guard = Guard(
        worker_dsn, Store(schema), Observers([seen]), lease=LeaseSettings(), limits=LIMITS, heartbeat=idle, runs=list,
        sink=idle, encode=lambda job, outcome: "",
    )  # fmt: skip
    guard.start()
    hung = threading.Event()
    threads = [asyncio.create_task(asyncio.to_thread(hung.wait, PATIENCE)) for _ in range(64)]
    try:
        await asyncio.sleep(0)
        await guard.stop()
        assert not any(thread.done() for thread in threads)
        assert guard._ended.is_set() and guard._conn is None
    finally:
        hung.set()
        await asyncio.wait(threads)
