"""Store: binds the schema, passes values as they are, and turns rows into nouns. What the SQL does is tested in tests/sql/."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from aioqueue.errors import ConfigurationError
from aioqueue.floor import Snapshot
from aioqueue.job import Position, lane, new_job_id, new_job_ids
from aioqueue.maintenance_store import UNIX_EPOCH, LaneQuestion
from aioqueue.new_jobs import NewJobs
from aioqueue.pool_connection import PoolConnection
from aioqueue.sql import as_sql, functions, quote_schema
from aioqueue.store import LOWEST_ID, WORKER_DEAD, LaneScan, Store
from aioqueue.transaction_store import NOT_OWNED, VIOLATION
from benchmarks.mixed_jobs import NewJob, enqueue_many, split
from tests.postgres import Database

pytestmark = pytest.mark.anyio
LANE = lane("default", 0)
Conn = AsyncConnection[Any]
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=50)


@pytest.fixture
def store(schema: str) -> Store:
    return Store(schema)


async def register(store: Store, conn: Conn) -> int:
    worker = uuid4().int >> 66
    await store.register_worker(
        conn, worker=worker, host="h", pid=1, version="0", queues=["a", "ü'\"{}\\"], concurrency=3, lease=60,
        tasks=[{"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}],
    )  # fmt: skip
    return worker


OPTIONS = ("task", "tenant", "queue", "priority", "delay", "run_at", "max_attempts", "key", "total")


def as_read(jobs: NewJobs) -> dict[str, Any]:
    """The only job of these as the server reads it."""
    ids, payload, *given = jobs.parameters
    assert ids is not None and payload is not None
    options = {name: value for name, value in zip(OPTIONS, given, strict=True) if value is not None}
    return {**options, "id": str(UUID(ids[1:-1])), "payload": json.loads(payload)}


@given(task=names, queue=names, tenant=st.none() | names, delay=st.none() | st.floats(0, 1e8), number=st.integers())
def test_a_job_as_json_reads_back_as_it_was(task: str, queue: str, tenant: str | None, delay: float | None, number: int) -> None:
    payload = json.dumps({"n": number, "t": task}, ensure_ascii=False)
    job_id = new_job_id()
    jobs = NewJobs(task=task, ids=[job_id], payloads=[payload], queue=queue, tenant=tenant, delay=delay, priority=0)
    facts = {"id": str(job_id), "task": task, "queue": queue, "priority": 0, "tenant": tenant, "delay": delay}
    expected = {name: value for name, value in facts.items() if value is not None}
    texts = {name: f"{value:f}" if name == "delay" else str(value) for name, value in expected.items()}
    assert as_read(jobs) == {**texts, "payload": json.loads(payload)}
    assert json.loads(split(jobs)[0].json) == {**expected, "payload": json.loads(payload)}


def test_the_jobs_of_one_enqueue_are_options_ids_and_lines() -> None:
    ids = new_job_ids(3)
    jobs = NewJobs(task="t", ids=ids, payloads=[f"[{n}]" for n in range(3)], delay=1.0, tenant="ü")
    hexes, payloads, *options = jobs.parameters
    assert hexes is not None and payloads is not None
    assert options == ["t", "ü", None, None, "1.000000", None, None, None, None]
    assert hexes[1:-1].split(",") == [job_id.hex for job_id in ids]
    assert payloads.split("\n") == ["[0]", "[1]", "[2]"]
    each = [NewJob(id=job_id, task="t", payload=f"[{n}]", delay=1.0, tenant="ü") for n, job_id in enumerate(ids)]
    assert split(jobs) == each


async def test_a_transaction_with_many_small_batches_takes_no_subtransactions(store: Store, owner: Conn) -> None:
    async with owner.transaction():
        for _ in range(3):
            await store.enqueue_alike(owner, NewJobs(task="t", ids=new_job_ids(99), payloads=["[]"] * 99))
        cursor = await owner.execute(as_sql("SELECT count(DISTINCT xmin::text) FROM aioqueue.job", store.schema))
        assert await cursor.fetchone() == (1,)


def test_options_that_are_none_are_left_to_the_database() -> None:
    jobs = NewJobs(ids=[LOWEST_ID], task="t", payloads=["[]"])
    assert as_read(jobs) == {"id": str(LOWEST_ID), "task": "t", "payload": []}
    aware = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=5, minutes=45)))
    jobs = NewJobs(ids=[LOWEST_ID], task="t", payloads=["[]"], run_at=aware)
    assert as_read(jobs)["run_at"] == "2030-01-02T03:04:05.000678+05:45"


def test_a_schema_that_cannot_be_quoted_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Store("a'b")


def test_every_statement_names_the_schema_quoted(schema: str) -> None:
    store = Store('My "Jobs')
    for name, statement in store.sql.items():
        text = statement.as_string(None)
        assert "aioqueue." not in text, name
        if "pg_visible_in_snapshot" not in text:
            assert quote_schema('My "Jobs') + "." in text, name


def test_the_sqlstates_are_those_that_the_functions_raise() -> None:
    raised = {word.partition("'")[0] for text in functions().values() for word in text.split("ERRCODE = '")[1:]}
    assert {WORKER_DEAD, NOT_OWNED, VIOLATION} <= raised


async def test_run_at_with_microseconds_and_an_offset_is_kept(store: Store, owner: Conn) -> None:
    at = datetime(2999, 1, 2, 3, 4, 5, 123456, tzinfo=timezone(-timedelta(hours=3, minutes=30)))
    job = NewJob(id=new_job_id(), task="t", payload="{}", run_at=at)
    await enqueue_many(store, owner, [job])
    status = await store.job_status(owner, job.id)
    assert status is not None
    assert status.run_at == at


async def test_a_claimed_job_carries_its_fence(store: Store, owner: Conn) -> None:
    job = NewJob(id=new_job_id(), task="t", payload='{"a":  [1, "ü🐘"]}', queue="default", priority=0, tenant="T", max_attempts=2)
    await enqueue_many(store, owner, [job])
    worker = await register(store, owner)
    (claimed,) = (await store.claim(owner, worker=worker, lanes=[LaneScan(LANE, (0, LOWEST_ID), 1)], limit=1)).jobs
    assert claimed.fence == (worker, LANE, claimed.vt, job.id, 1)
    assert json.loads(claimed.payload) == json.loads(job.payload)
    assert claimed.created_at.tzinfo is not None


async def test_a_claim_on_a_connection_of_the_pool_reads_the_same(store: Store, owner: Conn, database: Database) -> None:
    """That goes without a cursor, in binary; its tick and its record, too."""
    job = NewJob(id=new_job_id(), task="t", payload='{"a":  [1, "ü🐘"]}', queue="default", priority=0, tenant="T", max_attempts=2)
    await enqueue_many(store, owner, [job])
    worker = await register(store, owner)
    scan = LaneScan(LANE, (0, LOWEST_ID), 1)
    async with await PoolConnection.connect(database.dsn("worker"), autocommit=True) as pooled:
        async with owner.transaction(force_rollback=True):
            (one,) = (await store.claim(owner, worker=worker, lanes=[scan], limit=1)).jobs
        (other,) = (await store.claim(pooled, worker=worker, lanes=[scan], limit=1)).jobs
        assert isinstance(one.created, datetime) and isinstance(other.created, int)
        assert other.created_at == one.created_at
        assert replace(other, created=one.created, claimed_at=one.claimed_at) == one
        asked: dict[str, Any] = {"worker": worker, "questions": [LaneQuestion(LANE, other.vt, (0, LOWEST_ID), 2**62)]}
        ticks = [await store.tick(conn, **asked) for conn in (owner, pooled, owner)]
        assert ticks[1].vts == ticks[2].vts == [other.vt], "the first one published it"
        assert ticks[0].clock < ticks[1].clock < ticks[2].clock
        assert len({(str(tick.firsts), str(tick.next_due), tick.losses, str(tick.cancelled), tick.server) for tick in ticks}) == 1
        with pytest.raises(psycopg.Error) as refused:
            await store.claim(pooled, worker=worker + 1, lanes=[scan], limit=1)
        assert refused.value.sqlstate == WORKER_DEAD
        assert await store.record(pooled, worker=worker, succeeded=[other], results=["1"]) is None
        assert await store.record(pooled, worker=worker, succeeded=[other], results=["1"]) == {}, "nothing is there any more"


async def test_extreme_numbers_pass(store: Store, owner: Conn) -> None:
    worker = await register(store, owner)
    low, high = -(2**63), 2**63 - 1
    scans = [LaneScan(low, (high, UUID(int=2**128 - 1)), 1), LaneScan(high, (low, LOWEST_ID), 1)]
    assert (await store.claim(owner, worker=worker, lanes=scans, limit=100)).jobs == []
    questions = [LaneQuestion(low, 0, (0, LOWEST_ID), high), LaneQuestion(high, 0, (0, LOWEST_ID), None)]
    tick = await store.tick(owner, worker=worker, questions=questions, due_to=UNIX_EPOCH)
    assert (tick.vts, tick.firsts) == ([0, 0], [None, None])


async def test_a_tick_as_nouns(store: Store, owner: Conn) -> None:
    ids = [new_job_id() for _ in range(2)]
    await enqueue_many(store, owner, [NewJob(id=i, task="t", payload="{}", queue="default", priority=0) for i in ids])
    worker = await register(store, owner)
    tick = await store.tick(owner, worker=worker, questions=[LaneQuestion(LANE, 0, (0, LOWEST_ID), 10_000)])
    assert tick.firsts == [Position(1_000, ids[0])]
    assert isinstance(tick.snapshot, Snapshot)
    assert (tick.losses, tick.cancelled, tick.first_due, tick.next_due) == (False, [], None, None)
    assert tick.clock.tzinfo is not None
    assert tick.server[1].astimezone(UTC) <= tick.clock.astimezone(UTC)


async def test_the_callers_row_factory_and_settings_do_not_matter(store: Store, owner_dsn: str) -> None:
    """A connection given with on= is the user's, made as the user likes."""
    conn = await AsyncConnection[dict[str, Any]].connect(owner_dsn, row_factory=dict_row, prepare_threshold=0)
    async with conn:
        await conn.execute("SET search_path = pg_temp")
        await conn.execute("SET timezone = 'Asia/Kathmandu'")
        worker = await register(store, conn)
        job_id = new_job_id()
        jobs = NewJobs(ids=[job_id], task="t", payloads=["{}"], queue="default", priority=0, tenant="T")
        for _ in range(2):
            assert await store.enqueue_alike(conn, jobs) > 0
        (claimed,) = (await store.claim(conn, worker=worker, lanes=[LaneScan(LANE, (0, LOWEST_ID), 1)], limit=1)).jobs
        assert claimed.tenant == "T"
        assert (await store.tick(conn, worker=worker, questions=[])).vts == []
        status = await store.job_status(conn, job_id)
        assert status is not None and status.worker == worker
        assert [e.job_id for e in await store.read_outcomes(conn, [(job_id, "T")])] == [job_id]
        outcome = {"j": str(job_id), "l": LANE, "v": claimed.vt, "a": 1, "o": "succeeded", "r": 5}
        assert await store.record(conn, worker=worker, outcomes=[json.dumps(outcome)]) == {job_id: "succeeded"}
        assert await store.rescue(conn, worker=worker, limit=1) is None


async def test_tenants_that_look_like_arrays_are_tenants(store: Store, owner: Conn) -> None:
    for tenant in ("{}", "NULL", "a,b", '"', "\\", "T' OR true --"):
        job = NewJob(id=new_job_id(), task="t", payload="{}", tenant=tenant)
        await enqueue_many(store, owner, [job])
        assert len(await store.read_outcomes(owner, [(job.id, tenant), (job.id, "other")])) == 1
        status = await store.job_status(owner, job.id, tenant=tenant)
        assert status is not None and status.tenant == tenant


async def test_errors_of_the_database_come_as_they_are(store: Store, owner: Conn) -> None:
    with pytest.raises(psycopg.DatabaseError) as caught:
        await store.claim(owner, worker=1, lanes=[], limit=1)
    assert caught.value.sqlstate == WORKER_DEAD
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="task: expected a name"):
        await enqueue_many(store, owner, [NewJob(id=new_job_id(), task=" ", payload="{}")])


async def test_settings_are_local_to_the_transaction(store: Store, owner: Conn) -> None:
    async with owner.transaction():
        await store.set_local(owner, {"app.tenant": "T'", "lock_timeout": "5s"})
        cursor = await owner.execute("SELECT current_setting('app.tenant'), current_setting('lock_timeout')")
        assert await cursor.fetchone() == ("T'", "5s")
    cursor = await owner.execute("SELECT coalesce(current_setting('app.tenant', true), ''), current_setting('lock_timeout')")
    assert await cursor.fetchone() == ("", "0")
