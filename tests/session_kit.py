"""What the tests of a job's AsyncSession share: an engine with one connection, a mapped table, a probe of what a job can see."""

from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from aioqueue.contrib.sqlalchemy import JobSession
from tests.kit import Bench

# What asyncpg does otherwise than psycopg is the same on every version.
DRIVERS = ["psycopg", pytest.param("asyncpg", marks=pytest.mark.once)]


class Base(DeclarativeBase):
    pass


class Note(Base):
    """A row of the shop's (tests/shop.py)."""

    __tablename__ = "note"
    __table_args__ = {"schema": "shop"}  # noqa: RUF012 - SQLAlchemy's own form
    id: Mapped[int] = mapped_column(sqlalchemy.Identity(always=True), primary_key=True)
    tenant: Mapped[str] = mapped_column(server_default=text("current_setting('app.tenant')"))
    body: Mapped[str]


def make_engine(dsn: str, driver: str, **options: Any) -> AsyncEngine:
    """An engine whose pool has one connection, so that what a job leaves behind, whoever has it next would find."""
    url = sqlalchemy.make_url(dsn).set(drivername=f"postgresql+{driver}")
    return create_async_engine(url, **{"pool_size": 1, "max_overflow": 0, "pool_timeout": 5} | options)


async def write(session: AsyncSession, body: str) -> None:
    await session.execute(text("INSERT INTO shop.note (body) VALUES (:body)"), {"body": body})


SEEN = {
    "pid": "pg_backend_pid()",
    "user": "session_user || ' ' || current_user",
    "path": "current_setting('search_path')",
    "settings": "ARRAY(SELECT name || '=' || setting FROM pg_settings WHERE source = 'session' AND name NOT LIKE '%timeout'"
    " AND name NOT IN ('row_security', 'client_connection_check_interval', 'transaction_isolation', 'transaction_read_only',"
    " 'transaction_deferrable'))",
    "own": "coalesce(current_setting('own.secret', true), '')",
    "temporary": "ARRAY(SELECT relname::text FROM pg_class WHERE relnamespace = pg_my_temp_schema())",
    "locks": "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())",
    "channels": "ARRAY(SELECT pg_listening_channels())",
    "cursors": "(SELECT count(*) FROM pg_cursors WHERE is_holdable)",
    "prepared": "(SELECT count(*) FROM pg_prepared_statements WHERE from_sql)",
    "read_only": "current_setting('transaction_read_only')",
}
LOOK = text("SELECT " + ", ".join(f"{what} AS {name}" for name, what in SEEN.items()).replace(":", "\\:"))


def add_probe(at: Bench) -> dict[str, Any]:
    """A task `probe` that fills the returned dict with what a job sees of its session."""
    found: dict[str, Any] = {}

    async def probe(session: JobSession) -> None:
        found.clear()
        found.update((await session.execute(LOOK)).mappings().one())
        found["tenant"] = await session.scalar(text("SELECT current_setting('app.tenant')"))
        assert not await session.scalar(text("SELECT count(*) FROM shop.note"))

    at.tasks.task(name="probe")(probe)
    return found


CLEAN: dict[str, Any] = {
    "user": "aioqueue_worker aioqueue_worker",
    "path": '"$user", public',
    "settings": [],
    "own": "",
    "temporary": [],
    "locks": 0,
    "channels": [],
    "cursors": 0,
    "prepared": 0,
    "read_only": "off",
}


async def assert_clean(at: Bench, found: dict[str, Any], engine: AsyncEngine, **other: Any) -> int:
    """What the application finds on the pool's connection, then what the next job does; the server's process."""
    async with engine.connect() as conn:
        seen = dict((await conn.execute(LOOK)).mappings().one())
        assert await conn.scalar(text("SELECT coalesce(current_setting('app.tenant', true), '')")) == ""
    pid = int(seen.pop("pid"))
    assert seen == CLEAN | other
    assert await at.run("probe", tenant="next") is None, at.outcomes
    assert found.pop("tenant") == "next"
    assert found.pop("pid") == pid
    assert found == CLEAN | other
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return pid
