"""Fairness, weights and limits: who is started when, and what it costs.

    python -m benchmarks.fairness [--tenants 1000] [--big 100000]

order    many tenants with 3 jobs each behind one with very many, four claim loops: when each small tenant's jobs were started
         (the worst), and the big one's share of the first claims; in FIFO order, fair, with weight 3 for the big one, with a
         limit of running jobs, and with 40 connections of the big one that enqueued at once in open transactions (with and
         without the cure)
shares   two tenants with a backlog each, weights 3 and 1
price    a claim of 10 beside that of a plain FIFO table, median of 200, in turns
limit    a claim of one job while a tenant at its limit has its jobs at the head: before, once they are parked, and under a held
         XID with and without the floors; and counting what runs under the limit after many jobs, with and without its floor

A position counts claims of all loops; four loops that claim 10 each make one uncertain by 40. Exits with 1 where a promise is
broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from aioqueue.claimed import Claimed
from aioqueue.floor import KeyFloors, LaneFloor
from aioqueue.job import lane
from aioqueue.maintenance_store import LaneQuestion
from aioqueue.migrate import migrate
from aioqueue.sql import as_sql, functions
from aioqueue.store import LOWEST_ID, Claims, LaneScan, Store
from benchmarks import kit

LANE = lane("default", 0)
SCHEMA = "aioqueue"
LOOPS, BATCH = 4, 10
SLACK = LOOPS * BATCH
NO_CURE = ("k := k + 1;", "EXIT;")
FIFO = """
CREATE TABLE fifo (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text DEFAULT 'ready', payload jsonb DEFAULT '{}');
CREATE INDEX fifo_ready ON fifo (id) WHERE status = 'ready'
"""
FIFO_CLAIM = (
    "UPDATE fifo SET status = 'running' WHERE id IN (SELECT id FROM fifo WHERE status = 'ready' ORDER BY id"
    " LIMIT 10 FOR UPDATE SKIP LOCKED) RETURNING id, payload"
)


@dataclass
class Loop:
    """One worker's claims, with its floors, on a connection of its own."""

    conn: AsyncConnection[Any]
    store: Store
    worker: int
    floor: LaneFloor[UUID] = field(default_factory=lambda: LaneFloor(LOWEST_ID))
    held: KeyFloors = field(default_factory=KeyFloors)
    parked: KeyFloors = field(default_factory=KeyFloors)
    claimed: int = 0
    taken: int = 0
    ticked: float = 0.0

    async def rows(self, statement: str, *params: object) -> list[tuple[Any, ...]]:
        cursor = await self.conn.execute(as_sql(statement, SCHEMA), params or None)
        return await cursor.fetchall() if cursor.description else []

    async def tick(self) -> None:
        start, asked = self.floor.start, self.floor.question
        tick = await self.store.tick(self.conn, worker=self.worker, questions=[LaneQuestion(LANE, self.claimed, start, asked)])
        if asked is not None:
            self.floor.answer(start, asked, tick.firsts[0])
        self.ticked = time.monotonic()
        self.floor.observe(tick.vts[0], tick.snapshot, self.ticked, self.taken)

    async def claim(self, limit: int) -> Claims:
        if time.monotonic() - self.ticked > 0.05:
            await self.tick()
        claims = await self.store.claim(
            self.conn,
            worker=self.worker,
            lanes=[LaneScan(LANE, self.floor.start, limit)],
            limit=limit,
            key_floors=self.held.text(0),
        )
        self.held.learn(claims.key_floors, 0)
        self.taken += len(claims.jobs)
        self.claimed = max([self.claimed, *(job.vt for job in claims.jobs), *(vt for _, vt in claims.parked.values())])
        return claims

    async def end(self, jobs: list[Claimed]) -> None:
        """Record success, and unpark as a worker does."""
        await self.store.record(self.conn, worker=self.worker, succeeded=jobs, results=["null"] * len(jobs))
        keys = Counter(key for job in jobs for key in job.keys or ())
        if keys:
            _, firsts = await self.store.unpark(self.conn, keys, held=self.held.text(0), parked=self.parked.text(0))
            self.parked.learn(firsts, 0)


@contextlib.asynccontextmanager
async def loops_on(dsn: str, number: int = LOOPS) -> AsyncIterator[list[Loop]]:
    """Claim loops on a database that has the schema."""
    store = Store(SCHEMA)
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for worker in range(1, number + 1):
            conn = await stack.enter_async_context(await AsyncConnection.connect(dsn, autocommit=True))
            await store.register_worker(
                conn, worker=worker, host="h", pid=1, version="0", queues=["default"], concurrency=1, lease=36_000, tasks=[]
            )
            made.append(Loop(conn, store, worker))
        yield made


@contextlib.asynccontextmanager
async def queue(server: kit.Server, loops: int = LOOPS) -> AsyncIterator[list[Loop]]:
    """A database of its own with the schema, and claim loops on it."""
    dsn = server.database()
    await migrate(dsn, schema=SCHEMA)
    async with loops_on(dsn, loops) as made:
        yield made
    server.drop(dsn)


async def enqueue(loop: Loop, tenant: str, number: int) -> None:
    """Many jobs of one tenant, 10,000 a call."""
    for start in range(0, number, 10_000):
        await loop.rows(
            "SELECT count(*) FROM aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object('task', 't', 'tenant', %s::text))"
            " FROM generate_series(1, %s)))",
            tenant,
            min(10_000, number - start),
        )


async def enqueue_small(loop: Loop, tenants: int, each: int) -> None:
    for _ in range(each):
        await loop.rows(
            "SELECT count(*) FROM aioqueue.enqueue_many((SELECT jsonb_agg(jsonb_build_object('task', 't', 'tenant', 's' || n))"
            " FROM generate_series(1, %s) n))",
            tenants,
        )


async def at_once(loop: Loop, connections: int, rounds: int, each: int) -> None:
    """Connections of the big tenant that each enqueue jobs in a transaction, all of them open at the same time."""
    jobs = json.dumps([{"task": "t", "tenant": "big"}] * each)
    call = as_sql(f"SELECT count(*) FROM aioqueue.enqueue_many('{jobs}')", SCHEMA)
    dsn = f"{loop.conn.info.dsn} password={loop.conn.info.password}"
    async with contextlib.AsyncExitStack() as stack:
        conns = [await stack.enter_async_context(await AsyncConnection.connect(dsn, autocommit=True)) for _ in range(connections)]
        for _ in range(rounds):
            for statement in ("BEGIN", call, "COMMIT"):
                await asyncio.gather(*(conn.execute(statement) for conn in conns))


async def drain(loops: list[Loop], small: int) -> list[str]:
    """Claim with all loops until every small tenant's jobs were started; the tenants in the order of the claims."""
    order: list[str] = []
    left = small

    async def work(loop: Loop) -> None:
        nonlocal left
        while left > 0:
            claims = await loop.claim(BATCH)
            order.extend(str(job.tenant) for job in claims.jobs)
            left -= sum(job.tenant != "big" for job in claims.jobs)
            await loop.end(claims.jobs)

    await asyncio.gather(*(work(loop) for loop in loops))
    return order


def worst(order: list[str]) -> list[int]:
    """The worst position of any small tenant's first, second, … job."""
    seen: Counter[str] = Counter()
    found: list[int] = []
    for position, tenant in enumerate(order, 1):
        if tenant != "big":
            seen[tenant] += 1
            if len(found) < seen[tenant]:
                found.append(0)
            found[seen[tenant] - 1] = position
    return found


@dataclass
class Result:
    """What is printed at the end, and what was not kept."""

    order: list[tuple[object, ...]] = field(default_factory=list)
    positions: dict[str, float] = field(default_factory=dict)
    """The worst position of a small tenant's first job, by what was tried."""
    price: list[tuple[object, ...]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def kept(self, condition: bool, promise: str) -> None:
        if not condition:
            self.broken.append(promise)


async def measure_order(server: kit.Server, result: Result, name: str, tenants: int, big: int) -> None:
    """One run of the many beside the big one."""
    each = 10 if "connections" in name else 3
    tenants = min(tenants, 10) if each == 10 else tenants
    async with queue(server) as loops:
        one = loops[0]
        if name == "weight 3 for the big one":
            await one.store.set_tenant(one.conn, "big", weight=3)
        if name == "limit of 5 for the big one":
            await one.store.set_tenant(one.conn, "big", max_running=5)
        if each == 10:
            if "without" in name:
                await one.rows(functions()["next_tag"].replace(*NO_CURE))
            await (at_once(one, 40, 1, 25) if "25 jobs" in name else at_once(one, 40, 25, 1))
        else:
            await enqueue(one, "big", big)
        await enqueue_small(one, tenants, each)
        order = await drain(loops, tenants * each)
    positions = worst(order)
    result.positions[name] = positions[0]
    share = order[:1000].count("big") / min(1000, len(order))
    result.order.append((name, tenants, *(f"{positions[n - 1]:,}" for n in (1, 3)), f"{positions[-1]:,}", f"{share:.1%}"))
    kit.say(f"{name}: worst {positions}, share {share:.1%}")
    if "without" not in name:
        weight = 3 if "weight" in name else 2 if each == 10 else 1
        for number, position in enumerate(positions, 1):
            promised = number * (tenants + weight) + SLACK
            result.kept(position <= promised, f"{name}: job {number} at {position}, promised {promised}")


async def measure_shares(server: kit.Server, result: Result, number: int) -> None:
    """Two tenants, weights 3 and 1."""
    async with queue(server) as loops:
        await loops[0].store.set_tenant(loops[0].conn, "big", weight=3)
        await enqueue(loops[0], "big", number)
        await enqueue(loops[0], "other", number)
        order = await drain(loops, number // 4)
    share = order[: number // 2].count("big") / (number // 2)
    result.order.append(("two with a backlog, weights 3 and 1", 1, "", "", "", f"{share:.1%}"))
    result.kept(abs(share - 0.75) < 0.02, f"weights 3 and 1: share {share:.1%}")


async def measure_price(server: kit.Server, result: Result, tenants: int, rounds: int) -> None:
    """A claim of 10 of many tenants, beside FIFO's."""
    async with queue(server, 1) as (one,):
        for statement in FIFO.split(";"):
            await one.rows(statement)
        await one.rows("INSERT INTO fifo SELECT FROM generate_series(1, %s)", rounds * BATCH * 2)
        await enqueue_small(one, tenants, max(1, rounds * BATCH * 2 // tenants))
        await one.rows("VACUUM ANALYZE")
        fifo, fair = [], []
        for _ in range(rounds):
            begun = time.perf_counter()
            await one.rows(FIFO_CLAIM)
            middle = time.perf_counter()
            claims = await one.claim(BATCH)
            fifo.append(middle - begun)
            fair.append(time.perf_counter() - middle)
            await one.end(claims.jobs)
    a, b = kit.median(fifo) * 1000, kit.median(fair) * 1000
    result.price.append((f"claim of {BATCH}, {tenants:,} tenants", f"{b:.2f} ms", "", f"FIFO {a:.2f} ms, {b / a:.2f}x"))


async def price_of(loop: Loop, name: str, result: Result, note: str = "") -> tuple[float, int]:
    """Time and buffers of a claim of one that is rolled back."""
    start, tie = loop.floor.start
    statement = (
        "SELECT * FROM aioqueue.claim(%s::bigint, ARRAY[%s::bigint], ARRAY[%s::bigint], ARRAY[%s::uuid], ARRAY[0], ARRAY[1],"
        " 1, %s::jsonb)"
    )
    params = (loop.worker, LANE, start, str(tie), loop.held.text(0))
    times, buffers = [], []
    for _ in range(15):
        async with loop.conn.transaction(force_rollback=True):
            begun = time.perf_counter()
            await loop.rows(statement, *params)
            times.append(time.perf_counter() - begun)
        async with loop.conn.transaction(force_rollback=True):
            ((plan,),) = await loop.rows(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *params)
            buffers.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
    found = kit.median(times) * 1000, int(min(buffers))
    result.price.append((name, f"{found[0]:.2f} ms", f"{found[1]:,}", note))
    kit.say(f"{name}: {found[0]:.2f} ms, {found[1]} buffers")
    return found


async def settle(loop: Loop) -> None:
    """Ticks until the floor stands; a long transaction is set aside after a second."""
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        await loop.tick()
        await asyncio.sleep(0.05)


async def measure_limit(server: kit.Server, result: Result, big: int) -> None:
    """A tenant at its limit at the head of the queue; then many jobs under a limit, counted."""
    async with queue(server, 1) as (one,):
        await one.store.set_tenant(one.conn, "big", max_running=1)
        await enqueue(one, "big", 1)
        await one.claim(1)
        await enqueue(one, "other", 100)
        await settle(one)
        first = await price_of(one, "claim of 1, another tenant at its limit", result)
        with kit.held_horizon(one.conn.info.dsn + f" password={one.conn.info.password}", "xid"):
            await enqueue(one, "big", big)
            begun, rounds = time.perf_counter(), 0
            while (await one.rows("SELECT count(*) FROM aioqueue.parked"))[0][0] < big:
                claims = await one.claim(100)
                await one.end(claims.jobs)
                rounds += 1
            seconds = time.perf_counter() - begun
            await enqueue(one, "other", 100)
            await settle(one)
            note = f"parked by {rounds} claims in {seconds:.1f} s; an XID held"
            last = await price_of(one, f"the same with {big:,} of its jobs parked", result, note)
            one.floor.reset()
            await price_of(one, "the same without the lane's floor", result)
        result.kept(last[1] <= first[1] * 1.2 + 8, f"a tenant at its limit: {first[1]} buffers, then {last[1]}")
    async with queue(server, 1) as (one,):
        await one.store.set_tenant(one.conn, "big", max_running=100)
        await enqueue(one, "big", big)
        with kit.held_horizon(one.conn.info.dsn + f" password={one.conn.info.password}", "xid"):

            async def work(number: int) -> None:
                while number > 0:
                    claims = await one.claim(100)
                    await one.end(claims.jobs)
                    number -= len(claims.jobs)
                await settle(one)

            await work(big // 100)
            first = await price_of(one, f"claim of 1 under a limit, {big // 100:,} jobs done, an XID held", result)
            await work(big * 9 // 10)
            last = await price_of(one, f"the same, {big * 91 // 100:,} done", result)
            one.held.reset()
            await price_of(one, "the same without the key's floor", result)
        result.kept(last[1] <= first[1] * 1.2 + 8, f"counting what is held: {first[1]} buffers, then {last[1]}")


ORDERS = (
    "fair",
    "weight 3 for the big one",
    "limit of 5 for the big one",
    "40 connections at once",
    "40 connections at once, 25 jobs each",
    "40 connections at once, without the cure",
)


async def run(server: kit.Server, tenants: int, big: int) -> Result:
    """Everything, at one size."""
    result = Result()
    last = f"{big + 3 * tenants:,}"
    result.positions["first in, first out (counted)"] = big + tenants
    result.order.append(("FIFO (counted, not run)", tenants, f"{big + tenants:,}", last, last, "100.0%"))
    for name in ORDERS:
        await measure_order(server, result, name, tenants, big)
    await measure_shares(server, result, max(2000, big // 10))
    for number in (10, tenants):
        await measure_price(server, result, number, 200)
    await measure_limit(server, result, big)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all and print the tables."""
    parser = kit.parser(__doc__, "fairness", rounds=1)
    parser.add_argument("--tenants", type=int, default=1_000, metavar="N", help="small tenants (default 1,000)")
    parser.add_argument("--big", type=int, default=100_000, metavar="N", help="jobs of the big one (default 100,000)")
    arguments: argparse.Namespace = parser.parse_args(argv)
    with kit.server(arguments) as server:
        result = asyncio.run(run(server, arguments.tenants, arguments.big))
    head = ("", "small tenants", "worst first job", "worst third", "worst last", "big one's share of the first 1,000")
    print(kit.table(head, result.order), "", kit.table(("", "time", "buffers", ""), result.price), sep="\n")
    for promise in result.broken:
        print(f"not kept: {promise}")
    if not result.broken:
        print("every promise is kept")
    title = f"Claims until each of {arguments.tenants:,} small tenants has begun, behind {arguments.big:,} jobs of another"
    kit.bars(arguments.svg, title, result.positions, "claims")
    return 1 if result.broken else 0


if __name__ == "__main__":
    with contextlib.suppress(psycopg.errors.AdminShutdown):
        sys.exit(main())
