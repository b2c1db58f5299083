"""What the demo's steps stand on: the server, the connections of observer and client, the app, the sampler, the checks.

Owns them from `open` to the end of its stack. The observer is a superuser, whom no policy binds; the app and the orders are
the client's, an ordinary role.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID, uuid4

from psycopg import AsyncConnection

from aioqueue import embedded, migrate
from aioqueue.app import AioQueue
from aioqueue.errors import AioQueueError, JobFailed
from aioqueue.job import Job, JobState

from .held import Sampler
from .report import AttemptRow, Check, Report
from .screen import Screen
from .tasks import QUEUE, Statement, make_statement

STEP_SECONDS = 60.0
"""The longest that a step may wait for a job."""


class DemoError(AioQueueError):
    """The demo cannot run here, or came to a halt."""


class Stage:
    """One run's surroundings."""

    server: embedded.EmbeddedServer
    observer: AsyncConnection[Any]
    client: AsyncConnection[Any]
    app: AioQueue
    sampler: Sampler

    def __init__(self, screen: Screen, report: Report) -> None:
        self.screen = screen
        self.report = report

    async def open(self, stack: contextlib.AsyncExitStack, data_dir: Path | None) -> None:
        """Start the server, migrate, grant, connect. Raises EmbeddedError, DemoError."""
        server = self.server = stack.enter_context(await asyncio.to_thread(embedded.start, data_dir))
        await migrate.migrate(server.dsn("owner"))
        await migrate.grant(server.dsn("owner"), role="aioqueue_worker", kind="worker")
        await migrate.grant(server.dsn("owner"), role="aioqueue_client", kind="client")
        self.observer = await self._connect(stack, "superuser")
        self.client = await self._connect(stack, "client")
        self.sampler = Sampler(await self._connect(stack, "superuser"))
        self.app = await stack.enter_async_context(AioQueue(server.dsn("client")))
        if not await self.value("SELECT pg_try_advisory_lock(hashtextextended('aioqueue demo', 0))"):
            raise DemoError(f"another demo runs in {server.data_dir}: wait for its end, or give another --data-dir")
        # What an interrupted demo has left in the queue.
        await self.observer.execute(
            "SELECT aioqueue.cancel_job(j.id) FROM aioqueue.job j WHERE j.queue = %s"
            " AND NOT EXISTS (SELECT FROM aioqueue.outcome o WHERE o.job_id = j.id)",
            (QUEUE,),
        )

    async def _connect(self, stack: contextlib.AsyncExitStack, role: embedded.Role) -> AsyncConnection[Any]:
        conn: AsyncConnection[Any] = await AsyncConnection.connect(self.server.dsn(role), autocommit=True)
        return await stack.enter_async_context(conn)

    def check(self, name: str, found: object, wanted: object, *, ok: bool | None = None) -> None:
        """Take note of a figure, and whether it is what it must be."""
        check = Check(name, wanted, found, found == wanted if ok is None else ok)
        self.report.checks.append(check)
        self.screen.checked(check)

    async def value(self, query: LiteralString, *params: object) -> Any:
        """Ask the observer for one value."""
        row = await (await self.observer.execute(query, params)).fetchone()
        return None if row is None else row[0]

    async def order(self, tenant: int) -> tuple[UUID, Job[Statement]]:
        """Insert an order and enqueue its job, in the client's open transaction."""
        order = uuid4()
        await self.client.execute("SELECT set_config('app.tenant', %s, true)", (str(tenant),))
        await self.client.execute("INSERT INTO demo.orders (id, tenant_id) VALUES (%s, %s)", (order, tenant))
        return order, await make_statement.options(tenant=str(tenant), on=self.client).enqueue(order)

    async def hint(self) -> None:
        """Say that there is work; without it, workers look once a second. Enqueueing in an open app does this by itself."""
        await self.client.execute("SELECT aioqueue.notify()")

    async def wait_all(self, jobs: Iterable[Job[Any]], one_done: Callable[[], None] | None = None) -> None:
        """Wait until all have succeeded."""

        async def wait(job: Job[Any]) -> None:
            await self.app.job(job.id).result(timeout=STEP_SECONDS)
            if one_done is not None:
                one_done()

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(wait(job))

    async def expect_dead(self, job: Job[Any], name: str, *, attempts: int) -> None:
        """Wait for the job's end, and check that it is dead with an error kept for each attempt."""
        try:
            await self.app.job(job.id).result(timeout=STEP_SECONDS)
            state = JobState.SUCCEEDED
        except JobFailed as failed:
            state = JobState.DEAD
            self.screen.fact(f"its result, asked for by id: {failed}")
        self.check(f"the job {name} ended as", str(state), "dead")
        cursor = await self.observer.execute(
            "SELECT a.attempt, a.reason, coalesce(a.error_type || ': ', '') || split_part(a.error_message, E'\\n', 1),"
            " extract(epoch FROM a.finished_at - j.created_at)::float"
            " FROM aioqueue.attempt a JOIN aioqueue.job j ON j.id = a.job_id WHERE a.job_id = %s ORDER BY a.attempt",
            (job.id,),
        )
        rows = [AttemptRow(name, *row) for row in await cursor.fetchall()]
        self.report.attempts += rows
        self.check("attempts kept, each with its error", sum(bool(row.error) for row in rows), attempts)
