"""Pool of one connection, jobs for tenants 1, 2, 3, the tenant set for the session: who sees whose invoices afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg_pool import AsyncConnectionPool

from aioqueue import AioQueue, JobTransaction, PoolSettings, Retry, WorkerSettings
from aioqueue.demo.data import LARGEST, make_tables
from aioqueue.errors import AioQueueError

from .stage import Place, Stage, Verdict, value

TITLE = "tenant left on a pooled connection"
PUBLISHED = "session setting leaks 20,000 rows after success, none after failure; autocommit leaks both; local never"
COUNT = "SELECT count(*) FROM demo.invoices"
LOOK_AGAIN = "GRANT reporter TO aioqueue_worker"


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    await make_tables(place.dsn("owner"))
    seen = {
        (form, ending): await _naive(place, form, fails=ending == "failure")
        for form in ("session", "autocommit", "local")
        for ending in ("success", "failure")
    }
    verdict.naive = "; ".join(f"{form}, {ending}: {max(rows):,} rows" for (form, ending), rows in seen.items())
    expected = [LARGEST // tenant for tenant in (1, 2, 3)]
    for form, ending, rows in (
        ("session", "success", expected), ("session", "failure", [0, 0, 0]), ("autocommit", "success", expected),
        ("autocommit", "failure", expected), ("local", "success", [0, 0, 0]), ("local", "failure", [0, 0, 0]),
    ):  # fmt: skip
        verdict.published(seen[form, ending] == rows, f"{form}, {ending}")
    await _ours(place, verdict)
    return verdict


async def _naive(place: Place, form: str, *, fails: bool) -> list[int]:
    """Rows that the next user of the connection sees with nothing set, after each of three jobs."""
    found = []
    options = {"autocommit": form == "autocommit"}
    async with AsyncConnectionPool(place.dsn("worker"), min_size=1, max_size=1, kwargs=options, open=False) as pool:
        for tenant in (1, 2, 3):
            with contextlib.suppress(ZeroDivisionError):
                async with pool.connection() as conn:
                    await conn.execute("SELECT set_config('app.tenant', %s, %s)", [str(tenant), form == "local"])
                    await value(conn, COUNT)
                    if fails:
                        raise ZeroDivisionError
            async with pool.connection() as conn:
                found.append(int(await value(conn, COUNT)))
    return found


async def _ours(place: Place, verdict: Verdict) -> None:
    async with place.connection() as boss:
        await boss.execute("DO $$ BEGIN CREATE ROLE reporter; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
        await boss.execute("GRANT reporter TO aioqueue_worker")
    app = AioQueue(place.dsn("worker"), pool=PoolSettings(size=3, min_size=3), worker=WorkerSettings(poll=0.05))
    began = asyncio.Event()
    seen: dict[str, list[int]] = {}

    def sql_task(*statements: str) -> Callable[[JobTransaction], Awaitable[None]]:
        async def act(tx: JobTransaction) -> None:
            for statement in statements:
                await tx.execute(sql.SQL(statement))  # type: ignore[arg-type]

        return act

    async def wait(tx: JobTransaction) -> None:
        began.set()
        await asyncio.Event().wait()

    acts: dict[str, Callable[[JobTransaction], Awaitable[None]]] = {
        "success": sql_task(),
        "failure": sql_task("SELECT 1 / 0"),
        "time-out": sql_task("SELECT pg_sleep(60)"),
        "cancel": wait,
        "sets the session": sql_task("SELECT set_config('app.tenant', '1', false)"),
        "commits": sql_task("SELECT set_config('app.tenant', '1', false)", "COMMIT"),
        "changes role": sql_task("SET ROLE reporter"),
        "search_path and a temporary table": sql_task("SET search_path = demo"),
    }

    def make(act: Callable[[JobTransaction], Awaitable[None]]) -> Callable[..., Awaitable[int]]:
        async def counts(tx: JobTransaction) -> int:
            found = int(await tx.fetch_value(COUNT))
            await act(tx)
            return found

        return counts

    @app.task(name="look")
    async def look(tx: JobTransaction) -> int:
        return int(await tx.fetch_value(COUNT))

    tasks: dict[str, Any] = {
        name: app.task(name=name, retry=Retry(max_attempts=1), timeout=0.3 if name == "time-out" else 30)(make(act))
        for name, act in acts.items()
    }
    async with app, app.worker():
        for name, task in tasks.items():
            seen[name] = []
            for tenant in (1, 2, 3):
                began.clear()
                job = await task.options(tenant=str(tenant)).enqueue()
                if name == "cancel":
                    await began.wait()
                    await job.cancel()
                try:
                    verdict.promise(
                        await job.result(timeout=30) == LARGEST // tenant, f"{name}: tenant {tenant} sees its own rows"
                    )
                except AioQueueError as error:
                    verdict.promise(name not in ("success", "search_path and a temporary table"), f"{name}: {error}")
                seen[name] += [await (await look.enqueue()).result(timeout=30), *(await _visible(app))]
    worst = {name: max(rows) for name, rows in seen.items()}
    verdict.promise(not any(worst.values()), f"rows of others seen afterwards: {worst}")
    verdict.ours = f"{max(worst.values())} rows after each of {len(worst)} endings ({', '.join(worst)}), on every connection"


async def _visible(app: AioQueue) -> list[int]:
    """Rows seen with nothing set, on each connection of the pool."""
    async with contextlib.AsyncExitStack() as stack:
        conns: list[AsyncConnection[Any]] = [await stack.enter_async_context(app.database.runtime()) for _ in range(3)]
        found = []
        for conn in conns:
            async with conn.transaction():
                await conn.execute("SET LOCAL row_security = on")
                found.append(int(await value(conn, COUNT)))
        return found
