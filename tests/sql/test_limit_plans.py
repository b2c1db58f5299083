"""The plans of limited claims and of unparking on tables that nothing ever analysed.

And their price: flat with jobs at the head that may not run, and with jobs done under a held horizon.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from aioqueue.floor import KeyFloors
from aioqueue.limit_store import HIGHEST_KEY, LOWEST_KEY
from aioqueue.migrate import migrate
from aioqueue.sql import as_sql
from aioqueue.store import LOWEST_ID
from tests.postgres import Server
from tests.sql.engine import limit_key
from tests.sql.plans import CLAIMED, LANE, WORKER, Watched, fill
from tests.sql.test_plans import Price

CLAIM = (
    "SELECT * FROM aioqueue.claim(%s::bigint, ARRAY[%s::bigint], ARRAY[%s::bigint], ARRAY[%s::uuid], ARRAY[0], ARRAY[100],"
    " %s::integer, %s::jsonb)"
)
SMALL = ("worker", "cancel", "task", "queue", "tenant")
LIMITS = """
INSERT INTO aioqueue.limits (key, kind, name, max_running) SELECT aioqueue.limit_key('tenant', 'T' || n), 'tenant', 'T' || n, 1000
  FROM generate_series(0, 999) n"""
HELD = f"""{LIMITS};
INSERT INTO aioqueue.held (key, pos, job_id, worker) SELECT aioqueue.limit_key('tenant', 'T' || n % 500), n, gen_random_uuid(), 1
  FROM generate_series(1, 20000) n;
INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)
SELECT k, n, gen_random_uuid(), k, 1, 'T' || n % 500, 0, 0
  FROM generate_series(1, 100000) n, LATERAL (SELECT aioqueue.limit_key('tenant', 'T' || n % 500)) x (k);
SELECT setval('aioqueue.pos', 100000)
"""


@pytest.fixture(scope="module")
def watched(server: Server, schema: str) -> Iterator[Watched]:
    database = server.create()
    asyncio.run(migrate(database.dsn("owner"), schema=schema))
    fill(database.dsn("superuser"), schema)
    session = Watched(database.dsn("superuser"), schema)
    for statement in HELD.split(";"):
        session.run(statement, keep=True)
    yield session
    session.close()
    server.drop(database)


@pytest.mark.parametrize("limit", [1, 100])
def test_claim_limited(watched: Watched, limit: int) -> None:
    plans, rows = watched.run(CLAIM, WORKER, LANE, (CLAIMED + 1) * 100, str(LOWEST_ID), limit, "{}")
    assert len([row for row in rows if row[0] is not None]) == limit
    plans.check("live_pkey", "job_default_pkey", "limits_kind_name_key", "held_pkey", small=SMALL)
    assert plans.rows_touched() <= 40 * limit + 5, "forty run under each key"


def test_unpark(watched: Watched) -> None:
    keys = [limit_key("tenant", f"T{n}") for n in range(100)]
    plans, rows = watched.run("SELECT moved FROM aioqueue.unpark(%s::bigint[], %s::integer[], '{}', '{}')", keys, [1] * 100)
    assert rows == [(100,)]
    plans.check("parked_pkey", "held_pkey", "limits_pkey", small=SMALL)
    assert plans.rows_touched() <= 45


def test_sweep_parked(watched: Watched) -> None:
    plans, rows = watched.run(
        "SELECT moved FROM aioqueue.sweep_parked(1000, NULL, false, %s, %s, '{}', '{}')", LOWEST_KEY, HIGHEST_KEY
    )
    assert rows == [(1000,)]
    plans.check("parked_pkey", "held_pkey", "limits_pkey", small=SMALL)
    assert plans.rows_touched() <= 1_005


def test_park_tenant(watched: Watched) -> None:
    plans, rows = watched.run("SELECT moved FROM aioqueue.park_tenant('T7', 50, NULL, NULL)")
    assert rows == [(50,)]
    plans.check("live_tenant", small=SMALL)
    assert plans.rows_touched() <= 110


def test_jobs_that_a_claim_parks(watched: Watched) -> None:
    pause = "UPDATE aioqueue.limits SET paused = true WHERE name <> 'T499'"
    watched.run(pause, keep=True)
    plans, rows = watched.run(CLAIM, WORKER, LANE, (CLAIMED + 1) * 100, str(LOWEST_ID), 10, "{}")
    watched.run("UPDATE aioqueue.limits SET paused = false", keep=True)
    (lane,) = [row for row in rows if row[0] is None and row[1] is not None]
    assert 1_000 <= lane[3] <= 1_250 and lane[4] == 1
    plans.check("live_pkey", "job_default_pkey", "limits_kind_name_key", small=SMALL)
    assert plans.rows_touched() <= 3 * 250 + 5


class LimitPrice(Price):
    """Claims of one tenant at its limit, with floors of its key."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held, self.parked = KeyFloors(), KeyFloors()

    def take(self, number: int) -> int:
        """Claim, record and unpark; the jobs claimed."""
        start, tie = self.floor.start
        rows = self.execute(CLAIM, self.worker, LANE, start, str(tie), number, self.held.text(0))
        self.held.learn({row[12][0]: row[12][1] for row in rows if row[0] is None and row[1] is None}, 0)
        self.claimed = max([self.claimed, *(row[2] for row in rows if row[1] is not None)])
        jobs = [row for row in rows if row[0] is not None]
        outcomes = [{"j": str(job[0]), "l": job[1], "v": job[2], "a": job[3], "o": "succeeded"} for job in jobs]
        self.execute("SELECT * FROM aioqueue.record(%s::bigint, %s::jsonb)", self.worker, json.dumps(outcomes))
        if jobs:
            key = jobs[0][12][0]
            ((_, (first,)),) = self.execute(
                "SELECT * FROM aioqueue.unpark(%s::bigint[], %s::integer[], %s::jsonb, %s::jsonb)",
                [key], [len(jobs)], self.held.text(0), self.parked.text(0),
            )  # fmt: skip
            self.parked.learn({key: first}, 0)
        return len(jobs)

    def buffers(self, statement: str, *params: object) -> int:
        """Of a call, warmed up, of which nothing stays."""
        found = []
        for _ in range(3):
            with self.conn.transaction(force_rollback=True):
                ((plan,),) = self.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *params)
            found.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
        return int(min(found))

    def of_a_claim(self) -> int:
        start, tie = self.floor.start
        return self.buffers(CLAIM, self.worker, LANE, start, str(tie), 1, self.held.text(0))

    def settle(self) -> None:
        """Ticks until the floor stands."""
        self.now += 5
        for _ in range(5):
            self.tick()


@pytest.fixture
def price(server: Server, schema: str) -> Iterator[LimitPrice]:
    database = server.create()
    asyncio.run(migrate(database.dsn("owner"), schema=schema))
    with psycopg.connect(database.dsn("owner"), autocommit=True) as conn:
        price = LimitPrice(conn, schema, WORKER)
        price.execute("SELECT aioqueue.register_worker(%s, 'h', 1, '0', '{}', 1, 3600, '[]')", WORKER)
        yield price
    server.drop(database)


def enqueue(price: LimitPrice, number: int, tenant: str) -> None:
    price.execute(
        "SELECT count(*) FROM aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object('task', 't', 'tenant', %s::text))"
        " FROM generate_series(1, %s)))",
        tenant, number,
    )  # fmt: skip


@pytest.mark.parametrize("number", [1, 100])
def test_beside_limits_a_claim_that_meets_nobody_who_is_limited_costs_what_it_costs_without(
    price: LimitPrice, number: int
) -> None:
    for tenant in ("U1", "U2", "U3"):
        enqueue(price, 100, tenant)
    claim = (CLAIM, WORKER, LANE, 0, str(LOWEST_ID), number, "{}")
    without = price.buffers(*claim)
    price.conn.execute(as_sql(LIMITS, price.schema))
    assert price.buffers(*claim) <= 1.1 * without + 10
    price.execute("SELECT aioqueue.set_limit('tenant', %s, 1, false)", "U2")
    taken = [row for row in price.execute(*claim) if row[0] is not None]
    assert sum(row[5] == "U2" for row in taken) <= 1


def test_a_tenant_at_its_limit_costs_the_others_nothing(price: LimitPrice) -> None:
    """Its jobs stand at the head, far more than one claim parks; under a held horizon their dead rows stay there."""
    price.execute("SELECT aioqueue.set_limit('tenant', %s, 1, false)", "big")
    enqueue(price, 2, "big")
    price.execute(CLAIM, WORKER, LANE, 0, str(LOWEST_ID), 1, "{}")
    enqueue(price, 100, "small")
    price.settle()
    first = price.of_a_claim()
    with psycopg.connect(price.conn.info.dsn, autocommit=True, password=price.conn.info.password) as holder:
        holder.execute("BEGIN")
        holder.execute("SELECT pg_current_xact_id()")
        enqueue(price, 20_000, "big")
        price.execute("SELECT aioqueue.set_limit('tenant', %s, 1, true)", "small")
        for _ in range(50):
            price.take(100)
            price.tick()
        price.execute("SELECT aioqueue.set_limit('tenant', %s, NULL, false)", "small")
        assert price.execute("SELECT count(*) FROM aioqueue.parked WHERE tenant = %s", "big") == [(20_001,)]
        enqueue(price, 100, "small")
        price.settle()
        last = price.of_a_claim()
        price.floor.reset()
        without = price.of_a_claim()
        holder.execute("COMMIT")
    assert last <= first * 1.2 + 8
    assert without > 4 * last, "the same claim from the start of the lane walks over all that was parked"


def test_counting_is_flat_under_a_held_horizon(price: LimitPrice) -> None:
    price.execute("SELECT aioqueue.set_limit('tenant', %s, 50, false)", "T")
    enqueue(price, 10_000, "T")
    key = limit_key("tenant", "T")
    unpark = "SELECT * FROM aioqueue.unpark(%s::bigint[], %s::integer[], %s::jsonb, %s::jsonb)"

    def both() -> tuple[int, int]:
        price.settle()
        return price.of_a_claim(), price.buffers(unpark, [key], [1], price.held.text(0), price.parked.text(0))

    def drain(number: int) -> None:
        while number > 0:
            number -= price.take(100)
            price.tick()

    with psycopg.connect(price.conn.info.dsn, autocommit=True, password=price.conn.info.password) as holder:
        holder.execute("BEGIN")
        holder.execute("SELECT pg_current_xact_id()")
        drain(500)
        first = both()
        drain(8_500)
        last = both()
        price.held.reset()
        price.parked.reset()
        without = both()
        holder.execute("COMMIT")
    assert last[0] <= first[0] * 1.2 + 8 and last[1] <= first[1] * 1.2 + 8
    assert without[0] > 2 * last[0] and without[1] > 2 * last[1], "from the start of the key all that has ended is walked over"
