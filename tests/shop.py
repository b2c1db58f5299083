"""A small application for the tests of tenants: tables that policies isolate, and a probe of all that a job can see.

Its fixtures are the suite's (conftest.py).
"""

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import tuple_row

from aioqueue import AioQueue, JobTransaction
from tests.kit import Bench, bench, session
from tests.postgres import Database
from tests.sql.engine import Session

SHOP = """
    CREATE SCHEMA shop;
    CREATE TABLE shop.note (
        id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text NOT NULL DEFAULT current_setting('app.tenant'), body text
    );
    ALTER TABLE shop.note ENABLE ROW LEVEL SECURITY;
    ALTER TABLE shop.note FORCE ROW LEVEL SECURITY;
    CREATE POLICY own_tenant ON shop.note
        USING (tenant = current_setting('app.tenant')) WITH CHECK (tenant = current_setting('app.tenant'));
    CREATE TABLE shop.parent (id integer PRIMARY KEY);
    CREATE TABLE shop.child (parent integer REFERENCES shop.parent DEFERRABLE INITIALLY DEFERRED);
    GRANT USAGE ON SCHEMA shop TO aioqueue_worker;
    GRANT ALL ON ALL TABLES IN SCHEMA shop TO aioqueue_worker;
"""


@pytest.fixture
async def shop(database: Database, schema: str) -> AsyncIterator[Session]:
    """The application's own tables, isolated by tenant; a session that sees through the isolation."""
    async with session(database.dsn("superuser"), schema) as boss:
        await boss.conn.execute("SET ROLE aioqueue_owner")
        await boss.conn.execute(SHOP)
        await boss.conn.execute("RESET ROLE")
        yield boss
        await boss.conn.execute("DROP SCHEMA shop CASCADE")


@pytest.fixture
async def at(shop: Session, worker_dsn: str) -> AsyncIterator[Bench]:
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema)) as made:
        yield made


async def write(tx: JobTransaction, body: str) -> None:
    await tx.execute("INSERT INTO shop.note (body) VALUES (%s)", [body])


async def notes(shop: Session) -> list[tuple[str, str]]:
    return [(a, b) for a, b in await shop.rows("SELECT tenant, body FROM shop.note ORDER BY id")]


def add_probe(at: Bench) -> dict[str, Any]:
    """A task `probe` that fills the returned dict with all that a job can see of its session."""
    found: dict[str, Any] = {}

    async def probe(tx: JobTransaction) -> None:
        conn = tx.connection
        found.clear()
        found.update(
            pid=conn.info.backend_pid,
            rows=await tx.fetch_all("SELECT tenant, body FROM shop.note"),
            row=await tx.fetch_one("SELECT 1"),
            tenant=await tx.fetch_value("SELECT current_setting('app.tenant')"),
            user=await tx.fetch_one("SELECT session_user::text, current_user::text"),
            path=await tx.fetch_value("SHOW search_path"),
            settings=await tx.fetch_all(
                "SELECT name, setting FROM pg_settings WHERE source = 'session'"
                " AND name NOT LIKE '%timeout' AND name <> 'row_security'"
            ),
            zone=await tx.fetch_value("SHOW TimeZone"),
            statement_timeout=await tx.fetch_value("SHOW statement_timeout"),
            security=await tx.fetch_value("SHOW row_security"),
            own_setting=await tx.fetch_value("SELECT current_setting('own.secret', true)"),
            temporary=await tx.fetch_all("SELECT relname::text FROM pg_class WHERE relnamespace = pg_my_temp_schema()"),
            locks=await tx.fetch_all("SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"),
            channels=await tx.fetch_all("SELECT pg_listening_channels()"),
            cursors=await tx.fetch_all("SELECT name FROM pg_cursors WHERE is_holdable"),
            read_only=await tx.fetch_value("SHOW transaction_read_only"),
            text=await tx.fetch_value("SELECT %s::text", ["text"]),
            row_factory=conn.row_factory,
            cursor_factory=conn.cursor_factory,
            handlers=len(conn._notice_handlers) + len(conn._notify_handlers),
            pipeline=conn.pgconn.pipeline_status,
            modes=(conn.autocommit, conn.isolation_level, conn.read_only, conn.deferrable),
            prepare=conn.prepare_threshold,
        )

    at.tasks.task(name="probe")(probe)
    return found


async def assert_clean(at: Bench, found: dict[str, Any], tenant: str = "next") -> None:
    """Run the probe for a tenant that has no rows, twice, since the pool may hand out its connections in turn."""
    for _ in range(2):
        assert await at.run("probe", tenant=tenant) is None, at.outcomes
        assert await at.state(at.settled_jobs[-1]) == "succeeded"
        pid = found.pop("pid")
        cursor_factory = found.pop("cursor_factory")
        assert found == {
            "rows": [],
            "row": (1,),
            "tenant": tenant,
            "user": ("aioqueue_worker", "aioqueue_worker"),
            "path": '"$user", public',
            "settings": [],
            "zone": found["zone"],
            "statement_timeout": "30s",
            "security": "on",
            "own_setting": found["own_setting"],
            "temporary": [],
            "locks": [],
            "channels": [],
            "cursors": [],
            "read_only": "off",
            "text": "text",
            "row_factory": tuple_row,
            "handlers": 0,
            "pipeline": 0,
            "modes": (True, None, None, None),
            "prepare": 1,
        }
        assert found["own_setting"] in (None, "")
        assert cursor_factory is psycopg.AsyncCursor
        assert found["zone"] != "Asia/Tokyo"
        found["pid"] = pid
