"""What the actors of one chaos run share, and the judgement at its end: the model beside the database.

The model knows every committed job, every committed claim and every accepted end; the checks compare it with the tables.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection, sql
from psycopg.rows import TupleRow

from aioqueue.claimed import Claimed
from aioqueue.connector import connection_string
from aioqueue.floor import LaneFloor
from aioqueue.job import SUSPECT, lane
from aioqueue.sql import as_sql
from aioqueue.store import Store

QUEUES = ("mail", "reports", "webhooks")
PRIORITIES = (-1, 0, 1)
LEASE = 1.2
SPARED = ("interrupted", "snoozed")


@dataclass
class Chaos:
    """One run: where it happens, what is known of it, what went wrong."""

    dsn: str
    store: Store
    seconds: float
    seed: int
    floor: type[LaneFloor[UUID]]
    narrow: bool = False
    """One lane, few jobs and many late commits: a floor that is wrong is passed by somebody at once, on any machine."""
    sabotaged: bool = False
    """Something is broken on purpose: the first thing found wrong is enough."""
    committed: set[UUID] = field(default_factory=set)
    """Jobs whose enqueue has committed."""
    ready_at: dict[UUID, float] = field(default_factory=dict)
    """When a job became claimable, where that is known."""
    claims: dict[UUID, list[int]] = field(default_factory=dict)
    """Attempt numbers of the committed claims."""
    ends: Counter[UUID] = field(default_factory=Counter)
    """Ends that the database accepted and said so."""
    delays: list[float] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    """The longest delay, and whose it was."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    enqueued: asyncio.Event = field(default_factory=asyncio.Event)
    """No more jobs come, nobody dies any more."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def caught(self) -> bool:
        """Whether there is no need to go on."""
        return self.sabotaged and bool(self.faults)

    @property
    def queues(self) -> Sequence[str]:
        """Where jobs go."""
        return QUEUES[:1] if self.narrow else QUEUES

    @property
    def priorities(self) -> Sequence[int]:
        """Which they have."""
        return PRIORITIES[:1] if self.narrow else PRIORITIES

    @property
    def lanes(self) -> list[tuple[int, int]]:
        """(lane, priority) of every queue, the suspects' first, then highest priority first."""
        return [
            (lane(queue, priority), priority)
            for priority in (SUSPECT, *sorted(self.priorities, reverse=True))
            for queue in self.queues
        ]

    async def connect(self) -> AsyncConnection[TupleRow]:
        """Open a connection with the runtime's own settings."""
        conn = await AsyncConnection.connect(connection_string(self.dsn), autocommit=True)
        conn.prepare_threshold = 1
        return conn

    def text(self, statement: str) -> sql.SQL:
        """Return a statement that says `aioqueue.` with the schema's name put in."""
        return as_sql(statement, self.store.schema)

    async def rows(self, conn: AsyncConnection[TupleRow], statement: str, *params: object) -> list[tuple[Any, ...]]:
        """Run a statement that says `aioqueue.`."""
        return await (await conn.execute(self.text(statement), params or None)).fetchall()

    def fault(self, text: str) -> None:
        """Take note of something that must not happen."""
        self.faults.append(text)

    def claimed(self, jobs: Iterable[Claimed]) -> None:
        """Take note of a committed claim."""
        now = time.time()
        for job in jobs:
            self.counts["claims"] += 1
            self.claims.setdefault(job.job_id, []).append(job.attempt)
            ready = self.ready_at.pop(job.job_id, None)
            if ready is not None:
                self.delays.append(max(0.0, now - ready))
                self.slowest = max(self.slowest, (now - ready, f"job {job.job_id}, attempt {job.attempt}"))

    def ended(self, job_id: UUID) -> None:
        """Take note of an accepted end."""
        self.ends[job_id] += 1


def _few(ids: Iterable[object]) -> str:
    listed = sorted(map(str, ids))
    return f"{len(listed)}: {', '.join(listed[:3])}{', …' if len(listed) > 3 else ''}"


async def judge(chaos: Chaos, conn: AsyncConnection[TupleRow]) -> None:
    """Compare the model with the tables; what does not fit becomes a fault."""
    outcomes = {row[0]: (row[1], row[2]) for row in await chaos.rows(conn, "SELECT job_id, state, attempt FROM aioqueue.outcome")}
    for state, _ in outcomes.values():
        chaos.counts[f"ended {state}"] += 1
    if lost := chaos.committed - outcomes.keys():
        chaos.fault(f"lost, committed jobs without an outcome: {_few(lost)}")
    if strange := outcomes.keys() - chaos.committed:
        chaos.fault(f"outcomes of jobs that never committed: {_few(strange)}")
    if twice := [job for job, number in chaos.ends.items() if number > 1]:
        chaos.fault(f"ended twice: {_few(twice)}")
    if unsaid := [job for job, (state, _) in outcomes.items() if state == "succeeded" and not chaos.ends[job]]:
        chaos.fault(f"succeeded, but no worker was told so: {_few(unsaid)}")
    if miscounted := [
        job for job, (_, attempt) in outcomes.items() if sorted(chaos.claims.get(job, [])) != list(range(1, attempt + 1))
    ]:
        chaos.fault(f"attempts differ from committed claims: {_few(miscounted)}")
    unwritten = await chaos.rows(
        conn,
        "SELECT o.job_id FROM aioqueue.outcome o WHERE o.attempt - (o.state = 'succeeded')::integer"
        " - (o.state = 'cancelled')::integer > (SELECT count(*) FROM aioqueue.attempt a WHERE a.job_id = o.job_id)",
    )
    if unwritten:
        chaos.fault(f"attempts without success left no row: {_few(row[0] for row in unwritten)}")
    early = await chaos.rows(
        conn,
        "SELECT o.job_id FROM aioqueue.outcome o JOIN aioqueue.job j ON j.id = o.job_id, LATERAL (SELECT count(*) AS n,"
        " max(a.attempt) FILTER (WHERE a.reason = 'worker lost') AS lost FROM aioqueue.attempt a"
        " WHERE a.job_id = j.id AND a.reason <> ALL (%s)) x"
        " WHERE o.state = 'dead' AND x.lost = o.attempt AND x.n < j.max_attempts",
        list(SPARED),
    )
    if early:
        chaos.fault(f"dead by a lost worker before the last attempt: {_few(row[0] for row in early)}")
    await _nothing_left(chaos, conn, ("live", "scheduled", "cancel", "worker"))


async def _nothing_left(chaos: Chaos, conn: AsyncConnection[TupleRow], tables: Sequence[str]) -> None:
    for table in tables:
        ((left,),) = await chaos.rows(conn, f"SELECT count(*) FROM aioqueue.{table}")
        if left:
            chaos.fault(f"{left} rows left in {table}")


def percentiles(delays: Sequence[float]) -> str:
    """Return p50, p99, p99.9 and the highest in milliseconds."""
    if not delays:
        return "no delays measured"
    ordered = sorted(delays)

    def at(share: float) -> float:
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]

    return f"p50 {at(50):.1f}, p99 {at(99):.1f}, p99.9 {at(99.9):.1f}, max {1000 * ordered[-1]:.1f} ms"
