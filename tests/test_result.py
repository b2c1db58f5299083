"""Waiting for results: the ways a job ends, the ways a wait ends, and what a database in trouble does to neither."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue.callers.transactions import SeenByStatus
from aioqueue.errors import (
    AppNotOpen,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotCommitted,
    ResultInvalid,
    ResultTimeout,
)
from aioqueue.job import JobState, new_job_id
from aioqueue.result import LONGEST_REST, REST
from tests.sql.engine import Session
from tests.waiting import DEATH, SUCCESS, Start, boss, finish, other, start

__all__ = ["boss", "other", "start"]  # fixtures

pytestmark = pytest.mark.anyio

EIGHT_DAYS = 8 * 86_400_000


async def test_result_of_a_job_that_ends_while_waited_for(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    await finish(other, **SUCCESS)
    assert await waiting == {"total": 3}


async def test_result_of_a_job_that_ended_before_the_call(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    await finish(other, **SUCCESS)
    assert await process.reader.wait(process.job(job_id), None) == {"total": 3}
    assert await process.reader.wait(process.job(job_id), 0) == {"total": 3}


async def test_a_dead_job_raises_with_its_last_error(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    await finish(other, "error", **DEATH)
    with pytest.raises(JobFailed, match="no such month") as failed:
        await waiting
    assert (failed.value.attempt, failed.value.error_type) == (1, "ValueError")


async def test_a_cancelled_job_raises(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    assert await other.cancel(job_id) == "cancelled"
    await other.store.notify(other.conn, "done")
    with pytest.raises(JobCancelled):
        await waiting


async def test_a_job_that_ends_after_the_read_and_before_listen_is_not_missed(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    await finish(other, **SUCCESS)
    process.may_listen.set()
    assert await waiting == {"total": 3}


async def test_a_job_that_ends_during_the_read_is_not_missed(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    ended = asyncio.Event()

    async def while_reading(_: int, conn: AsyncConnection[Any]) -> None:
        # The snapshot is older than the job's end, and the hint comes before the answer.
        await conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await conn.execute("SELECT 1 FROM pg_catalog.pg_class LIMIT 1")
        if not ended.is_set():
            heard = asyncio.Event()
            process.listener.subscribe("done", heard.set)
            await finish(other, **SUCCESS)
            await heard.wait()
            ended.set()

    process.store.before = while_reading
    process.reader._hint()
    assert await waiting == {"total": 3}
    assert ended.is_set()


async def test_the_slow_poll_finds_what_no_hint_told(start: Start, other: Session) -> None:
    process = await start(poll=0.05, listening=False)
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    await finish(other, hint=False, **SUCCESS)
    assert await waiting == {"total": 3}


async def test_a_result_that_is_there_at_the_deadline_is_no_timeout(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()

    async def at_the_deadline(number: int, _: AsyncConnection[Any]) -> None:
        if number == 2:
            await finish(other, hint=False, **SUCCESS)

    process.store.before = at_the_deadline
    assert await process.reader.wait(process.job(job_id), 0.1) == {"total": 3}
    assert len(process.store.sizes) == 2


async def test_a_job_under_way_at_the_deadline_is_a_timeout_and_goes_on(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    with pytest.raises(ResultTimeout, match=r"within 0.05 s \(state: ready\)") as late:
        await process.reader.wait(process.job(job_id), 0.05)
    assert isinstance(late.value, TimeoutError)
    assert await other.state(job_id) == "ready"


async def test_an_unknown_job_is_waited_for_and_then_not_found(start: Start) -> None:
    process = await start()
    began = time.monotonic()
    with pytest.raises(JobNotFound) as missing:
        await process.reader.wait(process.job(new_job_id()), None)
    assert not missing.value.expired
    assert time.monotonic() - began >= 1.0
    with pytest.raises(JobNotFound):
        await process.reader.wait(process.job(uuid4()), None)


async def test_an_unknown_job_at_the_deadline_is_a_timeout(start: Start) -> None:
    process = await start()
    with pytest.raises(ResultTimeout, match="unknown"):
        await process.reader.wait(process.job(new_job_id()), 0.05)


async def test_a_job_that_another_process_commits_a_moment_later_is_found(start: Start, other: Session) -> None:
    process = await start()
    await other.begin()
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    await other.commit()
    await finish(other, **SUCCESS)
    assert await waiting == {"total": 3}


async def test_an_unknown_id_older_than_the_retention_says_so(start: Start) -> None:
    process = await start()
    old = UUID(int=new_job_id().int - (EIGHT_DAYS << 80))
    with pytest.raises(JobNotFound, match="retention") as missing:
        await process.reader.wait(process.job(old), None)
    assert missing.value.expired
    with pytest.raises(JobNotFound, match="retention"):
        await process.reader.status(process.job(old))


async def test_a_job_that_is_pruned_while_waited_for_is_not_found(start: Start, other: Session, boss: Session) -> None:
    process = await start(poll=0.05)
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    await boss.rows("DELETE FROM aioqueue.live WHERE job_id = %s", job_id)
    await boss.rows("DELETE FROM aioqueue.job WHERE id = %s", job_id)
    with pytest.raises(JobNotFound):
        await waiting


async def test_a_job_in_an_open_transaction_of_this_process_is_not_committed(start: Start, other: Session) -> None:
    process = await start()
    await other.begin()
    job_id = await other.enqueue_one()
    process.notifier.watch(SeenByStatus(other.conn), int(await other.value("SELECT pg_current_xact_id()::text")), [job_id])
    for question in (process.reader.wait(process.job(job_id), None), process.reader.status(process.job(job_id))):
        with pytest.raises(NotCommitted):
            await question
    await other.commit()
    assert (await process.reader.status(process.job(job_id))).state is JobState.READY
    await finish(other, **SUCCESS)
    assert await process.reader.wait(process.job(job_id), None) == {"total": 3}


async def test_a_commit_during_the_read_is_not_taken_for_none(start: Start, other: Session) -> None:
    process = await start()
    await other.begin()
    job_id = await other.enqueue_one()
    process.notifier.watch(SeenByStatus(other.conn), int(await other.value("SELECT pg_current_xact_id()::text")), [job_id])

    async def commit(number: int, _: AsyncConnection[Any]) -> None:
        if number == 1:
            # The caller's connection is in its next transaction already, so only the server could tell.
            await other.rows("COMMIT")
            await finish(other, **SUCCESS)
            await other.begin()

    process.store.before = commit
    assert await process.reader.wait(process.job(job_id), None) == {"total": 3}


async def test_a_tenant_gets_its_own_results_only(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one(tenant="a")
    mine, foreign, anyone = process.wait(job_id, "a"), process.wait(job_id, "b"), process.wait(job_id)
    await process.store.wait_reads(1)
    await finish(other, **SUCCESS)
    assert await mine == {"total": 3}
    assert await anyone == {"total": 3}
    with pytest.raises(JobNotFound):
        await foreign
    with pytest.raises(JobNotFound):
        await process.reader.wait(process.job(job_id, "b"), None)
    with pytest.raises(JobNotFound):
        await process.reader.status(process.job(job_id, "b"))
    assert (await process.reader.status(process.job(job_id, "a"))).tenant == "a"


async def test_two_waiters_on_one_job_both_get_it(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    first = process.wait(job_id)
    await process.store.wait_reads(1)
    second = process.wait(job_id)
    await process.store.wait_reads(2)
    await finish(other, **SUCCESS)
    assert [await first, await second] == [{"total": 3}] * 2


async def test_thousands_of_waiters_are_one_listener_and_one_query_per_wakeup(
    start: Start, other: Session, boss: Session
) -> None:
    process = await start()
    job_ids = await other.enqueue(2_000)
    waiting = [process.wait(job_id) for job_id in job_ids]
    await process.store.wait_reads(1)
    before = len(process.store.sizes)
    await finish(other, number=2_000, **SUCCESS)
    assert await asyncio.gather(*waiting) == [{"total": 3}] * 2_000
    assert process.store.sizes[before:] == [2_000]
    listening = await boss.value("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %%'")
    assert listening == 1
    assert process.reader._waiting == {}
    assert process.reader._asked == set()


async def test_a_newcomer_is_read_alone(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_ids = await other.enqueue(50)
    waiting = [process.wait(job_id) for job_id in job_ids]
    await process.store.wait_reads(1)
    waiting.append(process.wait(await other.enqueue_one()))
    await process.store.wait_reads(2)
    assert process.store.sizes == [50, 1]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_reads_are_paced_by_their_own_duration(start: Start, other: Session) -> None:
    process = await start(listening=False)

    async def slowly(number: int, _: AsyncConnection[Any]) -> None:
        process.reader._hint()  # hints keep coming
        await asyncio.sleep(0.02)

    process.store.before = slowly
    waiting = process.wait(await other.enqueue_one())
    await process.store.wait_reads(5)
    reads = process.store.reads
    for (started, ended), (following, _) in pairwise(reads):
        assert following - ended >= min(REST * (ended - started), LONGEST_REST) - 0.002
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_nothing_is_read_for_nobody(start: Start, other: Session) -> None:
    process = await start(poll=0.001)
    job_id = await other.enqueue_one()
    await finish(other, **SUCCESS)
    await process.reader.wait(process.job(job_id), None)
    before = len(process.store.sizes)
    for _ in range(20):
        await other.store.notify(other.conn, "done")
        process.reader._hint()
        await asyncio.sleep(0)
    # A round trip of the same pool, begun after the hints: a read would have begun before it.
    await process.reader.status(process.job(job_id))
    assert len(process.store.sizes) == before


async def test_a_cancelled_wait_leaves_nothing_behind(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    stays, goes = process.wait(job_id), process.wait(job_id)
    alone = process.wait(await other.enqueue_one())
    await process.store.wait_reads(1)
    for task in (goes, alone):
        task.cancel()
    await asyncio.wait([goes, alone])
    assert goes.cancelled()
    assert alone.cancelled()
    assert [len(waiters) for waiters in process.reader._waiting.values()] == [1]
    await finish(other, **SUCCESS)
    assert await stays == {"total": 3}
    assert process.reader._waiting == {}
    assert await other.state(job_id) == "succeeded"


async def test_a_wait_survives_the_loss_of_its_connection_again_and_again(start: Start, other: Session, boss: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()

    async def kill(number: int, conn: AsyncConnection[Any]) -> None:
        if number <= 6:
            await boss.rows("SELECT pg_terminate_backend(%s)", conn.info.backend_pid)
        if number == 4:
            await finish(other, **SUCCESS)

    boss.conn.add_notice_handler(lambda _: None)
    process.store.before = kill
    assert await process.reader.wait(process.job(job_id), 60) == {"total": 3}
    assert len(process.store.sizes) == 7


@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.ReadOnlySqlTransaction("in recovery"),
        psycopg.errors.UndefinedFunction("no such function"),
        psycopg.errors.QueryCanceled("statement timeout"),
        psycopg.InterfaceError("bad state"),
        ConnectionResetError(),
    ],
)
async def test_no_error_of_a_read_ends_a_wait(start: Start, other: Session, error: Exception) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    await finish(other, **SUCCESS)

    async def fail(number: int, _: AsyncConnection[Any]) -> None:
        if number <= 2:
            raise error

    process.store.before = fail
    assert await process.reader.wait(process.job(job_id), 60) == {"total": 3}


async def test_a_timeout_names_the_error_that_no_read_overcame(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()

    async def fail(number: int, _: AsyncConnection[Any]) -> None:
        raise psycopg.errors.UndefinedFunction("no such function")

    process.store.before = fail
    with pytest.raises(ResultTimeout) as late:
        await process.reader.wait(process.job(job_id), 0.1)
    assert isinstance(late.value.__cause__, psycopg.errors.UndefinedFunction)


async def test_the_result_is_decoded_by_the_job_or_as_json(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    await finish(other, **SUCCESS)
    assert await process.job(job_id, decode=len).result() == len(json.dumps(SUCCESS["r"]))
    assert await process.job(job_id).result() == {"total": 3}
    with pytest.raises(ResultInvalid, match="invalid literal"):
        await process.job(job_id, decode=int).result()


async def test_a_result_of_none_is_none(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    await finish(other, r=None)
    assert await process.job(job_id).result() is None


async def test_waiters_of_a_reader_that_is_closed_are_told_and_later_ones_too(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    waiting = process.wait(job_id)
    await process.store.wait_reads(1)
    process.reader.close()
    with pytest.raises(AppNotOpen):
        await waiting
    with pytest.raises(AppNotOpen):
        await process.wait(job_id)


async def test_status_reads_on_when_the_pool_is_full_of_dead_connections(start: Start, other: Session, boss: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    async with AsyncExitStack() as stack:
        conns = [await stack.enter_async_context(process.database.runtime()) for _ in range(4)]
        pids = [conn.info.backend_pid for conn in conns]
    await boss.rows("SELECT pg_terminate_backend(pid, 10000) FROM unnest(%s::integer[]) AS u (pid)", pids)
    assert (await process.reader.status(process.job(job_id))).state is JobState.READY
    with pytest.raises(JobNotFound):
        await process.reader.status(process.job(new_job_id()))


@pytest.mark.parametrize("tenant", ["a\0b", "\ud800"])
async def test_what_cannot_be_asked_for_fails_its_own_waiters_and_no_others(start: Start, other: Session, tenant: str) -> None:
    process = await start(poll=0.05)
    job_ids = await other.enqueue(5)
    waiting = [process.wait(job_id) for job_id in job_ids]
    with pytest.raises((psycopg.DataError, UnicodeError)):
        await process.wait(new_job_id(), tenant)
    await finish(other, number=5, **SUCCESS)
    assert await asyncio.gather(*waiting) == [{"total": 3}] * 5


async def test_an_unexpected_error_of_a_read_ends_the_waits_it_concerns_and_not_the_reader(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    await finish(other, **SUCCESS)

    async def fail(number: int, _: AsyncConnection[Any]) -> None:
        if number == 1:
            raise ZeroDivisionError

    process.store.before = fail
    with pytest.raises(ZeroDivisionError):
        await process.reader.wait(process.job(job_id), 60)
    assert await process.reader.wait(process.job(job_id), 60) == {"total": 3}
