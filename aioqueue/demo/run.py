"""The demo's steps, in order; each says what it does and which promise that shows, and checks it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

from aioqueue.errors import JobNotFound
from aioqueue.job import Job

from .data import LARGEST, TENANTS, drop_tables, expected, make_tables, visible_without_tenant
from .processes import WorkerProcesses
from .report import Report, TenantRow
from .screen import Screen
from .stage import STEP_SECONDS, DemoError, Stage
from .tasks import LEASE, MAIL_SECONDS, QUEUE, Statement, divide, make_statement, poison, send_statement

WORKERS = 3
NEIGHBOURS = 10
"""Ordinary jobs enqueued in one transaction with the poison job."""
CONNECTIONS = 6
"""Connections of one worker at most: its pool of four, one listener, one guard."""
LONGEST = 180.0
"""Seconds after which the demo gives up."""


class Demo:
    """One run of the demo."""

    def __init__(self, screen: Screen, *, data_dir: Path | None, keep: bool, largest: int = LARGEST) -> None:
        self._screen = screen
        self._report = Report(workers=WORKERS)
        self._stage = Stage(screen, self._report)
        self._data_dir = data_dir
        self._keep = keep
        self._largest = largest
        self._workers: WorkerProcesses
        self._work: asyncio.Task[None]
        self._orders: dict[int, UUID] = {}
        self._jobs: dict[int, Job[Statement]] = {}

    async def run(self) -> Report:
        """Run every step. Raises DemoError, EmbeddedError, and groups of WorkersFailed."""
        began = time.monotonic()
        running = asyncio.current_task()
        if running is not None:
            # SIGTERM ends the worker processes too. (Windows has none, and no embedded server.)
            with contextlib.suppress(NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        self._screen.line("aioqueue demo: statements for 100 tenants, computed by jobs under row-level security")
        async with contextlib.AsyncExitStack() as stack:
            await self._start_server(stack)
            await self._make_data()
            await self._order()
            async with self._running_workers():
                await self._statements()
                await self._hold_nothing()
                await self._fail()
                await self._crash()
                await self._stop()
            await self._read_tenants()
            self._report.held = self._stage.sampler.phases[1:]
            self._report.seconds = time.monotonic() - began
            if not self._keep:
                await drop_tables(self._stage.server.dsn("owner"))
        return self._report

    @contextlib.asynccontextmanager
    async def _running_workers(self) -> AsyncIterator[None]:
        workers = self._workers = WorkerProcesses(self._stage.server.dsn("worker"), WORKERS)
        try:
            async with asyncio.TaskGroup() as group:
                self._work = group.create_task(workers.run())
                looks = group.create_task(self._stage.sampler.run())
                try:
                    async with asyncio.timeout(LONGEST):
                        yield
                finally:
                    self._work.cancel()
                    looks.cancel()
        except* TimeoutError:
            raise DemoError(f"a step took too long; the workers' output:\n{workers.output()}") from None
        finally:
            workers.close()

    async def _start_server(self, stack: contextlib.AsyncExitStack) -> None:
        self._screen.step(
            "Start an embedded PostgreSQL, bring the schema up to date, give two ordinary roles their rights",
            "no superuser and no extension is needed at run time; the worker's role owns nothing",
        )
        began = time.monotonic()
        await self._stage.open(stack, self._data_dir)
        self._report.server = "PostgreSQL " + await self._stage.value("SHOW server_version")
        self._report.data_dir = str(self._stage.server.data_dir)
        self._screen.fact(f"{self._report.server} in {self._report.data_dir}, ready after {time.monotonic() - began:.1f} s")
        owned = await self._stage.value(
            "SELECT count(*) FROM pg_class WHERE relowner IN ('aioqueue_worker'::regrole, 'aioqueue_client'::regrole)"
        )
        self._stage.check("tables owned by the roles of workers and clients", owned, 0)

    async def _make_data(self) -> None:
        wanted = sum(self._largest // tenant for tenant in range(1, TENANTS + 1))
        self._screen.step(
            f"Make {wanted:,} invoices of {TENANTS} tenants, floor({self._largest:,} / tenant) each, row-level security FORCED",
            "no tenant leaks: with no tenant set nobody sees an invoice, not even the tables' owner",
        )
        self._report.invoices = await make_tables(self._stage.server.dsn("owner"), largest=self._largest)
        self._stage.check("invoices", self._report.invoices, wanted)
        for role in ("owner", "worker"):
            seen = await visible_without_tenant(self._stage.server.dsn(role))
            self._stage.check(f"invoices that the {role} sees with no tenant set", seen, 0)

    async def _order(self) -> None:
        self._screen.step(
            f"Insert an order and enqueue its job in one transaction, for each of {TENANTS} tenants; roll one more back",
            "both or neither: a job exists exactly if the transaction that enqueued it commits",
        )
        stage = self._stage
        for tenant in range(1, TENANTS + 1):
            async with stage.client.transaction():
                self._orders[tenant], self._jobs[tenant] = await stage.order(tenant)
        async with stage.client.transaction(force_rollback=True):
            order, job = await stage.order(1)
        count = await stage.value("SELECT count(*) FROM demo.orders WHERE id = ANY (%s)", list(self._orders.values()))
        stage.check("orders", count, TENANTS)
        count = await stage.value("SELECT count(*) FROM aioqueue.job WHERE id = ANY (%s)", [j.id for j in self._jobs.values()])
        stage.check("jobs", count, TENANTS)
        stage.check("orders rolled back", await stage.value("SELECT count(*) FROM demo.orders WHERE id = %s", order), 0)
        try:
            found = str((await stage.app.job(job.id).status()).state)
        except JobNotFound:
            found = "not found"
        stage.check("the job of the order that was rolled back", found, "not found")

    async def _statements(self) -> None:
        self._screen.step(
            f"Start {WORKERS} worker processes (lease {LEASE:g} s here, 30 s by default); each job sums up its tenant's invoices",
            "once in the database: what a job writes, its result and its success are one commit, under its tenant's policy",
        )
        self._stage.sampler.enter("statements: each in its own transaction")
        self._screen.begin_progress(TENANTS)
        wrong = 0

        async def wait(tenant: int, job: Job[Statement]) -> None:
            nonlocal wrong
            found = await self._stage.app.job(job.id, of=make_statement).result(timeout=STEP_SECONDS)
            right = expected(tenant, self._largest)
            wrong += found != Statement(invoices=right.invoices, cents=right.cents, tenants=1)
            self._screen.advance()

        async with asyncio.TaskGroup() as group:
            for tenant, job in self._jobs.items():
                group.create_task(wait(tenant, job))
        self._screen.end_progress()
        self._stage.check("results that differ from the sums computed without the database", wrong, 0)
        done = await self._stage.value("SELECT count(*) FROM demo.orders WHERE status = 'done' AND runs = 1")
        self._stage.check("orders marked as done by their own job, once each", done, TENANTS)

    async def _hold_nothing(self) -> None:
        self._screen.step(
            f"Send {TENANTS} statements at once, each job waiting {MAIL_SECONDS:g} s for a slow service",
            "holding nothing: while a job runs without a transaction, no connection and no transaction is kept for it",
        )
        held = self._stage.sampler.enter("sending: jobs that hold nothing")
        async with self._stage.client.transaction():
            jobs = [
                await send_statement.options(tenant=str(tenant), on=self._stage.client).enqueue(order)
                for tenant, order in self._orders.items()
            ]
        await self._stage.hint()
        self._screen.begin_progress(TENANTS)
        await self._stage.wait_all(jobs, self._screen.advance)
        self._screen.end_progress()
        connections, transactions, holders = held.least_at_peak()
        more = f"more than the {held.connections} connections of {WORKERS} workers"
        self._stage.check(f"jobs at once, {more}", held.running, more, ok=held.running > held.connections)
        looks = f"at the quietest of {len(held.at_peak)} looks while all {held.running} ran"
        self._screen.fact(f"{looks} the workers had {connections} connections; the table at the end has the most of any look,")
        self._screen.fact(
            "in which claims, records, beats and the jobs' notes of what was sent show too: transactions of milliseconds"
        )
        self._stage.check(f"transactions open {looks}", transactions, 0)
        self._stage.check("holders of the xmin horizon then, which would hold VACUUM back", holders, 0)
        sent = await self._stage.value("SELECT count(*) FROM demo.orders WHERE sent = 1")
        self._stage.check("statements noted as sent, once each", sent, TENANTS)

    async def _fail(self) -> None:
        self._screen.step(
            "Run a job that writes and then fails, three attempts, ahead of an ordinary job",
            "each attempt is counted and its error kept, its writes are rolled back, and others pass by",
        )
        stage = self._stage
        stage.sampler.enter("a job that fails")
        async with stage.client.transaction():
            job = await divide.options(tenant="1", on=stage.client).enqueue(self._orders[1])
            _, behind = await stage.order(1)
        await stage.hint()
        statement = await stage.app.job(behind.id, of=make_statement).result(timeout=STEP_SECONDS)
        stage.check("the job behind it counts", statement.invoices, self._largest)
        await stage.expect_dead(job, "divide", attempts=3)
        status = await stage.value("SELECT status FROM demo.orders WHERE id = %s", self._orders[1])
        stage.check("the status that each attempt had changed, and did not", status, "done")

    async def _crash(self) -> None:
        self._screen.step(
            f"Run a job that kills its process (os._exit), beside {NEIGHBOURS} ordinary ones; start each killed worker again",
            "counted before the work: it is dead after its last attempt, its neighbours live, nothing stays running",
        )
        stage = self._stage
        stage.sampler.enter("a job that kills its worker")
        began = time.monotonic()
        async with stage.client.transaction():
            job = await poison.options(on=stage.client).enqueue()
            ordered = [await stage.order(tenant) for tenant in range(1, NEIGHBOURS + 1)]
        await stage.hint()
        await stage.expect_dead(job, "poison", attempts=3)
        self._screen.fact(f"that took {time.monotonic() - began:.1f} s: each take-over waits for the lease of {LEASE:g} s to end")
        stage.check("worker processes killed", self._workers.killed, 3)
        await stage.wait_all(neighbour for _, neighbour in ordered)
        runs = await stage.value("SELECT count(*) FROM demo.orders WHERE id = ANY (%s) AND runs = 1", [id_ for id_, _ in ordered])
        stage.check("neighbours that succeeded, each written once", runs, NEIGHBOURS)
        lost = await stage.value(
            "SELECT count(DISTINCT job_id) FROM aioqueue.attempt WHERE job_id = ANY (%s) AND reason = 'worker lost'",
            [neighbour.id for _, neighbour in ordered],
        )
        self._screen.fact(f"{lost} of the neighbours ran in a process that was killed, and were run again by another worker")

    async def _stop(self) -> None:
        self._screen.step("Stop the workers (SIGTERM)", "a worker that stops lets its jobs end; nothing stays running")
        most = max(phase.connections for phase in self._stage.sampler.phases)
        wanted = f"at most {WORKERS * CONNECTIONS}: a pool of 4, a listener and a guard for each of {WORKERS} workers"
        self._stage.check(f"the most connections seen ({wanted})", most, wanted, ok=0 < most <= WORKERS * CONNECTIONS)
        # One that was started again a moment ago may not know what to do at a signal yet.
        ready = "SELECT count(*) = %s FROM aioqueue.worker w WHERE NOT w.dead AND w.pid = ANY (%s)"
        while not await self._stage.value(ready, WORKERS, self._workers.pids):  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.05)
        self._workers.stop()
        await self._work
        self._stage.check("exit codes", self._workers.exits, [0] * WORKERS)
        left = await self._stage.value(
            "SELECT count(*) FROM aioqueue.job j WHERE j.queue = %s AND NOT EXISTS"
            " (SELECT FROM aioqueue.outcome o WHERE o.job_id = j.id)",
            QUEUE,
        )
        self._stage.check("jobs without an outcome", left, 0)

    async def _read_tenants(self) -> None:
        observer = self._stage.observer
        cursor = await observer.execute(
            "SELECT id, invoices, cents, runs, sent FROM demo.orders WHERE id = ANY (%s)", (list(self._orders.values()),)
        )
        orders = {row[0]: row[1:] for row in await cursor.fetchall()}
        cursor = await observer.execute(
            "SELECT id, attempt, extract(epoch FROM finished_at - started_at)::float * 1000,"
            " extract(epoch FROM started_at - created_at)::float * 1000 FROM aioqueue.jobs WHERE id = ANY (%s)",
            ([job.id for job in self._jobs.values()],),
        )
        jobs = {row[0]: row[1:] for row in await cursor.fetchall()}
        for tenant, order in self._orders.items():
            wanted = expected(tenant, self._largest)
            invoices, cents, runs, sent = orders[order]
            attempts, ran, waited = jobs[self._jobs[tenant].id]
            self._report.tenants.append(
                TenantRow(tenant, wanted.invoices, invoices or 0, cents == wanted.cents, attempts, runs, sent, ran, waited)
            )
        self._stage.check("tenants whose line in the table is right", sum(row.ok for row in self._report.tenants), TENANTS)
