"""The reporter: what many jobs say, from many threads, in few statements; throttled, never lost while a job runs."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.events import DatabaseLost, DatabaseRecovered, Observers
from aioqueue.report import Reporter
from aioqueue.settings import PoolSettings
from aioqueue.store import Store
from tests.kit import Seen, passed, until
from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio

IN_TABLE = "SELECT array_agg(value ORDER BY value) FROM aioqueue.progress"


class CountingStore(Store):
    """The real store; `instead` may run in the place of a write, or after it."""

    def __init__(self, schema: str) -> None:
        super().__init__(schema)
        self.sizes: list[int] = []
        self.instead: Callable[[AsyncConnection[Any], str], Awaitable[None]] | None = None

    async def report(self, conn: AsyncConnection[Any], reports: str) -> None:
        self.sizes.append(len(json.loads(reports)))
        if self.instead is None:
            await self.write(conn, reports)
        else:
            await self.instead(conn, reports)

    async def write(self, conn: AsyncConnection[Any], reports: str) -> None:
        await super().report(conn, reports)


@dataclass
class Reports:
    """A reporter that runs, and jobs that it is told of."""

    reporter: Reporter
    store: CountingStore
    engine: Session
    task: "asyncio.Task[None]"
    hints: list[str] = field(default_factory=list)

    async def jobs(self, number: int = 1) -> list[Claimed]:
        await self.engine.enqueue(number)
        jobs = await self.engine.claim(await self.engine.register(), number)
        for job in jobs:
            job.reporter = self.reporter
        return jobs

    async def until(self, *values: float) -> None:
        """Wait until these are the values in the table."""
        await until(self.engine, f"SELECT ({IN_TABLE}) IS NOT DISTINCT FROM %s::float8[]", list(values) or None)


@asynccontextmanager
async def reporting(dsn: str, engine: Session, seen: Seen) -> AsyncIterator[Reports]:
    database = Database(dsn, PoolSettings())
    await database.open()
    store = CountingStore(engine.store.schema)
    reporter = Reporter(database, store, Observers([seen]), reported=lambda: made.hints.append("progress"))
    made = Reports(reporter, store, engine, asyncio.create_task(reporter.run()))
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.wait([made.task])
        await database.close()
        assert made.task.cancelled()


@pytest.fixture
async def made(worker_dsn: str, boss: Session, seen: Seen) -> AsyncIterator[Reports]:
    async with reporting(worker_dsn, boss, seen) as made:
        yield made


async def test_a_thousand_jobs_are_one_statement(made: Reports) -> None:
    jobs = await made.jobs(1_000)
    for number, job in enumerate(jobs):
        made.reporter.report(job, number / 1_000, "so far")
    await made.until(*(number / 1_000 for number in range(1_000)))
    assert made.store.sizes == [1_000]
    assert made.hints == ["progress"]


async def test_of_many_values_the_last_is_written_and_few_others(made: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = await made.jobs()
    for number in range(1, 1_000):
        made.reporter.report(job, number / 2_000, None)
        await asyncio.sleep(0)
    await made.until(999 / 2_000)
    assert len(made.store.sizes) < 20
    made.reporter.report(job, 999 / 2_000, None)
    assert not made.reporter._work.is_set(), "the same again is no report"


async def test_the_first_and_the_full_value_do_not_wait_for_their_turn(made: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = await made.jobs()
    monkeypatch.setattr("aioqueue.report.INTERVAL", 3_600.0)
    made.reporter.report(job, 0.1, None)
    await made.until(0.1)
    made.reporter.report(job, 0.2, None)
    made.reporter.report(job, 1.0, None)
    await made.until(1.0)
    (late,) = await made.jobs()
    made.reporter.report(job, 0.5, None)
    made.reporter.report(late, 0.3, None)
    await made.until(0.3, 1.0)
    assert made.store.sizes == [1, 1, 1]


async def test_threads_report_too(made: Reports) -> None:
    jobs = await made.jobs(8)

    def work(job: Claimed) -> None:
        for number in range(1, 101):
            made.reporter.report(job, number / 200, None)

    threads = [threading.Thread(target=work, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    await made.until(*[0.5] * 8)
    for thread in threads:
        await asyncio.to_thread(thread.join)


async def test_a_thread_that_reports_without_end_wakes_the_loop_once_for_a_write(
    made: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = await made.jobs()
    woken: list[bool] = []
    wake = made.reporter._set

    def count(urgent: bool) -> None:
        woken.append(urgent)
        wake(urgent)

    monkeypatch.setattr(made.reporter, "_set", count)

    def work() -> None:
        for number in range(1_000):
            made.reporter.report(job, number / 2_000, None)
        made.reporter.report(job, 0.75, None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()  # the loop stands still meanwhile
    await made.until(0.75)
    assert woken == [True]


async def test_first_reports_of_many_jobs_are_no_more_rows_a_second_than_others(
    made: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioqueue.report.RATE", 20)
    writes: list[tuple[float, int]] = []
    take = made.reporter._take

    def note(now: float) -> list[Any]:
        batch = take(now)
        writes.append((now, len(batch)))
        return batch

    monkeypatch.setattr(made.reporter, "_take", note)
    jobs = await made.jobs(4)
    for job in jobs[:3]:
        made.reporter.report(job, 0.25, None)
    await made.until(0.25, 0.25, 0.25)
    made.reporter.report(jobs[3], 0.5, None)
    await made.until(0.25, 0.25, 0.25, 0.5)
    (first, rows), (second, _) = [write for write in writes if write[1]]
    assert rows == 3
    assert second - first >= 3 / 20 - 0.001, "a least time, which no load shortens"


async def test_what_an_ended_run_has_reported_goes_and_it_reports_no_more(made: Reports) -> None:
    ended, early, running = await made.jobs(3)
    made.reporter.report(ended, 0.25, None)
    made.reporter.report(running, 0.5, None)
    await made.until(0.25, 0.5)
    made.reporter.report(early, 0.75, None)
    for job in (ended, early):
        made.reporter.ended(job)
        made.reporter.ended(job)
        made.reporter.report(job, 0.9, None)
    await made.until(0.5)
    assert [found.job for found in made.reporter._of.values()] == [running]
    assert 0.75 not in (await made.engine.value(IN_TABLE))


async def test_an_outage_is_said_once_and_the_last_value_comes_after_it(made: Reports, seen: Seen) -> None:
    (job,) = await made.jobs()
    failures = 3

    async def fail(conn: AsyncConnection[Any], reports: str) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            made.reporter.report(job, 0.5 + failures / 10, None)
            raise psycopg.OperationalError("the server is away")
        await made.store.write(conn, reports)

    made.store.instead = fail
    made.reporter.report(job, 0.1, None)
    await made.until(0.5)
    await seen.wait(DatabaseRecovered, loop="reporter")
    assert len(seen.all(DatabaseLost, loop="reporter")) == 1
    assert len(made.reporter._of) == 1


async def test_writes_without_an_answer_leave_one_row(made: Reports) -> None:
    (job,) = await made.jobs()
    failures = 2

    async def lose_the_answer(conn: AsyncConnection[Any], reports: str) -> None:
        nonlocal failures
        await made.store.write(conn, reports)
        failures -= 1
        if failures >= 0:
            raise psycopg.OperationalError("the answer is lost")

    made.store.instead = lose_the_answer
    made.reporter.report(job, 0.1, None)
    await until(made.engine, f"SELECT ({IN_TABLE}) IS NOT NULL")
    made.reporter.report(job, 0.2, None)
    await made.until(0.2)
    made.reporter.ended(job)
    await made.until()


async def test_an_outage_while_a_run_ends_leaves_nothing_behind(made: Reports) -> None:
    (job,) = await made.jobs()
    failures = 1

    async def end_and_lose(conn: AsyncConnection[Any], reports: str) -> None:
        nonlocal failures
        await made.store.write(conn, reports)
        failures -= 1
        if failures >= 0:
            made.reporter.ended(job)
            raise psycopg.OperationalError("the answer is lost")

    made.store.instead = end_and_lose
    made.reporter.report(job, 0.1, None)
    await until(made.engine, f"SELECT ({IN_TABLE}) IS NOT NULL")
    await made.until()
    # What comes next finds it gone: the answer of the last write is here by then.
    (later,) = await made.jobs()
    made.reporter.report(later, 0.2, None)
    await made.until(0.2)
    assert [found.job for found in made.reporter._of.values()] == [later]


async def test_what_the_database_refuses_is_said_once_and_stops_nobody(made: Reports, caplog: pytest.LogCaptureFixture) -> None:
    first, second = await made.jobs(2)
    refusals = 0
    refused = asyncio.Event()

    async def refuse(conn: AsyncConnection[Any], reports: str) -> None:
        nonlocal refusals
        if '"p": 0.1' in reports:
            refusals += 1
            refused.set()
            raise psycopg.errors.NumericValueOutOfRange("for the test")
        await made.store.write(conn, reports)

    made.store.instead = refuse
    with caplog.at_level(logging.WARNING, "aioqueue"):
        made.reporter.report(first, 0.1, None)
        await passed(refused)
        made.reporter.report(second, 0.2, None)
        await made.until(0.2)
        made.reporter.report(first, 0.3, None)
        await made.until(0.2, 0.3)
    assert [record.message.split(":")[0] for record in caplog.records] == ["progress cannot be written for now"]
    assert refusals == 1


async def test_a_worker_sweeps_at_its_start_what_dead_ones_have_left(worker_dsn: str, boss: Session, seen: Seen) -> None:
    async with reporting(worker_dsn, boss, seen) as made:
        ended, running = await made.jobs(2)
        made.reporter.report(ended, 0.25, None)
        made.reporter.report(running, 0.5, None)
        await made.until(0.25, 0.5)
        await boss.record(ended.worker, entry(ended))
    async with reporting(worker_dsn, boss, seen) as made:
        await made.until(0.5)


async def test_a_worker_that_stops_takes_what_it_has_written_with_it(worker_dsn: str, boss: Session, seen: Seen) -> None:
    async with reporting(worker_dsn, boss, seen) as made:
        (job,) = await made.jobs()
        made.reporter.report(job, 0.25, None)
        await made.until(0.25)
        made.task.cancel()
        await asyncio.wait([made.task])
        await made.reporter.clear(1.0)
        assert await boss.value(IN_TABLE) is None
