"""A worker as a whole: what it starts, how it drains and stops, and that many jobs need few connections."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg import AsyncConnection

from aioqueue import (
    JobCancelled,
    JobContext,
    JobState,
    JobTransaction,
    LeaseSettings,
    LimitSettings,
    PoolSettings,
    Snooze,
    WorkerSettings,
    wakeup,
)
from aioqueue.claim import Claimer
from aioqueue.events import JobAbandoned, JobClaimed, JobRecorded, LeaseLost, WorkerStarted, WorkerStopped, WorkerStopping
from aioqueue.maintenance.service import Maintenance
from aioqueue.record import Recorder
from aioqueue.renew import Heartbeat
from aioqueue.wakeup import Notifier
from tests.kit import MakeApp, Seen, passed, session, until
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

NEVER = WorkerSettings(poll=3600)
"""A poll that cannot be what starts a job within the test."""


@pytest.fixture
async def boss(database: Database, schema: str) -> AsyncIterator[Session]:
    async with session(database.dsn("superuser"), schema) as made:
        yield made


async def test_a_worker_says_what_it_serves_and_when_it_stops(make_app: MakeApp, seen: Seen, boss: Session) -> None:
    app = make_app()

    @app.task(name="elsewhere", queue="mail")
    async def elsewhere() -> None:
        pass

    async with app, app.worker() as worker:
        assert seen.all(WorkerStarted) == [WorkerStarted(worker.id, ("default", "mail"), 100)]
        assert await boss.rows("SELECT queues, concurrency FROM aioqueue.worker") == [(["default", "mail"], 100)]
        assert await boss.rows("SELECT name, queue FROM aioqueue.task ORDER BY name") == [
            ("add", "default"),
            ("elsewhere", "mail"),
        ]
    assert [type(e) for e in seen.events if isinstance(e, WorkerStarted | WorkerStopping | WorkerStopped)] == [
        WorkerStarted, WorkerStopping, WorkerStopped,
    ]  # fmt: skip


async def test_a_job_is_claimed_run_and_recorded_with_one_event_each(make_app: MakeApp, seen: Seen) -> None:
    app = make_app()
    async with app, app.worker() as worker:
        job = await app.get("add").options(tenant="t").enqueue(1)
        assert await job.result(30) == 2
        recorded = await seen.wait(JobRecorded)
    assert seen.all(JobClaimed) == [JobClaimed(job.id, "add", "t", 1, "default", worker.id)]
    assert (recorded.job_id, recorded.tenant, recorded.attempt, recorded.state, recorded.error) == (
        job.id,
        "t",
        1,
        "succeeded",
        None,
    )


async def test_a_job_starts_without_waiting_for_the_poll(make_app: MakeApp, seen: Seen) -> None:
    app = make_app(worker=NEVER)
    async with app, app.worker():
        for n in range(100):
            assert await (await app.get("add").enqueue(n)).result(30) == n + 1


async def test_an_enqueue_of_another_process_starts_without_waiting_for_the_poll(make_app: MakeApp) -> None:
    app, other = make_app(worker=NEVER), make_app()
    async with app, app.worker(), other:
        await (await app.get("add").enqueue(1)).result(30)
        for n in range(20):
            assert await (await other.get("add").enqueue(n)).result(30) == n + 1


async def test_the_hint_of_a_lone_enqueue_goes_out_in_the_same_round_trip(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()

    async def lose(self: Notifier, *_: object) -> None:
        self._pending.clear()

    app, other = make_app(worker=NEVER), make_app()

    @app.task(name="start")
    async def start() -> None:
        started.set()

    monkeypatch.setattr(wakeup, "DEBOUNCE", 0.0)
    monkeypatch.setattr(wakeup, "CARRY", 0.0)
    monkeypatch.setattr(Notifier, "_send", lose)  # whoever leaves the hint to the notifier is not heard
    async with app, app.worker(), other, asyncio.timeout(60):
        for _ in range(20):
            await other.enqueue_by_name("start", {})
            await started.wait()
            started.clear()


async def test_a_job_that_falls_due_and_a_retry_start_without_waiting_for_the_poll(make_app: MakeApp) -> None:
    app, other = make_app(worker=NEVER), make_app()
    tries: list[int] = []

    @app.task(name="twice")
    async def twice(ctx: JobContext) -> int:
        tries.append(ctx.attempt)
        if ctx.attempt == 1:
            raise Snooze(0.05)
        return ctx.attempt

    async with app, app.worker(), other:
        assert await (await app.get("add").options(delay=0.05).enqueue(1)).result(30) == 2
        assert await (await other.get("add").options(delay=0.05).enqueue(1)).result(30) == 2
        assert await (await twice.enqueue()).result(30) == 2
    assert tries == [1, 2]


async def test_a_cancel_reaches_a_job_that_has_run_for_long(make_app: MakeApp, boss: Session) -> None:
    """The worker has settled into its long pauses; the cancel comes from another process."""
    app, other = make_app(worker=NEVER, lease=LeaseSettings(rescue_interval=3600)), make_app()
    inside = asyncio.Event()

    @app.task(name="endless")
    async def endless() -> None:
        inside.set()
        await asyncio.Event().wait()

    async with app, app.worker(), other:
        job = await endless.enqueue()
        await passed(inside)
        # Ticks go on until the floors have settled; then the runtime's connections are idle for a second.
        await until(
            boss,
            "SELECT min(clock_timestamp() - state_change) > interval '1 s' FROM pg_stat_activity"
            " WHERE usename = 'aioqueue_worker' AND query LIKE '%.tick(%'",
        )
        await other.job(job.id).cancel()
        with pytest.raises(JobCancelled):
            await job.result(30)


async def test_a_task_nobody_knew_runs_once_a_worker_knows_it(make_app: MakeApp, seen: Seen) -> None:
    old, new = make_app(), make_app()

    @new.task(name="later")
    async def later(n: int) -> int:
        return n

    async with old, old.worker():
        async with new:
            job = await later.options(max_attempts=1).enqueue(7)
            await seen.wait(JobRecorded, job_id=job.id, state="scheduled")
            assert (await job.status()).state is not JobState.DEAD
        async with new, new.worker():
            assert await job.result(30) == 7


# -- draining --------------------------------------------------------------------------------------------------------------


async def test_drain_ends_when_nothing_is_ready(make_app: MakeApp, boss: Session) -> None:
    app = make_app()
    async with app:
        await app.get("add").enqueue_many([{"a": n} for n in range(250)])
        late = await app.get("add").options(delay=3600).enqueue(1)
        await app.worker(drain=True, concurrency=10).run()
        assert (await late.status()).state is JobState.SCHEDULED
    assert await boss.rows("SELECT state, count(*) FROM aioqueue.outcome GROUP BY 1") == [("succeeded", 250)]


async def test_drain_runs_what_the_jobs_enqueue(make_app: MakeApp, boss: Session) -> None:
    app = make_app(worker=NEVER)

    @app.task(name="chain")
    async def chain(tx: JobTransaction, left: int) -> None:
        # The claimer finds nothing while this runs.
        await tx.execute("SELECT pg_sleep(0.03)")
        if left:
            await chain.enqueue(left - 1)

    async with app:
        await chain.enqueue(20)
        await app.worker(drain=True).run()
    assert await boss.rows("SELECT count(*) FROM aioqueue.outcome") == [(21,)]


async def test_a_draining_worker_can_be_stopped(make_app: MakeApp, boss: Session) -> None:
    app = make_app()
    inside = asyncio.Event()

    @app.task(name="endless")
    async def endless() -> None:
        inside.set()
        await asyncio.Event().wait()

    async with app:
        await endless.enqueue()
        async with app.worker(drain=True, grace=3600) as worker:
            await passed(inside)
            worker.stop(hurry=True)
            await worker.wait()
    assert await boss.rows("SELECT worker, spared FROM aioqueue.live") == [(None, 1)]


async def test_a_draining_worker_with_a_job_that_cannot_be_ended_claims_nothing_more_and_ends(
    make_app: MakeApp, seen: Seen, boss: Session
) -> None:
    app = make_app(limits=LimitSettings(abandon=0.1))
    goes_on, held = asyncio.Event(), asyncio.Event()

    @app.task(name="stubborn", timeout=0.05)
    async def stubborn() -> None:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                pass

    @app.task(name="hold")
    async def hold() -> None:
        await held.wait()

    async with app:
        await hold.enqueue()
        await stubborn.options(max_attempts=1).enqueue()
        async with app.worker(drain=True, grace=0.1) as worker:
            await seen.wait(JobAbandoned)
            late = await app.get("add").enqueue(1)
            await app.get("add").options(queue="unserved").enqueue(1)
            held.set()
            async with asyncio.timeout(60):
                await worker.wait()
            assert worker.abandoned == 1
        assert not seen.all(JobClaimed, job_id=late.id)
        assert (await late.status()).state is JobState.READY
        goes_on.set()
    assert await boss.rows("SELECT state FROM aioqueue.outcome ORDER BY state") == [("dead",), ("succeeded",)]


# -- loops that fail -------------------------------------------------------------------------------------------------------


async def test_a_loop_that_fails_is_started_again_and_costs_no_job_its_outcome(
    make_app: MakeApp, seen: Seen, boss: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each loop of a worker meets a bug while a job runs; nothing of the job is lost, and the worker works on."""
    app = make_app(lease=LeaseSettings(lease=1.5))
    inside, goes_on = asyncio.Event(), asyncio.Event()
    broken: set[type] = set()

    @app.task(name="hold")
    async def hold() -> str:
        inside.set()
        await goes_on.wait()
        return "done"

    def fail_once(kind: type, method: str) -> None:
        plain = getattr(kind, method)

        def failing(*args: Any, **options: Any) -> Any:
            if kind not in broken and inside.is_set():
                broken.add(kind)
                raise ZeroDivisionError
            return plain(*args, **options)

        monkeypatch.setattr(kind, method, failing)

    for kind, method in ((Heartbeat, "_beat"), (Recorder, "_take"), (Maintenance, "_once"), (Claimer, "_claim")):
        fail_once(kind, method)
    async with app, app.worker() as worker:
        held = await hold.enqueue()
        await passed(inside)
        for n in range(5):
            assert await (await app.get("add").enqueue(n)).result(30) == n + 1
        beat = await boss.value("SELECT beat_at FROM aioqueue.worker WHERE id = %s", worker.id)
        await until(boss, "SELECT beat_at > %s::timestamptz + interval '2 s' FROM aioqueue.worker", beat)
        goes_on.set()
        assert await held.result(30) == "done"
        assert worker.problems() == []
    assert broken == {Heartbeat, Recorder, Maintenance, Claimer}
    said = [record for record in caplog.records if "it is started again" in record.getMessage()]
    assert {record.getMessage().split()[1] for record in said} == {"heartbeat", "recorder", "maintenance", "claimer"}
    assert all(record.exc_info for record in said)
    assert not seen.all(LeaseLost)
    assert await boss.rows("SELECT DISTINCT state, attempt, spared FROM aioqueue.outcome") == [("succeeded", 1, 0)]


# -- stopping --------------------------------------------------------------------------------------------------------------


async def test_a_job_longer_than_the_lease_runs_once_even_while_its_worker_stops(make_app: MakeApp, seen: Seen) -> None:
    """The heartbeat is the last to stop: a second worker finds nothing to rescue."""
    lease = LeaseSettings(lease=0.6, rescue_interval=0.05)
    app, other = make_app(lease=lease), make_app(lease=lease)
    inside, goes_on = asyncio.Event(), asyncio.Event()
    runs: list[int] = []

    async def slow(ctx: JobContext) -> int:
        runs.append(ctx.attempt)
        inside.set()
        await goes_on.wait()
        return ctx.attempt

    for each in (app, other):
        each.task(name="slow")(slow)
    async with other, app, session(other.database.conninfo, other.settings.schema) as watcher:
        first = app.worker()
        await first.__aenter__()
        job = await app.get("slow").enqueue()
        await passed(inside)
        async with other.worker():
            stopping = asyncio.create_task(first.__aexit__(None, None, None))
            await seen.wait(WorkerStopping)
            beat = await watcher.value("SELECT beat_at FROM aioqueue.worker WHERE id = %s", first.id)
            later = "SELECT beat_at > %s::timestamptz + interval '2 s' FROM aioqueue.worker WHERE id = %s"
            await until(watcher, later, beat, first.id)
            goes_on.set()
            await stopping
            assert await job.result(30) == 1
    assert runs == [1]


async def test_a_claim_cut_off_by_the_stop_is_handed_back_spared(
    make_app: MakeApp, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has committed the claim when the stop cancels the wait for its answer."""
    app = make_app()
    claimed = asyncio.Event()
    async with app:
        claim = app.store.claim

        async def hang(conn: AsyncConnection[Any], **options: Any) -> Any:
            found = await claim(conn, **options)
            if found.jobs:
                claimed.set()
                await asyncio.Event().wait()
            return found

        monkeypatch.setattr(app.store, "claim", hang)
        jobs = await app.get("add").enqueue_many([{"a": n} for n in range(3)])
        async with app.worker():
            await passed(claimed)
        assert await boss.rows("SELECT worker, attempt, spared FROM aioqueue.live") == [(None, 1, 1)] * 3
        monkeypatch.undo()
        async with app.worker():
            assert [await job.result(30) for job in jobs] == [1, 2, 3]


async def test_an_abandoned_job_stops_a_standalone_worker_and_an_embedded_one_claims_nothing_more(
    make_app: MakeApp, seen: Seen, boss: Session
) -> None:
    app = make_app(limits=LimitSettings(abandon=0.1))
    goes_on = asyncio.Event()

    @app.task(name="stubborn", timeout=0.05)
    async def stubborn() -> None:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                pass

    async with app:
        await stubborn.options(max_attempts=1).enqueue()
        async with asyncio.timeout(60):
            await app.worker(standalone=True, grace=0.1).run()
        assert await boss.rows("SELECT state FROM aioqueue.outcome") == [("dead",)]
        await stubborn.options(max_attempts=1).enqueue()
        async with app.worker(grace=0.1) as worker:
            await seen.wait(JobAbandoned, 2)
            job = await app.get("add").enqueue(1)
            assert worker.abandoned == 1
            assert any("ignored their cancellation" in problem for problem in worker.problems())
            async with app.worker():
                assert await job.result(30) == 2
            assert len(seen.all(JobClaimed, job_id=job.id)) == 1
        goes_on.set()


# -- connections -----------------------------------------------------------------------------------------------------------


async def test_50_jobs_with_transactions_share_a_pool_of_four(make_app: MakeApp, boss: Session) -> None:
    app = make_app(pool=PoolSettings(size=4), limits=LimitSettings(transaction_wait=30))
    at_once: list[int] = []
    inside = 0

    @app.task(name="own")
    async def own(tx: JobTransaction, n: int) -> int:
        nonlocal inside
        inside += 1
        at_once.append(inside)
        await tx.execute("SELECT pg_sleep(0.01)")
        await app.get("add").options(queue="unserved").enqueue(n)
        inside -= 1
        return n

    async with app, app.worker():
        jobs = await own.enqueue_many([(n,) for n in range(50)])
        assert [await job.result(60) for job in jobs] == list(range(50))
        assert await boss.rows("SELECT DISTINCT attempt, spared FROM aioqueue.outcome") == [(1, 0)]
    assert max(at_once) == 2


async def test_1000_jobs_that_hold_nothing_run_on_a_pool_of_four_while_the_worker_beats(
    make_app: MakeApp, boss: Session, seen: Seen
) -> None:
    app = make_app(pool=PoolSettings(size=4), lease=LeaseSettings(lease=4))
    goes_on, all_in = asyncio.Event(), asyncio.Event()
    running = 0

    @app.task(name="sleeper")
    async def sleeper() -> None:
        nonlocal running
        running += 1
        if running == 1_000:
            all_in.set()
        await goes_on.wait()

    connections = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"
    async with app, app.worker(concurrency=1_000) as worker:
        await sleeper.enqueue_many([()] * 1_000)
        await passed(all_in)
        beat = await boss.value("SELECT beat_at FROM aioqueue.worker WHERE id = %s", worker.id)
        peak = 0
        async with asyncio.timeout(60):
            while await boss.value("SELECT beat_at < %s::timestamptz + interval '2 s' FROM aioqueue.worker", beat):
                peak = max(peak, await boss.value(connections))
        assert worker.running == 1_000
        goes_on.set()
        await seen.wait(JobRecorded, 1_000)
        peak = max(peak, await boss.value(connections))
    assert 2 <= peak <= 4 + 2, "the pool, one listener, one guard"
    assert not seen.all(LeaseLost)
    assert await boss.rows("SELECT state, count(*) FROM aioqueue.outcome GROUP BY 1") == [("succeeded", 1_000)]
