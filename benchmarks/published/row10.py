"""Business row and job row in one transaction: roll back, commit, crash between, on each driver."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import psycopg

from aioqueue import AioQueue

from .stage import Place, Stage, Verdict, value

TITLE = "business row and job in one transaction"
PUBLISHED = "both or neither"
INSERT = "INSERT INTO naive.effect (job, worker) VALUES ('order', '{}')"
ENDINGS = ("rollback", "commit", "crash")


class Crash(Exception):
    """The process dies here: its connection is cut from the server's side."""


Open = Callable[[str], AbstractAsyncContextManager[tuple[Any, Callable[[str], Any]]]]


@asynccontextmanager
async def _psycopg(dsn: str) -> AsyncIterator[tuple[Any, Callable[[str], Any]]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn, conn.transaction():
        yield conn, lambda text: conn.execute(text.encode())


@asynccontextmanager
async def _asyncpg(dsn: str) -> AsyncIterator[tuple[Any, Callable[[str], Any]]]:
    asyncpg = __import__("asyncpg")
    conn = await asyncpg.connect(dsn)
    try:
        async with conn.transaction():
            yield conn, conn.execute
    finally:
        with contextlib.suppress(Exception):
            await conn.close(timeout=2)


def _sqlalchemy(driver: str) -> Open:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[tuple[Any, Callable[[str], Any]]]:
        sqlalchemy = __import__("sqlalchemy.ext.asyncio")
        engine = sqlalchemy.ext.asyncio.create_async_engine(dsn.replace("postgresql://", f"postgresql+{driver}://"))
        try:
            async with sqlalchemy.ext.asyncio.AsyncSession(engine) as session, session.begin():
                yield session, lambda text: session.execute(sqlalchemy.text(text))
        finally:
            await engine.dispose()

    return opened


DRIVERS: dict[str, tuple[tuple[str, ...], Open]] = {
    "psycopg": (("psycopg",), _psycopg),
    "asyncpg": (("asyncpg",), _asyncpg),
    "SQLAlchemy on psycopg": (("sqlalchemy", "psycopg"), _sqlalchemy("psycopg")),
    "SQLAlchemy on asyncpg": (("sqlalchemy", "asyncpg"), _sqlalchemy("asyncpg")),
}


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    place = await stage.place()
    app = AioQueue(place.dsn("worker"))

    @app.task(name="mail")
    async def mail() -> None:
        pass

    async with place.connection() as boss, app:
        with contextlib.suppress(Crash):
            await _in_two_transactions(place, mail)
        rows, jobs = await _count(boss, "two")
        verdict.naive = f"in two transactions, a crash between: {rows} row, {jobs} jobs"
        verdict.published((rows, jobs) == (1, 0), "a crash between two transactions loses the job")
        said = []
        for driver, (modules, opened) in DRIVERS.items():
            if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
                verdict.waiting = f"needs {', '.join(missing)}: pip install -e '.[dev]'"
                continue
            for ending in ENDINGS:
                name = f"{driver}, {ending}"
                with contextlib.suppress(Exception):
                    await _once(place, mail, opened, name, ending)
                found = await _count(boss, name)
                expected = (1, 1) if ending == "commit" else (0, 0)
                verdict.promise(found == expected, f"{name}: {found[0]} rows, {found[1]} jobs")
            said.append(driver)
    verdict.ours = f"both after COMMIT, neither after ROLLBACK or a crash: {', '.join(said)}"
    return verdict


async def _in_two_transactions(place: Place, mail: Any) -> None:
    async with place.connection("worker") as conn:
        await conn.execute(INSERT.format("two").encode())
        raise Crash
    await mail.options(tenant="two").enqueue()


async def _once(place: Place, mail: Any, opened: Open, name: str, ending: str) -> None:
    """One transaction with both; the error with which it ends is nobody's concern."""
    async with opened(place.tcp("worker")) as (conn, execute):
        await execute(INSERT.format(name))
        await mail.options(tenant=name, on=conn).enqueue()
        if ending == "rollback":
            raise Crash
        if ending == "crash":
            async with place.connection() as boss:
                await boss.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND state = 'idle in transaction'"
                )


async def _count(boss: Any, name: str) -> tuple[int, int]:
    rows = await value(boss, "SELECT count(*) FROM naive.effect WHERE worker = %s", name)
    return rows, await value(boss, "SELECT count(*) FROM aioqueue.job WHERE tenant = %s", name)
