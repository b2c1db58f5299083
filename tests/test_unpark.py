"""Unparking by a worker: what has ended is followed up, what the database does not answer is tried again, floors are learned."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.events import DatabaseLost, DatabaseRecovered, Observers
from aioqueue.floor import Floors
from aioqueue.settings import PoolSettings
from aioqueue.store import LOWEST_ID, Store
from aioqueue.unpark import AHEAD, Unparker
from tests.kit import Seen
from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio
PATIENCE = 30


class Bench:
    """An unparker and a session with a worker, of a tenant that may run two jobs."""

    def __init__(self, session: Session, unparker: Unparker, floors: Floors) -> None:
        self.session = session
        self.unparker = unparker
        self.floors = floors
        self.ready = 0
        self.worker = 0
        self.key = 0

    async def claim(self) -> list[Claimed]:
        return await self.session.claim(self.worker)

    async def end(self, *jobs: Claimed) -> None:
        await self.session.record(self.worker, *(entry(job) for job in jobs))
        for job in jobs:
            self.unparker.ended(job)

    async def idle(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.unparker.wait_idle()


@pytest.fixture
async def one(worker_dsn: str, schema: str) -> AsyncIterator[Session]:
    async with await AsyncConnection.connect(worker_dsn, autocommit=True) as conn:
        yield Session(conn, Store(schema))


@pytest.fixture
async def bench(worker_dsn: str, one: Session, seen: Seen) -> AsyncIterator[Bench]:
    database = Database(worker_dsn, PoolSettings(size=3))
    await database.open()
    floors = Floors([], LOWEST_ID)
    made: Bench
    unparker = Unparker(database, one.store, Observers([seen]), floors, ready=lambda: setattr(made, "ready", made.ready + 1))
    made = Bench(one, unparker, floors)
    made.key = await one.limit("T", 2)
    made.worker = await one.register()
    await one.enqueue(10, tenant="T")
    task = asyncio.create_task(unparker.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        await database.close()


async def test_as_many_as_have_ended_in_one_statement(bench: Bench) -> None:
    jobs = await bench.claim()
    await bench.end(*jobs)
    await bench.idle()
    assert bench.ready == 1, "one hint for both"
    assert len(await bench.claim()) == 2
    assert len(await bench.session.parked()) == 6


async def test_a_job_without_keys_is_nothing(bench: Bench) -> None:
    job = (await bench.claim())[0]
    job.keys = ()
    bench.unparker.ended(job)
    await bench.idle()
    assert bench.ready == 0


async def test_room_that_was_passed_on_tries_twice_as_many_up_to_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    unpark = bench.session.store.unpark

    async def ask(conn: AsyncConnection[Any], wanted: dict[int, int], **floors: str) -> Any:
        asked.append(dict(wanted))
        return await unpark(conn, wanted, **floors)

    monkeypatch.setattr(bench.session.store, "unpark", ask)
    for passed in ({1: 3}, {1: 1_000}):
        bench.unparker.passed(passed)
        await bench.idle()
    assert asked == [{1: 6}, {1: AHEAD}]


async def test_room_that_is_passed_on_while_a_statement_runs_is_not_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    unpark = bench.session.store.unpark
    idle: list[bool] = []

    async def ask(conn: AsyncConnection[Any], wanted: dict[int, int], **floors: str) -> Any:
        asked.append(dict(wanted))
        if len(asked) == 1:
            bench.unparker.passed({bench.key: 1})
        idle.append(bench.unparker._idle.is_set())
        return await unpark(conn, wanted, **floors)

    monkeypatch.setattr(bench.session.store, "unpark", ask)
    bench.unparker.passed({bench.key: 1})
    await bench.idle()
    assert asked == [{bench.key: 2}, {bench.key: 2}] and idle == [False, False]


async def test_what_is_not_answered_is_tried_again_and_nothing_is_forgotten(
    bench: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [psycopg.OperationalError("gone"), psycopg.errors.LockNotAvailable("busy")]
    unpark = bench.session.store.unpark
    jobs = await bench.claim()
    asked = []

    async def refuse(conn: AsyncConnection[Any], wanted: dict[int, int], **floors: str) -> Any:
        asked.append(dict(wanted))
        if refusals:
            if len(refusals) == 2:
                bench.unparker.ended(jobs[1])
            raise refusals.pop()
        return await unpark(conn, wanted, **floors)

    monkeypatch.setattr(bench.session.store, "unpark", refuse)
    await bench.session.record(bench.worker, *(entry(job) for job in jobs))
    bench.unparker.ended(jobs[0])
    await bench.idle()
    assert asked == [{bench.key: 1}, {bench.key: 2}, {bench.key: 2}]
    assert len(await bench.claim()) == 2
    assert [type(event) for event in seen.events] == [DatabaseLost, DatabaseRecovered]


async def test_floors_are_learned_from_answers(bench: Bench) -> None:
    assert bench.floors.parked.text(0) == "{}"
    await bench.end(*await bench.claim())
    await bench.idle()
    (first,) = await bench.session.rows("SELECT min(pos) FROM aioqueue.parked")
    assert bench.floors.parked.text(0) == f'{{"{bench.key}": {first[0]}}}'
