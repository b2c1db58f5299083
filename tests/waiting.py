"""A process that waits for jobs, without an app: for the tests of results and of watches."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from psycopg import AsyncConnection

from aioqueue.client_store import EndedJob
from aioqueue.database import Database
from aioqueue.events import Observers
from aioqueue.job import Job, JobState, JobStatus
from aioqueue.listen import Listener
from aioqueue.result import ResultReader
from aioqueue.settings import PoolSettings
from aioqueue.states import JobEvent
from aioqueue.store import Store
from aioqueue.wakeup import Notifier
from tests.postgres import Database as PlainDatabase
from tests.sql.engine import Session, entry

NEVER = 3_600.0
"""A poll that cannot be what delivers a result within the test."""


class WatchedStore(Store):
    """The real store; `before` runs ahead of the query, with the number of the read and its connection."""

    def __init__(self, schema: str) -> None:
        super().__init__(schema)
        self.reads: list[tuple[float, float]] = []
        self.sizes: list[int] = []
        self.before: Callable[[int, AsyncConnection[Any]], Awaitable[None]] | None = None
        self._read = asyncio.Condition()

    async def read_outcomes(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]]) -> list[EndedJob]:
        return await self._noted(conn, jobs, super().read_outcomes)

    async def follow(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]]) -> list[EndedJob]:
        return await self._noted(conn, jobs, super().follow)

    async def _noted(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]], read: Any) -> list[EndedJob]:
        started = time.monotonic()
        self.sizes.append(len(jobs))
        try:
            if self.before is not None:
                await self.before(len(self.sizes), conn)
            found: list[EndedJob] = await read(conn, jobs)
            return found
        finally:
            self.reads.append((started, time.monotonic()))
            async with self._read:
                self._read.notify_all()

    async def wait_reads(self, number: int) -> None:
        """Wait until so many reads have ended."""
        async with self._read:
            await self._read.wait_for(lambda: len(self.reads) >= number)


@dataclass
class Process:
    """What the app of one process owns, without the app."""

    database: Database
    store: WatchedStore
    listener: Listener
    notifier: Notifier
    reader: ResultReader
    task: "asyncio.Task[None]"
    may_listen: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_result(self, job: Job[Any], timeout: float | None) -> Any:
        return await self.reader.wait(job, timeout)

    def watch_job(self, job: Job[Any], timeout: float | None) -> AsyncIterator[JobEvent[Any]]:
        return self.reader.watch(job, timeout)

    async def job_status(self, job: Job[Any]) -> JobStatus:
        return await self.reader.status(job)

    async def cancel_job(self, job: Job[Any], *, on: object | None) -> JobState:
        raise NotImplementedError

    async def retry_job(self, job: Job[Any], *, on: object | None) -> Job[Any]:
        raise NotImplementedError

    def job(self, job_id: UUID, tenant: str | None = None, decode: Callable[[str], Any] | None = None) -> Job[Any]:
        return Job(job_id, source=self, tenant=tenant, decode=decode)

    def wait(self, job_id: UUID, tenant: str | None = None, timeout: float | None = None) -> "asyncio.Task[Any]":
        """Wait for the result in the background."""
        return asyncio.create_task(self.reader.wait(self.job(job_id, tenant), timeout))


Start = Callable[..., Awaitable[Process]]


@asynccontextmanager
async def running(dsn: str, schema: str, poll: float, listening: bool) -> AsyncIterator[Process]:
    database = Database(dsn, PoolSettings())
    store = WatchedStore(schema)
    may_listen = asyncio.Event()
    if listening:
        may_listen.set()

    async def connect() -> AsyncConnection[Any]:
        await may_listen.wait()
        return await database.connect()

    async def notify(name: str) -> None:
        async with database.for_caller() as conn:
            await conn.execute("SELECT pg_notify(%s, '')", (name,))

    connected = asyncio.Event()
    listener = Listener(connect, schema=schema, observers=Observers([lambda _: connected.set()]), notify=notify)
    notifier = Notifier(database, store)
    reader = ResultReader(database, store, listener, notifier, poll=poll, keep=7 * 86_400)
    await database.open()
    tasks = [asyncio.create_task(loop.run()) for loop in (listener, notifier, reader)]
    try:
        if listening:
            await connected.wait()
        yield Process(database, store, listener, notifier, reader, tasks[2], may_listen)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await database.close()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


@pytest.fixture
async def start(worker_dsn: str, schema: str) -> AsyncIterator[Start]:
    """A function that starts a reader with all it needs; stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start_process(poll: float = NEVER, *, listening: bool = True) -> Process:
            return await stack.enter_async_context(running(worker_dsn, schema, poll, listening))

        yield start_process


@pytest.fixture
async def other(database: PlainDatabase, schema: str) -> AsyncIterator[Session]:
    """A session of another process, which runs the jobs."""
    async with await AsyncConnection.connect(database.dsn("worker"), autocommit=True) as conn:
        yield Session(conn, Store(schema))


@pytest.fixture
async def boss(database: PlainDatabase, schema: str) -> AsyncIterator[Session]:
    """A session that sees everything."""
    async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as conn:
        yield Session(conn, Store(schema))


async def finish(session: Session, reason: str = "succeeded", number: int = 1, *, hint: bool = True, **rest: Any) -> None:
    """Run the next jobs to their end, in other words: claim, record, hint."""
    worker = await session.register()
    jobs = await session.claim(worker, number)
    assert len(jobs) == number
    assert len(await session.record(worker, *(entry(job, reason, **rest) for job in jobs))) == number
    if hint:
        await session.store.notify(session.conn, "done")


SUCCESS: dict[str, Any] = {"r": {"total": 3}}
DEATH: dict[str, Any] = {"d": None, "t": "ValueError", "m": "no such month"}
