"""Watching jobs: what is told, once each, by one listener and one query for all who watch in a process."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from aioqueue.callers.transactions import SeenByStatus
from aioqueue.errors import AppNotOpen, JobCancelled, JobFailed, JobNotFound, NotCommitted, ResultInvalid, ResultTimeout
from aioqueue.job import JobState, new_job_id
from aioqueue.listen import channel
from aioqueue.states import JobEnded, JobEvent, ProgressChanged, StateChanged
from tests.kit import PATIENCE, passed
from tests.sql.engine import Session, entry, progress
from tests.waiting import DEATH, SUCCESS, Start, boss, finish, other, start

__all__ = ["boss", "other", "start"]  # fixtures

pytestmark = pytest.mark.anyio


async def come_further(session: Session, *reports: dict[str, object], hint: bool = True) -> None:
    await session.store.report(session.conn, json.dumps(reports))
    if hint:
        await session.store.notify(session.conn, "progress")


async def then(events: AsyncIterator[JobEvent[Any]]) -> JobEvent[Any]:
    """The next event."""
    async with asyncio.timeout(PATIENCE):
        return await anext(events)


async def all_of(events: AsyncIterator[JobEvent[Any]]) -> list[JobEvent[Any]]:
    async with asyncio.timeout(PATIENCE):
        return [event async for event in events]


def state(job_id: UUID, name: str, attempt: int) -> StateChanged:
    return StateChanged(job_id=job_id, state=JobState(name), attempt=attempt)


async def test_a_watch_begins_with_the_present_state_and_ends_with_the_result(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    assert await then(events) == state(job_id, "ready", 0)
    worker = await other.register()
    job = await other.claim_one(worker)
    await come_further(other, progress(job, 0.25, m="1 of 4"))
    assert await then(events) == state(job_id, "running", 1)
    told = await then(events)
    assert isinstance(told, ProgressChanged)
    assert (told.job_id, told.attempt, told.progress.value, told.progress.message) == (job_id, 1, 0.25, "1 of 4")
    await come_further(other, progress(job, 0.5, 2, [1]))
    told = await then(events)
    assert isinstance(told, ProgressChanged)
    assert told.progress.value == 0.5
    await other.record(worker, entry(job, "error", d=60, t="E", m="for now"))
    await other.store.notify(other.conn, "done")
    assert await then(events) == state(job_id, "scheduled", 1)
    assert await other.cancel(job_id) == "cancelled"
    await other.store.notify(other.conn, "done")
    (end,) = await all_of(events)
    assert isinstance(end, JobEnded)
    assert (end.state, end.attempt, end.result) == (JobState.CANCELLED, 1, None)
    assert isinstance(end.error, JobCancelled)
    assert await all_of(events) == []


async def test_of_a_job_that_has_ended_only_the_end_is_told(start: Start, other: Session) -> None:
    process = await start(listening=False)
    succeeded, dead = await other.enqueue_one(), await other.enqueue_one()
    await finish(other, **SUCCESS)
    await finish(other, "error", **DEATH)
    (end,) = await all_of(process.job(succeeded).watch())
    assert end == JobEnded(job_id=succeeded, state=JobState.SUCCEEDED, attempt=1, result={"total": 3}, error=None)
    (end,) = await all_of(process.job(dead).watch())
    assert isinstance(end, JobEnded)
    assert (end.state, end.result, type(end.error), str(end.error).endswith("no such month")) == ("dead", None, JobFailed, True)


async def test_a_result_of_another_type_is_in_the_event_too(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    await finish(other, **SUCCESS)

    def decode(_: str) -> Any:
        raise ValueError("not a Total")

    (end,) = await all_of(process.job(job_id, decode=decode).watch())
    assert isinstance(end, JobEnded)
    assert (end.state, type(end.error)) == (JobState.SUCCEEDED, ResultInvalid)


async def test_unknown_and_foreign_jobs_are_not_found(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one(tenant="a")
    for events in (process.job(new_job_id()).watch(), process.job(job_id, "b").watch()):
        with pytest.raises(JobNotFound):
            await then(events)
    assert await then(process.job(job_id, "a").watch()) == state(job_id, "ready", 0)


async def test_a_job_in_an_open_transaction_of_this_process_is_not_committed(start: Start, other: Session) -> None:
    process = await start()
    await other.begin()
    job_id = await other.enqueue_one()
    process.notifier.watch(SeenByStatus(other.conn), int(await other.value("SELECT pg_current_xact_id()::text")), [job_id])
    with pytest.raises(NotCommitted):
        await then(process.job(job_id).watch())
    await other.rollback()


async def test_a_watch_that_takes_too_long_says_so(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch(timeout=0.05)
    assert await then(events) == state(job_id, "ready", 0)
    with pytest.raises(ResultTimeout, match=r"within 0.05 s"):
        await then(events)


async def test_without_any_hint_a_change_is_seen_with_the_next_poll(start: Start, other: Session) -> None:
    process = await start(poll=0.05, listening=False)
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    await then(events)
    worker = await other.register()
    job = await other.claim_one(worker)
    assert await then(events) == state(job_id, "running", 1)
    await come_further(other, progress(job), hint=False)
    assert isinstance(await then(events), ProgressChanged)
    await other.record(worker, entry(job, **SUCCESS))
    assert isinstance(await then(events), JobEnded)


async def test_what_comes_while_the_listener_was_away_is_seen_at_once_when_it_is_back(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    await then(events)
    job = await other.claim_one(await other.register())
    await come_further(other, progress(job))
    next_one = asyncio.create_task(then(events))
    process.may_listen.set()
    assert await next_one == state(job_id, "running", 1)
    assert isinstance(await then(events), ProgressChanged)


async def test_what_comes_between_two_events_is_not_missed(start: Start, other: Session) -> None:
    """Nobody waits while the consumer is busy, and nothing tells it afterwards."""
    process = await start()
    heard = asyncio.Event()
    process.listener.subscribe("progress", heard.set)
    job_id = await other.enqueue_one()
    job = await other.claim_one(await other.register())
    events = process.job(job_id).watch()
    assert await then(events) == state(job_id, "running", 1)
    for number in range(1, 4):
        heard.clear()
        await come_further(other, progress(job, number / 4, number, [number - 1]))
        await passed(heard)
        for _ in range(20):
            await asyncio.sleep(0)
        told = await then(events)
        assert isinstance(told, ProgressChanged)
        assert told.progress.value == number / 4
    assert process.reader._waiting == {}


async def test_a_wait_for_an_event_that_is_cancelled_misses_nothing_and_leaves_nothing(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    await then(events)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(events)
        assert process.reader._waiting == {}
    await finish(other, **SUCCESS)
    assert isinstance((await all_of(events))[-1], JobEnded)


async def test_thousands_of_watches_are_one_listener_and_one_query_for_each_change(
    start: Start, other: Session, boss: Session
) -> None:
    process = await start()
    job_ids = await other.enqueue(1_000)
    watches = [process.job(job_id).watch() for job_id in job_ids for _ in range(2)]
    assert {type(event) for event in await asyncio.gather(*map(then, watches))} == {StateChanged}
    next_ones = [asyncio.create_task(then(events)) for events in watches]
    # A newcomer is read alone; the notifications of progress are asked for with the first watch, and end in a read of all.
    await then(process.job(job_ids[0]).watch())
    before = len(process.store.sizes)
    worker = await other.register()
    jobs = await other.claim(worker, 1_000)
    await come_further(other, *(progress(job) for job in jobs))
    assert {type(event) for event in await asyncio.gather(*next_ones)} == {StateChanged}
    assert {type(event) for event in await asyncio.gather(*map(then, watches))} == {ProgressChanged}
    assert set(process.store.sizes[before:]) == {1_000}
    assert len(process.store.sizes[before:]) <= 3
    listening = await boss.value("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %%'")
    assert listening == 1
    assert process.reader._waiting == {}


async def test_who_waits_for_a_result_is_not_read_for_hints_of_progress(start: Start, other: Session) -> None:
    process = await start()
    watched, awaited = await other.enqueue(2)
    waiting = process.wait(awaited)
    events = process.job(watched).watch()
    await then(events)
    next_one = asyncio.create_task(then(events))
    await process.store.wait_reads(2)
    job = {each.job_id: each for each in await other.claim(await other.register())}[watched]
    before = len(process.store.sizes)
    await come_further(other, progress(job))
    await next_one
    assert set(process.store.sizes[before:]) == {1}
    waiting.cancel()


async def test_hints_of_progress_that_nobody_waits_for_wake_nobody_and_are_not_missed(start: Start, other: Session) -> None:
    process = await start(listening=False)
    watched, awaited = await other.enqueue(2)
    waiting = process.wait(awaited)
    events = process.job(watched).watch()
    await then(events)
    await process.store.wait_reads(2)
    process.reader._hint_progress()
    assert not process.reader._event.is_set()
    job = {each.job_id: each for each in await other.claim(await other.register())}[watched]
    await come_further(other, progress(job), hint=False)
    assert await then(events) == state(watched, "running", 1)
    waiting.cancel()


async def test_watches_pass_over_an_outage(start: Start, other: Session) -> None:
    process = await start(poll=0.05)
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    await then(events)
    failures = 3

    async def fail(*_: object) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise psycopg.OperationalError("the server is away")

    process.store.before = fail
    next_one = asyncio.create_task(then(events))
    await finish(other, **SUCCESS)
    assert isinstance(await next_one, (StateChanged, JobEnded))
    assert failures < 0


async def test_notifications_of_progress_are_asked_for_while_somebody_watches(
    start: Start, other: Session, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioqueue.result.LINGER", 0.05)
    process = await start()
    asked: list[str] = []
    name = channel(schema, "progress")
    left = asyncio.Event()
    listen = process.listener._ask

    async def ask(conn: Any, statement: str) -> bytes | None:
        asked.append(statement)
        if statement == f"UNLISTEN {name}":
            left.set()
        return await listen(conn, statement)

    monkeypatch.setattr(process.listener, "_ask", ask)
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    await then(events)
    await passed(left)
    assert asked.count(f"LISTEN {name}") == 1
    job = await other.claim_one(await other.register())
    next_one = asyncio.create_task(then(events))
    await come_further(other, progress(job))
    assert await next_one == state(job_id, "running", 1)


async def test_an_event_that_comes_at_the_moment_of_a_cancellation_is_told_by_the_next_look(start: Start, other: Session) -> None:
    process = await start(listening=False)
    job_id = await other.enqueue_one()
    events = process.job(job_id).watch()
    await then(events)
    next_one = asyncio.create_task(then(events))
    await asyncio.sleep(0)
    ((waiter,),) = process.reader._waiting.values()
    waiter.future.add_done_callback(lambda _: next_one.cancel())  # the answer is there by then, and not yet taken
    await other.claim_one(await other.register())
    process.reader._hint()
    with pytest.raises(asyncio.CancelledError):
        await next_one
    assert await then(events) == state(job_id, "running", 1)


async def test_watches_of_a_closed_app_end(start: Start, other: Session) -> None:
    process = await start()
    job_id = await other.enqueue_one()
    waits, between = process.job(job_id).watch(), process.job(job_id).watch()
    await then(waits)
    await then(between)
    next_one = asyncio.create_task(then(waits))
    await asyncio.sleep(0)
    process.reader.close()
    with pytest.raises(AppNotOpen):
        await next_one
    with pytest.raises(AppNotOpen):  # nobody reads any more
        await then(between)
    assert process.reader._waiting == {}
