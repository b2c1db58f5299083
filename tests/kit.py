"""What the tests of the runtime share: an observer that can be waited for, a client of a database, a bench for single jobs.

Nothing here waits for time: a test waits for an event of the library or for a condition of the database. The limit on
such a wait only turns a hang into a failure.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, TypeVar
from uuid import UUID

from psycopg import AsyncConnection

from aioqueue.app import AioQueue
from aioqueue.attempt import Cause
from aioqueue.claimed import Claimed
from aioqueue.database import Database
from aioqueue.events import Event, Observers
from aioqueue.job import new_job_id
from aioqueue.outcome import Outcome
from aioqueue.registry import TaskRegistry
from aioqueue.run import Runner
from aioqueue.running import RunningWorker
from aioqueue.session_factory import SessionFactory
from aioqueue.settings import LeaseSettings, LimitSettings, PoolSettings, Settings, TenantSettings
from aioqueue.store import Store
from aioqueue.transaction import JobTransactions
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.sql.engine import Session

E = TypeVar("E", bound=Event)

PATIENCE = 60.0
"""Seconds after which a wait is a failure."""
PAUSES = (0.005, 0.05)
"""Seconds between two looks, first and at last: one after the other would take the machine from what is waited for."""


MakeApp = Callable[..., AioQueue]
"""Makes an app on the test's database, with settings of its own; see the fixture `make_app`."""


class Seen:
    """An observer: what happened so far, and a way to wait for what is to come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._more = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._more.set()

    def all(self, kind: type[E], **facts: object) -> list[E]:
        """The events of a kind so far with these attributes."""
        return [e for e in self.events if isinstance(e, kind) and all(getattr(e, k) == v for k, v in facts.items())]

    async def wait(self, kind: type[E], number: int = 1, **facts: object) -> E:
        """Wait until so many events of the kind with these attributes were seen; that one."""
        async with asyncio.timeout(PATIENCE):
            while len(found := self.all(kind, **facts)) < number:
                self._more.clear()
                await self._more.wait()
        return found[number - 1]


@asynccontextmanager
async def session(dsn: str, schema: str) -> AsyncIterator[Session]:
    """One more connection in autocommit with the engine's operations."""
    conn = await AsyncConnection.connect(dsn, autocommit=True)
    try:
        yield Session(conn, Store(schema))
    finally:
        await conn.close()


async def until_true(look: Callable[[], Any], pauses: tuple[float, float] = PAUSES) -> Any:
    """Wait for what no event says: look, or ask, until there is something true; that. Nothing else of the tests polls."""
    pause, longest = pauses
    async with asyncio.timeout(PATIENCE):
        while True:
            found = look()
            if isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(pause)
            pause = min(1.25 * pause, longest)


async def until(session: Session, condition: str, *params: object) -> None:
    """Wait until a query (that says `aioqueue.`) gives true."""
    await until_true(lambda: session.value(condition, *params))


async def turn_until(look: Callable[[], object]) -> None:
    """Let the loop turn, with its other tasks, until it is so."""
    await until_true(look, (0, 0))


def wait_until_true(look: Callable[[], object]) -> None:
    """The same for a test without a loop."""
    asyncio.run(until_true(look))


def end_time(worker: RunningWorker, job_id: UUID) -> None:
    """Let the time limit of a job that runs be over: for tests of what comes then, whatever the time that it takes to start."""
    assert worker._worker is not None
    runner = worker._worker._steps.runner
    (run,) = [run for run in runner.runs.values() if run.job.job_id == job_id]
    run.ends = time.monotonic()
    runner._end_overdue()


async def passed(event: asyncio.Event) -> None:
    """Wait for an event of the test itself."""
    async with asyncio.timeout(PATIENCE):
        await event.wait()


@dataclass
class Bench:
    """Runs single jobs on a pool without a worker's loops around them, so that they share one connection.

    `run` claims and runs one job of a task of `tasks` and returns its outcome: None where its own commit recorded it
    (then it stands in `settled_jobs`) or where the job was lost.
    """

    engine: Session
    database: Database
    store: Store
    settings: Settings
    worker: int
    tasks: TaskRegistry
    runner: Runner
    transactions: JobTransactions
    seen: Seen
    outcomes: dict[Any, Outcome] = field(default_factory=dict)
    settled_jobs: list[Claimed] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, job: Claimed, outcome: Outcome) -> None:
        assert job.job_id not in self.outcomes, "one outcome for each attempt"
        self.outcomes[job.job_id] = outcome
        self.freed.set()

    def recorded_by_commit(self, job: Claimed) -> None:
        self.settled_jobs.append(job)

    async def claim(self, task: str, payload: str = "{}", *, tenant: str | None = None, **options: Any) -> Claimed:
        """Enqueue and claim one job."""
        facts: dict[str, Any] = {"queue": "default", "priority": 0, "max_attempts": 5} | options
        job = NewJob(id=new_job_id(), task=task, payload=payload, tenant=tenant, **facts)
        await enqueue_many(self.store, self.engine.conn, [job])
        claimed = await self.engine.claim(self.worker, 1)
        assert [c.job_id for c in claimed] == [job.id]
        return claimed[0]

    async def start(self, task: str, payload: str = "{}", **options: Any) -> Claimed:
        """Start one job and return at once."""
        job = await self.claim(task, payload, **options)
        self.runner.start(job)
        return job

    async def end(self) -> None:
        """Wait until nothing runs."""
        async with asyncio.timeout(PATIENCE):
            while self.runner.runs:
                self.freed.clear()
                await self.freed.wait()

    async def run(self, task: str, payload: str = "{}", **options: Any) -> Outcome | None:
        """Run one job to its end; its outcome."""
        job = await self.start(task, payload, **options)
        await self.end()
        return self.outcomes.get(job.job_id)

    def stop(self, job: Claimed, cause: Cause) -> None:
        """End a job that runs."""
        (run,) = [run for run in self.runner.runs.values() if run.job is job]
        self.runner.stop(run, cause)

    async def state(self, job: Claimed) -> str | None:
        """The job's state in the database."""
        return await self.engine.state(job.job_id)


@asynccontextmanager
async def bench(
    dsn: str,
    engine: Session,
    tasks: TaskRegistry,
    *,
    pool: PoolSettings | None = None,
    limits: LimitSettings | None = None,
    lease: LeaseSettings | None = None,
    tenants: TenantSettings | None = None,
    session: SessionFactory | None = None,
    concurrency: int = 10,
) -> AsyncIterator[Bench]:
    """A bench on the database of `dsn`; `engine` is another session on it, of the owner."""
    settings = Settings(
        schema=engine.store.schema,
        pool=pool or PoolSettings(size=3),
        limits=limits or LimitSettings(),
        lease=lease or LeaseSettings(),
        tenants=tenants or TenantSettings(),
        session=session,
    )
    database = Database(dsn, settings.pool)
    await database.open()
    seen = Seen()
    store = Store(settings.schema)

    def hint(kind: str) -> None:
        made.hints.append(kind)

    def freed(_job: Claimed) -> None:
        made.freed.set()

    transactions = JobTransactions(database, store, settings, hint=hint)

    class _Sink:
        def put(self, job: Claimed, outcome: Outcome) -> None:
            made.put(job, outcome)

        def recorded_by_commit(self, job: Claimed) -> None:
            made.recorded_by_commit(job)

    runner = Runner(
        tasks=tasks.tasks,
        transactions=transactions,
        sink=_Sink(),
        limits=settings.limits,
        tenants=settings.tenants,
        concurrency=concurrency,
        observers=Observers([seen]),
        freed=freed,
        abandoned=lambda: None,
    )
    made = Bench(engine, database, store, settings, await engine.register(lease=600), tasks, runner, transactions, seen)
    try:
        yield made
        await made.end()
    finally:
        runner.close()
        await database.close()
