"""The app: opening and closing, enqueue on the pool and on the caller's connection, and the embedded worker's end."""

import asyncio
import os
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import anyio
import psycopg
import pytest
from psycopg import AsyncConnection, IsolationLevel
from psycopg.rows import dict_row

from aioqueue import (
    AioQueue,
    AppNotOpen,
    ConfigurationError,
    DuplicateJob,
    InvalidOption,
    InvalidPayload,
    Job,
    JobCancelled,
    JobContext,
    JobFailed,
    JobNotFound,
    JobState,
    JobTransaction,
    LeaseSettings,
    LimitSettings,
    NotCommitted,
    PoolSettings,
    ResultTimeout,
    SchemaError,
    TransactionAborted,
    UnknownTask,
    WorkerSettings,
)
from aioqueue.events import DatabaseLost, JobClaimed, JobRecorded, LeaseLost, ListenerConnected, WorkerStopped, WorkerStopping
from aioqueue.job import lane, new_job_id, new_job_ids
from aioqueue.listen import Listener
from aioqueue.new_jobs import NewJobs
from aioqueue.pool import AllInUse
from aioqueue.pool_connection import sever
from aioqueue.result import ResultReader
from aioqueue.wakeup import Notifier
from tests.kit import MakeApp, Seen, passed, session, until
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
async def conn(worker_dsn: str) -> AsyncIterator[AsyncConnection[Any]]:
    """The caller's own connection, not in autocommit."""
    made = await AsyncConnection.connect(worker_dsn)
    yield made
    await made.close()


async def jobs(boss: Session) -> list[tuple[Any, ...]]:
    return await boss.rows("SELECT task, tenant, state FROM aioqueue.jobs ORDER BY created_at, id")


# -- opening and closing ---------------------------------------------------------------------------------------------


async def test_what_needs_an_open_app_says_so(make_app: MakeApp) -> None:
    app = make_app()
    job = app.job(new_job_id())
    calls: list[Callable[[], Any]] = [
        lambda: app.get("add").enqueue(1), lambda: app.enqueue_by_name("add", {"a": 1}), lambda: app.enqueue_by_name("other"),
        job.result, job.status, job.cancel,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(AppNotOpen, match="async with app:"):
            await call()
    async with app:
        inside = app.is_open
    assert inside and not app.is_open
    for call in calls:
        with pytest.raises(AppNotOpen):
            await call()
    await app.close()


async def test_an_app_that_was_closed_can_be_opened_again(make_app: MakeApp) -> None:
    app = make_app()
    for _ in range(2):
        async with app, app.worker():
            assert await (await app.get("add").enqueue(1, b=2)).result(30) == 3


async def test_an_app_is_opened_once(app: AioQueue) -> None:
    with pytest.raises(ConfigurationError, match="open already"):
        await app.open()
    assert app.is_open


async def test_an_app_that_is_opened_twice_at_once_is_open_once(make_app: MakeApp, boss: Session) -> None:
    app = make_app()
    ends = await asyncio.gather(app.open(), app.open(), return_exceptions=True)
    assert [end is None or (isinstance(end, ConfigurationError) and "open already" in str(end)) for end in ends] == [True] * 2
    assert ends.count(None) == 1
    await app.get("add").enqueue(1)
    await app.close()
    assert not app.is_open
    await until(boss, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'aioqueue')")


async def test_workers_open_the_app_together_and_the_last_to_leave_closes_it(make_app: MakeApp) -> None:
    app = make_app()
    first, second = app.worker(), app.worker()
    await asyncio.gather(first.__aenter__(), second.__aenter__())
    await first.__aexit__(None, None, None)
    assert app.is_open
    assert await (await app.get("add").enqueue(1)).result(30) == 2
    assert second.problems() == []
    await second.__aexit__(None, None, None)
    assert not app.is_open


async def test_an_app_that_is_left_while_its_worker_runs_is_closed_by_the_worker(make_app: MakeApp, seen: Seen) -> None:
    app = make_app()
    slow, inside, goes_on = add_slow(app)
    worker = app.worker()
    async with app:
        await worker.__aenter__()
        await slow.enqueue()
        await passed(inside)
    goes_on.set()
    assert (await seen.wait(JobRecorded)).state == "succeeded"
    await worker.__aexit__(None, None, None)
    assert not app.is_open
    await app.close()


async def test_an_enqueue_right_before_the_end_still_gives_its_hint(make_app: MakeApp, seen: Seen) -> None:
    """The worker of another process has no poll to find it by."""
    app, other = make_app(worker=WorkerSettings(poll=3600)), make_app()
    async with app, app.worker():
        await seen.wait(ListenerConnected)
        await (await app.get("add").enqueue(0)).result(30)
        for n in range(10):
            async with other:
                job = await other.get("add").enqueue(n)
            await seen.wait(JobRecorded, job_id=job.id)


async def test_another_event_loop_is_refused(app: AioQueue) -> None:
    async def enqueue() -> None:
        await app.get("add").enqueue(1)

    def other_loop() -> None:
        with pytest.raises(ConfigurationError, match="event loop"):
            asyncio.run(enqueue())

    await asyncio.to_thread(other_loop)
    await app.get("add").enqueue(1)


async def test_an_enqueue_on_a_connection_of_another_loop_needs_no_app(app: AioQueue, worker_dsn: str, boss: Session) -> None:
    async def enqueue() -> None:
        async with await AsyncConnection.connect(worker_dsn) as conn:
            await app.get("add").options(on=conn).enqueue(1)

    await asyncio.to_thread(lambda: asyncio.run(enqueue()))
    assert await jobs(boss) == [("add", None, "ready")]


async def test_a_forked_process_is_refused(app: AioQueue) -> None:
    job = await app.get("add").enqueue(1)
    pid = os.fork()
    if pid == 0:
        # Only what cannot touch the parent's sockets; the coroutine is driven by hand, there is no loop here.
        code = 1
        try:
            job.status().send(None)
        except ConfigurationError as error:
            code = 0 if "fork" in str(error) and not app.is_open else 2
        finally:
            os._exit(code)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (await job.status()).state is JobState.READY


async def test_a_forked_process_opens_the_app_anew_and_leaves_the_parents_alone(app: AioQueue, boss: Session) -> None:
    await app.get("add").enqueue(1)

    async def child() -> None:
        await app.close()  # closes nothing of the parent's
        async with app:
            await app.get("add").enqueue(2)

    def fork() -> int:
        # From a thread: there the loop of the parent does not run, and the child's only thread is this one.
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                asyncio.run(child())
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        assert await asyncio.to_thread(fork) == 0
    assert app.is_open
    await app.get("add").enqueue(3)
    assert len(await jobs(boss)) == 3


async def test_a_database_that_cannot_be_reached_leaves_the_app_closed(make_app: MakeApp) -> None:
    app = make_app(dsn="postgresql://nobody@127.0.0.1:1/none", pool=PoolSettings(start_timeout=0))
    with pytest.raises(psycopg.OperationalError):
        await app.open()
    assert not app.is_open
    with pytest.raises(psycopg.OperationalError):
        async with app.worker():
            pass
    assert not app.is_open


async def test_windows_own_event_loop_is_refused_with_the_way_out(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "ProactorEventLoop", type(asyncio.get_running_loop()), raising=False)
    monkeypatch.setattr("aioqueue.opening.sys.platform", "win32")
    with pytest.raises(ConfigurationError, match="SelectorEventLoop"):
        await make_app().open()


async def test_closing_ends_every_wait_for_a_result(make_app: MakeApp) -> None:
    app = make_app()
    await app.open()
    waits = []
    for _ in range(20):
        job = await app.get("add").enqueue(1)
        waits.append(asyncio.create_task(job.result()))
    await asyncio.wait(waits, timeout=0)
    await app.close()
    for wait in waits:
        with pytest.raises(AppNotOpen):
            await wait


async def test_nothing_of_a_closed_app_is_left_on_the_server_or_in_the_loop(app: AioQueue, boss: Session) -> None:
    before = asyncio.all_tasks()
    counted = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aioqueue' AND pid <> pg_backend_pid()"
    async with app.worker():
        assert await (await app.get("add").enqueue(1)).result(30) == 2
    await app.close()
    assert {task for task in asyncio.all_tasks() - before if "aioqueue" in task.get_name()} == set()
    await until(boss, f"SELECT ({counted}) = 0")


# -- enqueue on the pool ---------------------------------------------------------------------------------------------


async def test_a_connection_lost_before_the_enqueue_costs_nothing(app: AioQueue, database: Database, boss: Session) -> None:
    async with session(database.dsn("superuser"), boss.store.schema) as root:
        for n in range(5):
            await root.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'aioqueue_worker' AND datname = %s",
                root.conn.info.dbname,
            )
            await until(
                root,
                "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE usename = 'aioqueue_worker'"
                " AND backend_start < pg_postmaster_start_time())",
            )
            await app.get("add").enqueue(n)
    assert len(await jobs(boss)) == 5


async def test_enqueues_that_wait_for_a_lock_cost_no_worker_its_lease(
    make_app: MakeApp, database: Database, schema: str, seen: Seen
) -> None:
    app = make_app(lease=LeaseSettings(lease=1.5), pool=PoolSettings(acquire_timeout=0.5))
    async with session(database.dsn("superuser"), schema) as boss, app, app.worker() as worker:
        await boss.begin()
        await boss.rows("LOCK TABLE aioqueue.job IN ACCESS EXCLUSIVE MODE")
        enqueues = [asyncio.create_task(app.get("add").enqueue(n)) for n in range(15)]
        beat = await boss.value("SELECT beat_at FROM aioqueue.worker WHERE id = %s", worker.id)
        await until(boss, "SELECT beat_at > %s::timestamptz + interval '4 s' FROM aioqueue.worker WHERE id = %s", beat, worker.id)
        await boss.rollback()
        ends = await asyncio.gather(*enqueues, return_exceptions=True)
        assert not seen.all(LeaseLost)
        assert not seen.all(DatabaseLost, loop="heartbeat")
    assert {type(end) for end in ends if isinstance(end, BaseException)} <= {AllInUse, psycopg.errors.LockNotAvailable}


async def test_an_enqueue_that_finds_no_free_connection_says_so_at_once(make_app: MakeApp) -> None:
    """Tried again, it would wait as long again, behind everybody else."""
    app = make_app(pool=PoolSettings(size=3, acquire_timeout=0.05))
    async with app, app.database.for_caller():
        with pytest.raises(AllInUse, match=r"within 0.05 s"):
            await app.get("add").enqueue(1)


async def test_an_enqueue_that_is_cancelled_leaves_no_connection_behind_that_waits_for_its_answer(
    make_app: MakeApp, database: Database, schema: str
) -> None:
    app = make_app(pool=PoolSettings(size=3, min_size=1, deadline=3600.0))
    async with app, session(database.dsn("superuser"), schema) as boss, asyncio.timeout(60):
        await boss.begin()
        await boss.rows("LOCK TABLE aioqueue.job IN ACCESS EXCLUSIVE MODE")
        enqueue = asyncio.create_task(app.get("add").enqueue(1))
        await until(boss, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND pid <> pg_backend_pid()")
        enqueue.cancel()
        await asyncio.wait([enqueue])
        assert enqueue.cancelled()
        await boss.rollback()
        await asyncio.gather(*(app.get("add").enqueue(n) for n in range(5)))


async def test_an_enqueue_whose_answer_is_lost_makes_exactly_one_job(
    app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[object] = []

    def lose_the_answer(write: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def written(conn: AsyncConnection[Any], new: Any, **options: Any) -> object:
            answer = await write(conn, new, **options)
            if len(lost) < 3:
                lost.append(answer)
                sever(conn)
                await conn.execute("SELECT 1")
            return answer

        return written

    monkeypatch.setattr(app.store, "enqueue_alone", lose_the_answer(app.store.enqueue_alone))
    made = await app.get("add").enqueue_many([{"a": n} for n in range(10)])
    assert len(lost) == 3
    assert sorted(row[0] for row in await boss.rows("SELECT id FROM aioqueue.live l, LATERAL (SELECT job_id AS id) x")) == sorted(
        job.id for job in made
    )


async def test_on_an_older_schema_an_enqueue_says_what_to_do(app: AioQueue, boss: Session, conn: AsyncConnection[Any]) -> None:
    await boss.rows("ALTER FUNCTION aioqueue.enqueue_alike RENAME TO later")
    try:
        for on in (conn, None):
            with pytest.raises(SchemaError, match="as its owner, run python -m aioqueue migrate"):
                await app.get("add").options(on=on).enqueue(1)
    finally:
        await boss.rows("ALTER FUNCTION aioqueue.later RENAME TO enqueue_alike")


def adding(ids: list[UUID], *numbers: int) -> NewJobs:
    return NewJobs(task="add", ids=ids, payloads=[f'{{"a": {number}}}' for number in numbers])


async def test_an_id_that_another_job_has_is_refused_and_the_same_job_again_is_success(app: AioQueue, boss: Session) -> None:
    number = new_job_id()
    for _ in range(2):
        await app.enqueue_jobs(adding([number], 1), on=None)
    with pytest.raises(DuplicateJob) as caught:
        await app.enqueue_jobs(adding([number], 2), on=None)
    assert caught.value.job_id == number
    assert len(await jobs(boss)) == 1


@pytest.mark.parametrize("number", [4, 100])
async def test_of_many_the_one_whose_id_is_taken_is_named(app: AioQueue, number: int) -> None:
    taken = new_job_id()
    await app.enqueue_jobs(adding([taken], 1), on=None)
    with pytest.raises(DuplicateJob) as caught:
        await app.enqueue_jobs(adding([*new_job_ids(number - 1), taken], *[1] * (number - 1), 2), on=None)
    assert caught.value.job_id == taken


async def test_the_payload_of_one_job_by_name_has_no_number(app: AioQueue) -> None:
    with pytest.raises(InvalidPayload) as caught:
        await app.enqueue_by_name("add", {"a": "x"})
    assert "number" not in str(caught.value)
    with pytest.raises(InvalidPayload, match=r"number 1 \(from 0\)"):
        await app.get("add").enqueue_many([{"a": 1}, {"a": "x"}])


async def test_many_are_written_all_or_none(app: AioQueue, boss: Session) -> None:
    with pytest.raises(InvalidPayload):
        await app.get("add").enqueue_many([{"a": 1}, {"a": "x"}])
    assert await jobs(boss) == []
    assert len(await app.get("add").enqueue_many([{"a": 1}, {"a": 2}])) == 2
    assert await app.get("add").enqueue_many([]) == []
    assert len(await jobs(boss)) == 2


async def test_a_name_registered_here_is_validated_one_elsewhere_is_not_and_an_unknown_one_is_refused(
    app: AioQueue, boss: Session, make_app: MakeApp
) -> None:
    await app.enqueue_by_name("add", {"a": 1}, tenant="t")
    with pytest.raises(InvalidPayload):
        await app.enqueue_by_name("add", {"a": "x"})
    with pytest.raises(UnknownTask, match="did you mean 'add'"):
        await app.enqueue_by_name("ad")
    with pytest.raises(UnknownTask):
        await app.enqueue_by_name("elsewhere")
    with pytest.raises(InvalidOption):
        await app.enqueue_by_name("add", {"a": 1}, priority=9)
    other = make_app()

    @other.task(name="elsewhere", priority=2, queue="far")
    async def elsewhere(text: str) -> str:
        return text

    async with other, other.worker(queues=["far"]):
        pass
    job = await app.enqueue_by_name("elsewhere", {"text": "hello"})
    with pytest.raises(UnknownTask, match="did you mean 'elsewhere'"):
        await app.enqueue_by_name("elsewere")
    status = await job.status()
    assert (status.queue, status.priority) == ("far", 2)
    assert [row[0] for row in await jobs(boss)] == ["add", "elsewhere"]


async def test_a_job_enqueued_in_sql_by_a_client_is_found(app: AioQueue, client_dsn: str, schema: str, seen: Seen) -> None:
    async with app.worker(), session(client_dsn, schema) as psql:
        number = await psql.value("""SELECT aioqueue.enqueue('add', '{"a": 41}', tenant => 'x')""")
        assert await app.job(number, of=app.get("add"), tenant="x").result(30) == 42
        with pytest.raises(JobNotFound):
            await app.job(number, tenant="y").result(30)
        assert (await app.job(str(number)).status()).tenant == "x"
        number = await psql.value("""SELECT aioqueue.enqueue('add', '{"a": "x"}')""")
        with pytest.raises(JobFailed, match="valid integer"):
            await app.job(number).result(30)


async def test_an_id_that_is_none_is_refused_at_once(app: AioQueue) -> None:
    for wrong in ("", "x", 7, None):
        with pytest.raises(InvalidOption, match="job_id"):
            app.job(wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(JobNotFound):
        await app.job(new_job_id()).status()
    with pytest.raises(JobNotFound):
        await app.job(new_job_id()).cancel()


async def test_a_tenant_that_is_no_name_is_refused_at_once_and_stalls_nobody(app: AioQueue) -> None:
    for wrong in ("a\0b", "\ud800", "", " ", 7):
        with pytest.raises(InvalidOption, match="tenant"):
            app.job(new_job_id(), tenant=wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_a_service_that_fails_is_started_again_and_logged(
    app: AioQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader of results, the listener and the notifier each meet a bug once; the next result comes all the same."""
    services = {"results": (ResultReader, "_wait"), "listener": (Listener, "_serve"), "notifier": (Notifier, "_ask")}
    failed: set[str] = set()

    def fail_once(name: str, service: type, method: str) -> None:
        plain = getattr(service, method)

        async def broken(*args: Any) -> Any:
            if name not in failed:
                failed.add(name)
                raise ZeroDivisionError
            return await plain(*args)

        monkeypatch.setattr(service, method, broken)

    for name, (service, method) in services.items():
        fail_once(name, service, method)
    async with app.worker():
        app.services("this test").notifier.hint("progress")  # others may carry all other hints
        for n in range(3):
            assert await (await app.get("add").enqueue(n)).result(30) == n + 1
    assert failed == set(services)
    assert sum("it is started again" in record.getMessage() for record in caplog.records) == 3


# -- enqueue on the caller's connection ------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("level", list(IsolationLevel), ids=lambda level: level.name)
async def test_a_job_exists_exactly_if_the_callers_transaction_commits(
    make_app: MakeApp, conn: AsyncConnection[Any], boss: Session, level: IsolationLevel, opened: bool
) -> None:
    app = make_app()
    if opened:
        await app.open()
    add = app.get("add")
    await conn.set_isolation_level(level)
    await conn.execute("SELECT 1")
    await add.options(on=conn, tenant="gone").enqueue(1)
    await add.options(on=conn, tenant="gone").enqueue(2)
    assert await jobs(boss) == []
    await conn.rollback()
    async with conn.transaction():
        await add.options(on=conn, tenant="stays").enqueue(1)
        with pytest.raises(ZeroDivisionError):
            async with conn.transaction():
                await add.options(on=conn, tenant="gone").enqueue(2)
                raise ZeroDivisionError
        await add.options(on=conn, tenant="stays").enqueue_many([{"a": 3}, {"a": 4}])
        assert await jobs(boss) == []
    assert await jobs(boss) == [("add", "stays", "ready")] * 3
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    await app.close()


async def test_enqueue_neither_begins_nor_commits_on_a_connection_in_autocommit(
    app: AioQueue, worker_conn: AsyncConnection[Any], boss: Session
) -> None:
    await app.get("add").options(on=worker_conn).enqueue(1)
    assert len(await jobs(boss)) == 1
    await worker_conn.execute("BEGIN")
    await app.get("add").options(on=worker_conn).enqueue(1)
    await worker_conn.execute("ROLLBACK")
    assert len(await jobs(boss)) == 1


async def test_a_job_of_a_callers_transaction_starts_with_its_commit_and_without_a_poll(
    make_app: MakeApp, conn: AsyncConnection[Any], seen: Seen
) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app, app.worker():
        job = await app.get("add").options(on=conn).enqueue(1)
        await app.get("add").enqueue(1)
        await seen.wait(JobRecorded)
        assert not seen.all(JobClaimed, job_id=job.id)
        await conn.commit()
        assert await job.result(30) == 2


async def test_so_does_one_of_a_transaction_so_long_that_the_floor_has_passed_it(
    make_app: MakeApp, conn: AsyncConnection[Any]
) -> None:
    app = make_app(worker=WorkerSettings(poll=3600, tick=0.25))
    async with app, app.worker() as worker:
        job = await app.get("add").options(on=conn).enqueue(1)
        assert worker._worker is not None
        floor = worker._worker._steps.maintenance._floors[lane("default", 0)]
        while not any(before < floor.value for before in floor._aside.values()):
            await (await app.get("add").enqueue(1)).result(30)
        await conn.commit()
        assert await job.result(30) == 2


async def test_an_aborted_transaction_is_an_error_of_its_own(app: AioQueue, conn: AsyncConnection[Any], boss: Session) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await conn.execute("SELECT 1 / 0")
    with pytest.raises(TransactionAborted):
        await app.get("add").options(on=conn).enqueue(1)
    await conn.rollback()
    await app.get("add").options(on=conn).enqueue(1)
    await conn.commit()
    assert len(await jobs(boss)) == 1


async def test_what_the_callers_connection_makes_of_rows_and_parameters_does_not_matter(
    app: AioQueue, conn: AsyncConnection[Any], boss: Session
) -> None:
    conn.row_factory = dict_row
    for factory in (psycopg.AsyncRawCursor, psycopg.AsyncClientCursor):
        conn.cursor_factory = factory
        await app.get("add").options(on=conn).enqueue(1)
    async with conn.pipeline():
        await app.get("add").options(on=conn).enqueue(1)
    await conn.commit()
    assert len(await jobs(boss)) == 3


async def test_on_takes_nothing_else(app: AioQueue) -> None:
    other = AioQueue("postgresql://nowhere/none")
    for wrong in ("dsn", object(), other):
        with pytest.raises(InvalidOption, match="on: expected a psycopg AsyncConnection"):
            await app.get("add").options(on=wrong).enqueue(1)


# -- enqueue inside a job --------------------------------------------------------------------------------------------


async def test_a_job_enqueued_in_a_jobs_own_transaction_joins_it_and_its_tenant(app: AioQueue, boss: Session) -> None:
    add = app.get("add")

    @app.task(name="parent")
    async def parent(tx: JobTransaction, fails: bool) -> list[str]:
        await add.enqueue(1)
        await add.options(tenant="chosen").enqueue(2)
        await add.options(on=app).enqueue(3)
        await app.enqueue_by_name("add", {"a": 4})
        if fails:
            raise ValueError
        return []

    stays = [("add", None, "ready")]
    async with app.worker(queues=["parents"]):
        job = await parent.options(tenant="t", queue="parents", max_attempts=1).enqueue(True)
        with pytest.raises(JobFailed):
            await job.result(30)
        assert [row for row in await jobs(boss) if row[0] == "add"] == stays
        job = await parent.options(tenant="t", queue="parents").enqueue(False)
        assert await job.result(30) == []
        made = [row[1] for row in await jobs(boss) if row[0] == "add"]
        assert sorted(made, key=str) == [None, None, "chosen", "t", "t"]


async def test_jobs_that_enqueue_outside_their_transactions_do_not_wait_for_each_other(make_app: MakeApp, boss: Session) -> None:
    """They have the whole share of jobs and callers; one caller more comes through."""
    app = make_app(pool=PoolSettings(size=4, acquire_timeout=2.0), limits=LimitSettings(transaction_wait=60))
    add, inside, both = app.get("add"), 0, asyncio.Event()

    @app.task(name="parent")
    async def parent(tx: JobTransaction) -> None:
        nonlocal inside
        inside += 1
        if inside == 2:
            both.set()
        await both.wait()
        for n in range(10):
            await add.options(on=app, queue="unserved").enqueue(n)

    async with app, app.worker():
        for job in await parent.enqueue_many([()] * 2):
            await job.result(30)
    assert await boss.rows("SELECT state, attempt, spared FROM aioqueue.outcome") == [("succeeded", 1, 0)] * 2


async def test_a_job_enqueued_by_a_job_that_holds_nothing_inherits_its_tenant(app: AioQueue, boss: Session) -> None:
    add = app.get("add")

    @app.task(name="parent")
    async def parent(ctx: JobContext) -> None:
        await add.enqueue(1)
        async with ctx.transaction() as tx:
            await add.options(on=tx).enqueue(2)
        with pytest.raises(ValueError):
            async with ctx.transaction() as tx:
                await add.options(on=tx).enqueue(3)
                raise ValueError

    async with app.worker(queues=["parents"]):
        await (await parent.options(tenant="t", queue="parents").enqueue()).result(30)
        assert await boss.rows("SELECT tenant, payload -> 'a' FROM aioqueue.jobs WHERE task = 'add' ORDER BY id") == [
            ("t", 1), ("t", 2),
        ]  # fmt: skip


async def test_a_cancel_in_a_jobs_own_transaction_is_rolled_back_with_it(app: AioQueue) -> None:
    victim = await app.get("add").options(queue="unserved").enqueue(1)

    @app.task(name="canceller")
    async def canceller(tx: JobTransaction, fails: bool) -> None:
        assert await victim.cancel() is JobState.CANCELLED
        if fails:
            raise ValueError

    async with app.worker():
        with pytest.raises(JobFailed):
            await (await canceller.options(max_attempts=1).enqueue(True)).result(30)
        assert (await victim.status()).state is JobState.READY
        await (await canceller.enqueue(False)).result(30)
        assert (await victim.status()).state is JobState.CANCELLED


async def test_inside_a_job_a_handle_finds_its_own_tenants_jobs_only_unless_it_leaves(app: AioQueue) -> None:
    add = app.get("add")
    foreign = await add.options(queue="unserved", tenant="b").enqueue(1)
    own = await add.options(queue="unserved", tenant="a").enqueue(1)

    async def ask(by: str) -> list[str]:
        found = []
        for job in (foreign, own):
            handle = app.job(job.id, on=app if by == "app" else None)
            try:
                found.append(f"{(await handle.status()).state} {await handle.cancel()}")
            except JobNotFound:
                found.append("not found")
            try:
                found.append(str(await handle.result(1.5)))
            except (JobNotFound, JobCancelled, ResultTimeout) as error:
                found.append(type(error).__name__)
        return found

    @app.task(name="holding")
    async def holding(tx: JobTransaction, by: str) -> list[str]:
        # A cancel in an open transaction is not to be waited for.
        found = []
        for job in (foreign, own):
            try:
                found.append(str(await app.job(job.id, on=app if by == "app" else None).cancel()))
            except JobNotFound:
                found.append("not found")
        return found

    @app.task(name="plain")
    async def plain(ctx: JobContext, by: str) -> list[str]:
        return await ask(by)

    hidden = ["not found", "JobNotFound"]
    async with app.worker():
        assert await (await plain.options(tenant="a").enqueue("tenant")).result(30) == [
            *hidden, "ready cancelled", "JobCancelled",
        ]  # fmt: skip
        assert (await foreign.status()).state is JobState.READY
        assert await (await holding.options(tenant="a").enqueue("tenant")).result(30) == ["not found", "cancelled"]
        assert (await foreign.status()).state is JobState.READY
        assert await (await holding.options(tenant="a").enqueue("app")).result(30) == ["cancelled", "cancelled"]
        assert await (await plain.enqueue("tenant")).result(30) == ["cancelled cancelled", "JobCancelled"] * 2
    with pytest.raises(InvalidOption, match="on: expected the app itself"):
        app.job(own.id, on=AioQueue("postgresql://nowhere/none"))


async def test_a_job_that_left_its_enqueuers_tenant_is_found_by_its_handle(app: AioQueue) -> None:
    add = app.get("add")

    @app.task(name="parent")
    async def parent(ctx: JobContext) -> list[int]:
        joined, left = await add.enqueue(1), await add.options(on=app).enqueue(2)
        by_name = await app.enqueue_by_name("add", {"a": 3})
        return [await job.result(30) for job in (joined, left, by_name)]

    async with app.worker():
        assert await (await parent.options(tenant="t").enqueue()).result(30) == [2, 3, 4]


# -- the embedded worker ---------------------------------------------------------------------------------------------


def add_slow(app: AioQueue) -> tuple[Any, asyncio.Event, asyncio.Event]:
    """A task `slow` that says when it is inside and goes on when told; cancelled, it needs a moment to clean up."""
    inside, goes_on = asyncio.Event(), asyncio.Event()

    @app.task(name="slow")
    async def slow(ctx: JobContext) -> str:
        inside.set()
        try:
            await goes_on.wait()
        finally:
            await asyncio.sleep(0.01)
        return f"attempt {ctx.attempt}, spared {ctx.spared}"

    return slow, inside, goes_on


async def test_leaving_the_block_lets_jobs_finish_and_records_them(app: AioQueue, seen: Seen) -> None:
    slow, inside, goes_on = add_slow(app)
    async with app.worker() as worker:
        job = await slow.enqueue()
        await passed(inside)
        assert worker.running == 1

        async def later() -> None:
            await seen.wait(WorkerStopping)
            goes_on.set()

        going = asyncio.create_task(later())
    await going
    assert seen.all(WorkerStopped)
    assert (await job.status()).state is JobState.SUCCEEDED


async def test_after_the_grace_period_jobs_are_handed_back_spared_and_run_elsewhere(app: AioQueue, boss: Session) -> None:
    slow, inside, goes_on = add_slow(app)
    async with app.worker(grace=0.05):
        job = await slow.enqueue()
        await passed(inside)
    assert await boss.rows("SELECT worker, attempt, spared FROM aioqueue.live") == [(None, 1, 1)]
    assert [row[:2] for row in await boss.attempts(job.id)] == [(1, "interrupted")]
    goes_on.set()
    async with app.worker():
        assert await job.result(30) == "attempt 2, spared 1"


async def test_a_worker_s_row_is_there_while_it_runs(app: AioQueue, boss: Session) -> None:
    async with app.worker() as worker:
        assert await boss.rows("SELECT id, dead FROM aioqueue.worker") == [(worker.id, False)]
    assert await boss.rows("SELECT FROM aioqueue.worker") == []


@pytest.mark.parametrize("how", ["task.cancel()", "anyio scope", "task group"])
async def test_a_cancelled_host_still_records_outcomes(make_app: MakeApp, boss: Session, how: str, seen: Seen) -> None:
    """The host's block is cancelled, not left: jobs have their grace period all the same."""
    app = make_app()
    slow, inside, goes_on = add_slow(app)
    entered = asyncio.Event()
    ids: list[Any] = []

    async def host() -> None:
        async with app, app.worker():
            ids.append((await slow.enqueue()).id)
            entered.set()
            await asyncio.Event().wait()

    async def let_go() -> None:
        await seen.wait(WorkerStopping)
        goes_on.set()

    letting = asyncio.create_task(let_go())
    if how == "task.cancel()":
        task = asyncio.create_task(host())
        await passed(entered)
        await passed(inside)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "anyio scope":
        scope = anyio.CancelScope()

        async def cancel() -> None:
            await passed(inside)
            scope.cancel()

        cancelling = asyncio.create_task(cancel())
        with scope:
            await host()
        await cancelling
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(host)
            await passed(inside)
            group.cancel_scope.cancel()
    await letting
    assert not app.is_open
    assert await boss.rows("SELECT state, result FROM aioqueue.outcome") == [("succeeded", "attempt 1, spared 0")]
    await until(boss, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'aioqueue')")


async def test_a_host_cancelled_while_the_worker_starts_leaves_nothing_running(make_app: MakeApp, boss: Session) -> None:
    app = make_app()
    starting = asyncio.Event()
    register = app.store.register_worker

    async def slowly(*args: Any, **options: Any) -> None:
        await register(*args, **options)
        starting.set()
        await asyncio.Event().wait()

    app.store.register_worker = slowly  # type: ignore[method-assign]

    async def host() -> None:
        async with app.worker():
            raise AssertionError("it has not started")

    task = asyncio.create_task(host())
    await passed(starting)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not app.is_open
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("aioqueue")] == []


@pytest.mark.parametrize("how", ["run", "block"])
async def test_a_worker_that_is_cancelled_twice_leaves_nothing_behind(make_app: MakeApp, boss: Session, how: str) -> None:
    app = make_app()
    slow, inside, _ = add_slow(app)

    async def block() -> None:
        async with app.worker(grace=3600) as worker:
            await worker.wait()

    async with app:
        await slow.enqueue()
        task = asyncio.create_task(app.worker(grace=3600).run() if how == "run" else block())
        await passed(inside)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.02)
        await asyncio.wait([task])
        assert task.cancelled()
        assert await boss.rows("SELECT worker, attempt, spared FROM aioqueue.live") == [(None, 1, 1)]
        assert await boss.rows("SELECT FROM aioqueue.worker") == []
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("aioqueue")] == []
    assert [t.name for t in threading.enumerate() if t.name == "aioqueue guard"] == []
    await until(boss, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'aioqueue')")


async def test_a_worker_that_has_ended_says_so(app: AioQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = app.worker(drain=True)
    async with worker:
        await worker.wait()
        assert worker.problems() == ["the worker has ended"]
    broken = app.worker()

    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("aioqueue.stop.Stop.wait", fail)
    with pytest.raises(ZeroDivisionError):
        async with broken:
            with pytest.raises(ZeroDivisionError):
                await broken.wait()
            assert broken.problems() == ["the worker has ended: ZeroDivisionError: a bug"]


async def test_a_stop_before_the_start_counts(app: AioQueue) -> None:
    worker = app.worker()
    worker.stop()
    async with asyncio.timeout(60):
        await worker.run()


async def test_a_worker_is_started_once(app: AioQueue) -> None:
    worker = app.worker()
    async with worker:
        with pytest.raises(ConfigurationError, match="started already"):
            await worker.run()
    with pytest.raises(ConfigurationError, match="started already"):
        async with worker:
            pass


async def test_stop_may_be_asked_for_twice_and_hurry_hands_back_at_once(app: AioQueue, boss: Session) -> None:
    slow, inside, _ = add_slow(app)
    async with app.worker(grace=3600) as worker:
        await slow.enqueue()
        await passed(inside)
        worker.stop()
        worker.stop()
        worker.stop(hurry=True)
        await worker.wait()
    worker.stop()
    assert await boss.rows("SELECT worker, attempt, spared FROM aioqueue.live") == [(None, 1, 1)]


async def test_lifespan_opens_the_app_for_a_web_application(make_app: MakeApp) -> None:
    app = make_app()
    async with app.lifespan(object()):
        inside = app.is_open
    assert inside and not app.is_open


async def test_a_running_job_is_cancelled_by_its_id_without_a_poll(make_app: MakeApp) -> None:
    app = make_app(worker=WorkerSettings(poll=3600))
    slow, inside, _ = add_slow(app)
    async with app, app.worker():
        job = await slow.enqueue()
        await passed(inside)
        assert await job.cancel() is JobState.RUNNING
        with pytest.raises(JobCancelled):
            await job.result(30)
        assert await job.cancel() is JobState.CANCELLED


async def test_a_pool_of_the_smallest_size_serves_a_worker_and_the_callers(make_app: MakeApp) -> None:
    app = make_app(pool=PoolSettings(size=3), limits=LimitSettings(transaction_wait=30))

    @app.task(name="own")
    async def own(tx: JobTransaction, n: int) -> int:
        return n + int(await tx.fetch_value("SELECT 1"))

    async with app, app.worker():
        made = await own.enqueue_many([(n,) for n in range(30)])
        assert [await job.result(60) for job in made] == list(range(1, 31))


async def test_a_stopped_server_does_not_keep_the_app_from_closing(make_app: MakeApp, database: Database, schema: str) -> None:
    """A backend that hangs is left behind."""
    app = make_app()
    await app.open()
    async with app.database.runtime() as conn:
        pid = conn.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await app.close()
        assert not app.is_open
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("short", [False, True])
async def test_a_job_of_ones_own_transaction_is_not_committed_yet(make_app: MakeApp, short: bool) -> None:
    app = make_app()

    @app.task(name="inner")
    async def inner() -> int:
        return 1

    async def look(job: Job[int]) -> list[str]:
        said = []
        for question in (job.result(30), job.status()):
            with pytest.raises(NotCommitted) as refused:
                await question
            said.append(type(refused.value).__name__)
        return said

    @app.task(name="own")
    async def own(tx: JobTransaction) -> list[str]:
        return await look(await inner.enqueue())

    @app.task(name="between")
    async def between(ctx: JobContext) -> list[str]:
        async with ctx.transaction():
            job = await inner.enqueue()
            said = await look(job)
        assert await job.result(30) == 1
        return said

    async with app, app.worker():
        job = await (between if short else own).enqueue()
        assert await job.result(30) == ["NotCommitted"] * 2


async def test_a_closed_app_advises_a_connection_only_where_one_helps(make_app: MakeApp) -> None:
    app = make_app()
    with pytest.raises(AppNotOpen, match=r"options\(on=connection\)"):
        await app.get("add").enqueue(1)
    with pytest.raises(AppNotOpen) as caught:
        await app.job("00000000-0000-7000-8000-000000000001").result(1)
    assert "on=" not in str(caught.value) and "result() needs an open app" in str(caught.value)
