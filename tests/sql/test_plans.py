"""The plans inside the functions on 100,000 rows that nothing ever analysed: the named index, no sort, no scan of all.

The same where the statistics lie: made while the tables were full, or empty, or of what is left in bloated ones.

And the price of a claim: the same after 20,000 taken jobs as after 1,000 while another session holds the xmin horizon.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from aioqueue import AioQueue
from aioqueue.events import WorkerStarted
from aioqueue.floor import LaneFloor, Snapshot
from aioqueue.maintenance.prune import Pruner
from aioqueue.migrate import grant, migrate
from aioqueue.sql import as_sql
from aioqueue.store import LOWEST_ID
from tests.kit import Seen, wait_until_true
from tests.postgres import Database, Server
from tests.sql.plans import BY_JOB, CLAIMED, LANE, ROWS, STATES, WORKER, Watched, change, fill, job_id

CLAIM = (
    "SELECT * FROM aioqueue.claim(%s::bigint, ARRAY[%s::bigint], ARRAY[%s::bigint], ARRAY[%s::uuid],"
    " ARRAY[0], ARRAY[100], %s::integer)"
)
TICK = (
    "SELECT * FROM aioqueue.tick(%s::bigint, ARRAY[%s::bigint], ARRAY[0::bigint], ARRAY[%s::bigint], ARRAY[%s::uuid],"
    " ARRAY[%s::bigint], %s::timestamptz, %s::timestamptz)"
)


@pytest.fixture(scope="module")
def full(server: Server, schema: str) -> Database:
    """The data set, to be copied."""
    database = server.create()
    asyncio.run(migrate(database.dsn("owner"), schema=schema))
    fill(database.dsn("superuser"), schema)
    return database


@pytest.fixture(
    scope="module",
    params=[pytest.param(state, marks=pytest.mark.slow) if statements else state for state, statements in STATES.items()],
)
def watched(server: Server, schema: str, full: Database, request: pytest.FixtureRequest) -> Iterator[Watched]:
    database = server.create(full)
    change(database.dsn("superuser"), schema, STATES[request.param])
    session = Watched(database.dsn("superuser"), schema)
    yield session
    session.close()
    server.drop(database)


def test_the_data_are_as_they_should_be(watched: Watched, request: pytest.FixtureRequest) -> None:
    state = request.node.callspec.params["watched"]
    _, ((rows, claimed),) = watched.run("SELECT count(*), count(worker) FROM aioqueue.live")
    _, ((pages,),) = watched.run("SELECT pg_relation_size('aioqueue.live') / 8192")
    _, ((known,),) = watched.run("SELECT reltuples FROM pg_class WHERE oid = 'aioqueue.live'::regclass")
    if state in ("never analysed", "filled after ANALYZE"):
        assert (rows, claimed) == (ROWS, CLAIMED)
    else:
        assert 1_200 < rows < 2_000
    assert (pages > 1_000) == (state != "truncated and begun anew")
    assert known == {
        "never analysed": -1,
        "filled after ANALYZE": 0,
        "emptied, then ANALYZE": rows,
        "truncated and begun anew": -1,
    }.get(state, ROWS)
    plans, _ = watched.run("SELECT aioqueue.job_status(%s::uuid)", job_id(1, 5))
    assert len(plans.found) > 1, "nested plans are caught"


@pytest.mark.parametrize("limit", [1, 100])
def test_claim(watched: Watched, limit: int) -> None:
    plans, rows = watched.run(CLAIM, WORKER, LANE, (CLAIMED + 1) * 100, str(LOWEST_ID), limit)
    assert len(rows) == limit
    plans.check("live_pkey", "job_default_pkey", "worker_pkey")
    assert plans.rows_touched() <= limit + 5


@pytest.mark.parametrize("number", [1, 100])
def test_record(watched: Watched, number: int) -> None:
    kinds: list[dict[str, Any]] = [
        {"o": "succeeded", "r": 1},
        {"o": "error", "d": 0},
        {"o": "error", "d": 5},
        {"o": "error", "d": None},
    ]
    for kind in [*kinds, None]:
        batch = [{"j": job_id(1, n), "l": LANE, "v": n * 100, "a": 1, **(kind or kinds[n % 4])} for n in range(101, 101 + number)]
        plans, rows = watched.run("SELECT * FROM aioqueue.record(%s::bigint, %s::jsonb)", WORKER, json.dumps(batch))
        assert len(rows) == number
        plans.check(BY_JOB)
        assert plans.rows_touched() <= 2 * number + 5


@pytest.mark.parametrize("name", ["finish", "confirm"])
def test_finish_and_confirm(watched: Watched, name: str) -> None:
    extra = ", '1'::jsonb" if name == "finish" else ""
    plans, _ = watched.run(
        "SELECT set_config('aioqueue_job.marker', 'm', true), set_config('app.tenant', 'T1', true),"
        f" aioqueue.{name}(%s::bigint, %s::bigint, %s::bigint, %s::uuid, 1, %s::jsonb{extra})",
        WORKER, LANE, 100 * 77, job_id(1, 77), '{"aioqueue_job.marker": "m", "app.tenant": "T1"}',
    )  # fmt: skip
    plans.check(BY_JOB)
    assert plans.rows_touched() <= 3


def test_tick(watched: Watched) -> None:
    start = (CLAIMED - 50) * 100
    plans, rows = watched.run(
        TICK, WORKER, LANE, start, str(LOWEST_ID), ROWS * 100, "2020-01-01Z", "2021-01-01Z"
    )  # fmt: skip
    assert rows[0][3] == [(CLAIMED + 1) * 100]
    plans.check("live_pkey", "scheduled_pkey")
    assert plans.rows_touched() <= 60


def test_promote(watched: Watched) -> None:
    plans, rows = watched.run("SELECT aioqueue.promote('2020-01-01Z', 50)")
    assert rows == [(50,)]
    plans.check("scheduled_pkey", "live_tenant")
    assert plans.rows_touched() <= 60


def test_next_tag(watched: Watched) -> None:
    plans, rows = watched.run("SELECT aioqueue.next_tag(%s::bigint, 'T7')", LANE)
    assert rows == [((ROWS - 500 + 7) * 100,)]
    plans.check("live_tenant")
    assert plans.rows_touched() <= 1


def test_enqueue_many(watched: Watched) -> None:
    jobs = json.dumps([{"task": "t", "tenant": f"T{n}"} for n in range(100)])
    plans, rows = watched.run("SELECT aioqueue.enqueue_many(%s::jsonb)", jobs)
    assert len(rows) == 100
    plans.check("live_tenant")
    assert plans.rows_touched() <= 110


@pytest.mark.parametrize("number", [1, 500])
def test_enqueue_alike(watched: Watched, number: int) -> None:
    ids = [job_id(4, n) for n in range(number)]
    plans, _ = watched.run("SELECT aioqueue.enqueue_alike(%s::uuid[], %s, 't', 'T7')", ids, "\n".join(["1"] * number))
    plans.check("live_tenant", "task_pkey", "tenant_pkey")
    assert plans.rows_touched() <= 1


@pytest.mark.parametrize(
    ("part", "n", "index"),
    [(1, 50_000, "live_job"), (1, 77, "live_job"), (2, 50_000, "scheduled_job"), (3, 50_000, "outcome_default_pkey")],
)
@pytest.mark.parametrize("name", ["cancel_job", "job_status"])
def test_cancel_job_and_job_status(watched: Watched, name: str, part: int, n: int, index: str) -> None:
    plans, rows = watched.run(f"SELECT aioqueue.{name}(%s::uuid)", job_id(part, n))
    assert rows[0][0] is not None
    plans.check("job_default_pkey", index)
    assert plans.rows_touched() <= 2


@pytest.mark.parametrize("number", [1, 500])
def test_read_outcomes(watched: Watched, number: int) -> None:
    ids = [job_id(1 + n % 3, n) for n in range(1, 1 + number)]
    plans, rows = watched.run("SELECT aioqueue.read_outcomes(%s::uuid[], %s::text[])", ids, [None] * number)
    assert len(rows) == number
    plans.check("job_default_pkey", "outcome_default_pkey")
    assert plans.rows_touched() <= number


@pytest.mark.parametrize("number", [1, 100])
def test_report_and_follow(watched: Watched, number: int) -> None:
    running, waiting, ended = ([job_id(part, n) for n in range(1, number + 1)] for part in (1, 2, 3))
    fences = [{"w": WORKER, "j": each, "l": LANE, "v": n * 100, "a": 1} for n, each in enumerate(running, 1)]
    reports = [{**fence, "n": 2, "p": 0.5, "d": [1]} for fence in fences]
    call = "SELECT aioqueue.report(%s::jsonb)"
    first = [{**each, "n": 1, "d": []} for each in reports]
    watched.run(call, json.dumps(first), keep=True)
    plans, _ = watched.run(call, json.dumps(reports))
    plans.check(BY_JOB, "progress_pkey")
    assert plans.rows_touched() <= number + 1
    plans, rows = watched.run("SELECT * FROM aioqueue.follow(%s::uuid[], NULL)", [*running, *waiting, *ended])
    plans.check("live_job", "scheduled_job", "progress_pkey")
    assert [row[7] for row in rows] == ["running"] * number + ["scheduled"] * number + [row[1] for row in rows[2 * number :]]
    assert [row[8] for row in rows] == [0.5] * number + [None] * 2 * number
    plans, _ = watched.run("SELECT aioqueue.sweep_progress(10)")
    plans.check("live_job", small=("progress",))
    watched.run(call, json.dumps([{**each, "p": None, "d": [1]} for each in reports]), keep=True)


def test_read_back(watched: Watched) -> None:
    plans, rows = watched.run(
        "SELECT aioqueue.read_back(%s::bigint, %s::bigint, %s::bigint, %s::uuid, 1)", WORKER, LANE, 7_700, job_id(1, 77)
    )
    assert rows == [("ours",)]
    plans.check(BY_JOB)
    assert plans.rows_touched() <= 1


def test_register_worker(watched: Watched) -> None:
    task = json.dumps([{"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}])
    plans, _ = watched.run("SELECT aioqueue.register_worker(1, 'h', 1, '0', '{}', 1, 30, %s::jsonb)", task)
    assert plans.rows_touched() <= 3
    assert "scheduled_unknown_task" in plans.indexes()


IN_FUTURE = """
TRUNCATE aioqueue.scheduled;
INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)
SELECT now() + n * interval '1 hour', pg_temp.id(2, n), :lane, 'T' || n % 500 FROM generate_series(1, :rows) n
"""


def test_a_worker_starts_beside_any_number_of_rows(
    server: Server, schema: str, full: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checks, its row, its first job: what the server counts as read of ended and future jobs is next to nothing.

    Not the partitions' loop, which has a bound of its own (tests/sql/test_make_ranges.py), nor live, which has what is ready or
    runs, and is looked through for orphans beside the start.
    """
    database = server.create(full)
    change(database.dsn("superuser"), schema, IN_FUTURE)
    asyncio.run(grant(database.dsn("owner"), schema=schema, role="aioqueue_worker"))
    monkeypatch.setattr(Pruner, "run", lambda self: asyncio.Event().wait())
    seen = Seen()
    app = AioQueue(database.dsn("worker"), schema=schema, observers=[seen])

    @app.task(name="t", queue="quiet")
    async def t() -> None: ...

    async def start() -> None:
        async with app, app.worker(queues=["quiet"]):
            await seen.wait(WorkerStarted)
            await (await app.tasks["t"].enqueue()).result(timeout=60)

    asyncio.run(start())
    with psycopg.connect(database.dsn("superuser"), autocommit=True) as conn:
        # What a session has read is counted before it has ended.
        others = "SELECT FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
        wait_until_true(lambda: conn.execute(others, [database.name]).rowcount == 0)
        read = conn.execute(
            "SELECT relname, seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE schemaname = %s AND relname = ANY (%s)",
            [schema, ["scheduled", "job_default", "outcome_default", "attempt_default"]],
        ).fetchall()
    server.drop(database)
    assert len(read) == 4
    assert {name: rows for name, rows in read if rows > 50} == {}


class Price:
    """Claims with a floor and ticks, as a worker makes them; buffers counted by the server."""

    def __init__(self, conn: psycopg.Connection[Any], schema: str, worker: int) -> None:
        self.conn, self.schema, self.worker = conn, schema, worker
        self.floor = LaneFloor(LOWEST_ID)
        self.claimed = 0
        self.taken = 0
        self.now = 0.0

    def execute(self, statement: str, *params: object) -> list[tuple[Any, ...]]:
        return self.conn.execute(as_sql(statement, self.schema), params).fetchall()

    def tick(self) -> None:
        asked = self.floor.question
        statement = TICK.replace("ARRAY[0::bigint]", "ARRAY[%s::bigint]")
        start, tie = self.floor.start
        ((vts, _, snapshot, firsts, ids, *_),) = self.execute(
            statement, self.worker, LANE, self.claimed, start, str(tie), asked, "1970-01-01Z", None
        )
        if asked is not None:
            self.floor.answer(self.floor.start, asked, None if firsts[0] is None else (firsts[0], ids[0]))
        self.now += 0.05
        self.floor.observe(vts[0], Snapshot.parse(snapshot), self.now, self.taken)

    def claim(self, number: int) -> None:
        start, tie = self.floor.start
        rows = self.execute(CLAIM, self.worker, LANE, start, str(tie), number)
        assert len(rows) == number
        self.claimed = max([self.claimed, *(row[2] for row in rows)])
        self.taken += number

    def finish_all(self) -> None:
        batch = self.execute("SELECT job_id::text, lane, vt, attempt FROM aioqueue.live WHERE worker = %s", self.worker)
        outcomes = [{"j": j, "l": number, "v": vt, "a": a, "o": "succeeded"} for j, number, vt, a in batch]
        self.execute("SELECT * FROM aioqueue.record(%s::bigint, %s::jsonb)", self.worker, json.dumps(outcomes))

    def of_a_claim(self) -> int:
        """Buffers of claiming one job, warmed up; the claim itself stays."""
        start, tie = self.floor.start
        found = []
        for _ in range(3):
            ((plan,),) = self.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {CLAIM}", self.worker, LANE, start, str(tie), 1)
            found.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
        return int(min(found))


@pytest.mark.parametrize("tenants", [50, 30_000])
def test_a_claim_costs_the_same_after_twenty_times_as_many_taken_jobs_under_a_held_horizon(
    server: Server, schema: str, tenants: int
) -> None:
    """Also of tenants with one job each, all of which stand at one position: virtual time does not move meanwhile."""
    database = server.create()
    asyncio.run(migrate(database.dsn("owner"), schema=schema))
    with (
        psycopg.connect(database.dsn("owner"), autocommit=True) as conn,
        psycopg.connect(database.dsn("owner"), autocommit=True) as holder,
    ):
        price = Price(conn, schema, WORKER)
        price.execute(
            "SELECT aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object('task', 't', 'tenant', 'T' || n %% %s))"
            " FROM generate_series(1, %s) n))",
            tenants,
            30_000,
        )
        price.execute("SELECT aioqueue.register_worker(%s, 'h', 1, '0', '{}', 1, 3600, '[]')", WORKER)
        holder.execute("BEGIN")
        holder.execute("SELECT pg_current_xact_id()")

        def take(number: int) -> None:
            for _ in range(number // 500):
                price.claim(500)
                price.finish_all()
                price.tick()
            price.now += 5
            for _ in range(5):
                price.tick()

        take(1_000)
        first = price.of_a_claim()
        take(19_000)
        last = price.of_a_claim()
        price.floor.reset()
        without = price.of_a_claim()
        holder.execute("COMMIT")
    server.drop(database)
    assert last <= first * 1.2 + 8
    assert without > 4 * last, "the same claim from the start of the lane walks over all that was taken"
