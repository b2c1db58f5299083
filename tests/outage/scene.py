"""An app with a worker in this process, its tasks' diary, and questions to its server past whatever the test has broken.

An outage sets no event: the server is asked until it is so; only a hang meets the limit.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from psycopg import OperationalError

from aioqueue import AioQueue, JobContext, JobTransaction, Retry
from aioqueue.clock import clock
from aioqueue.events import DatabaseLost, DatabaseRecovered, JobLost
from aioqueue.running import RunningWorker
from aioqueue.settings import LeaseSettings, LimitSettings, PoolSettings, WorkerSettings
from aioqueue.task import Task
from tests.kit import Seen, until_true
from tests.outage.server import OutageServer

PATIENCE = 40.0
LEASE = 3.0


@dataclass
class Scene:
    """One app, what its tasks did, and its server."""

    server: OutageServer
    app: AioQueue
    seen: Seen
    lease: float
    starts: list[tuple[UUID, int]] = field(default_factory=list)
    cancelled: list[tuple[UUID, float]] = field(default_factory=list)
    """Job, and aioqueue's clock at its cancellation."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    quick: Task[..., ..., Any] = field(init=False)
    hold: Task[..., ..., Any] = field(init=False)
    written: Task[..., ..., Any] = field(init=False)

    def __post_init__(self) -> None:
        async def quick(ctx: JobContext, number: int = 0) -> int:
            self.starts.append((ctx.job_id, ctx.attempt))
            return number

        async def hold(ctx: JobContext) -> None:
            self.starts.append((ctx.job_id, ctx.attempt))
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append((ctx.job_id, clock()))
                raise

        async def written(tx: JobTransaction) -> None:
            self.starts.append((tx.job_id, tx.attempt))
            await tx.execute("INSERT INTO effect (job_id) VALUES (%s)", (tx.job_id,))

        retry = Retry(max_attempts=20, base=0.05, cap=0.2)
        self.quick = self.app.task(retry=retry)(quick)
        self.hold = self.app.task(retry=retry)(hold)
        self.written = self.app.task(retry=retry)(written)

    @asynccontextmanager
    async def working(self, *, grace: float = 5.0, concurrency: int | None = None) -> AsyncIterator[RunningWorker]:
        """Open the app and run a worker; both must end within their limits, whatever is broken."""
        async with self.app:
            worker = self.app.worker(grace=grace, concurrency=concurrency)
            async with worker:
                yield worker

    def lease_end(self, worker: RunningWorker) -> float:
        """The earliest moment, by aioqueue's clock, at which the database may take the last accepted beat for over."""
        assert worker._worker is not None
        return worker._worker.heartbeat._deadline + self.lease / 6

    async def ask(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        """Rows of a query of the superuser, by the socket."""
        return await asyncio.to_thread(self.server.rows, query, *params)

    async def until(self, condition: str | Callable[[], bool], *params: object) -> None:
        """Wait until a condition holds, of the database or of the test."""

        async def holds() -> object:
            with contextlib.suppress(OperationalError):
                return (await self.ask(f"SELECT {condition}", *params))[0][0] if isinstance(condition, str) else condition()
            return False

        await until_true(holds)

    async def until_ended(self, number: int) -> None:
        """Wait until so many jobs have ended."""
        await self.until("count(*) >= %s FROM aioqueue.outcome", number)

    async def check(self, jobs: list[UUID]) -> None:
        """Every job has succeeded once, nothing else is in the queue, and no attempt ran twice."""
        rows = await self.ask("SELECT job_id, state FROM aioqueue.outcome")
        assert sorted(rows) == sorted((job, "succeeded") for job in jobs)
        left = "(SELECT count(*) FROM aioqueue.live) + (SELECT count(*) FROM aioqueue.scheduled)"
        assert await self.ask(f"SELECT {left}") == [(0,)]
        assert not [start for start, count in Counter(self.starts).items() if count > 1]

    def losses(self) -> Counter[str]:
        """How often each loop has said that it lost the database."""
        return Counter(event.loop for event in self.seen.all(DatabaseLost))

    def recoveries(self) -> Counter[str]:
        """How often each loop has said that it is back."""
        return Counter(event.loop for event in self.seen.all(DatabaseRecovered))

    def late(self) -> list[UUID]:
        """Jobs whose late outcome was refused."""
        return [event.job_id for event in self.seen.all(JobLost)]


def make_scene(
    server: OutageServer,
    dsn: str | None = None,
    *,
    lease: float = LEASE,
    poll: float = 0.5,
    pool: PoolSettings | None = None,
    limits: LimitSettings | None = None,
) -> Scene:
    """A scene with short times; `dsn`: by default straight to the server."""
    seen = Seen()
    app = AioQueue(
        dsn or server.tcp(),
        schema=server.schema,
        lease=LeaseSettings(lease=lease, rescue_interval=0.2),
        worker=WorkerSettings(poll=poll),
        pool=pool or PoolSettings(acquire_timeout=1.0, deadline=1.5),
        limits=limits or LimitSettings(),
        observers=[seen],
    )
    return Scene(server, app, seen, lease)
