"""What the rows share: a PostgreSQL of their own, databases with the queue and the naive tables in them, and a row's verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from aioqueue import embedded, migrate
from aioqueue.embedded import EmbeddedServer

PATIENCE = 90.0
"""Seconds after which a wait is given up: the row is not kept then."""
OWNER = "aioqueue_owner"

TRUSTED = "host all aioqueue_worker,aioqueue_client 127.0.0.1/32 trust\nhost all aioqueue_worker 10.231.0.0/16 trust\n"

NAIVE = """
CREATE SCHEMA naive;
CREATE TABLE naive.job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, work text NOT NULL DEFAULT 'SELECT 1',
    state text NOT NULL DEFAULT 'queued', attempts integer NOT NULL DEFAULT 0, worker text, lease_until timestamptz, error text
) WITH (autovacuum_enabled = false);
CREATE INDEX job_queued ON naive.job (id) WHERE state = 'queued';
CREATE TABLE naive.trace (
    job text NOT NULL, worker text NOT NULL, what text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE naive.effect (job text NOT NULL, worker text NOT NULL);
GRANT USAGE ON SCHEMA naive TO aioqueue_worker, aioqueue_client;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA naive TO aioqueue_worker;
"""


@dataclass
class Verdict:
    """What one row showed. `kept` is about aioqueue alone; whether the naive form did as published is said beside it."""

    naive: str = ""
    ours: str = ""
    broken: list[str] = field(default_factory=list)
    """What aioqueue promises, and did not keep in this run."""
    unlike: list[str] = field(default_factory=list)
    """Where the naive form did not do as published."""
    waiting: str = ""
    """Why the row, or a part of it, is not shown yet."""

    def promise(self, holds: bool, what: str) -> None:
        """Take note of a promise that aioqueue keeps, or not."""
        if not holds:
            self.broken.append(what)

    def published(self, holds: bool, what: str) -> None:
        """Take note whether the naive form did as published."""
        if not holds:
            self.unlike.append(what)


@dataclass(frozen=True)
class Place:
    """One database with the queue's schema, the naive tables, and rights for the worker's role."""

    server: EmbeddedServer
    name: str
    port: int

    def dsn(self, role: str) -> str:
        """The URI for owner, worker, client or superuser, by the server's socket."""
        return self.server.dsn(role, self.name)  # type: ignore[arg-type]

    def tcp(self, role: str, port: int | None = None, host: str = "127.0.0.1") -> str:
        """The same by TCP, or through a proxy on another port."""
        return f"postgresql://aioqueue_{role}@{host}:{port or self.port}/{self.name}"

    @contextlib.asynccontextmanager
    async def connection(self, role: str = "superuser") -> AsyncIterator[AsyncConnection[Any]]:
        """A connection in autocommit."""
        conn = await AsyncConnection.connect(self.dsn(role), autocommit=True)
        try:
            yield conn
        finally:
            await conn.close()


@dataclass
class Stage:
    """The server, and whether the rows run at the published size."""

    server: EmbeddedServer
    port: int
    full: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def size(self, reduced: int, published: int) -> int:
        """How many, or how long, at this run's size."""
        return published if self.full else reduced

    async def place(self) -> Place:
        """Make a database with all that a row needs."""
        place = Place(self.server, f"published_{next(self.numbers)}", self.port)
        async with await AsyncConnection.connect(self.server.dsn("superuser", "postgres"), autocommit=True) as boss:
            name = sql.Identifier(place.name)
            await boss.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(name, sql.Identifier(OWNER)))
            await boss.execute(sql.SQL("REVOKE TEMPORARY ON DATABASE {} FROM PUBLIC").format(name))
        await migrate.migrate(place.dsn("owner"))
        for role in ("worker", "client"):
            await migrate.grant(place.dsn("owner"), role=f"aioqueue_{role}", kind=role)  # type: ignore[arg-type]
        async with place.connection("owner") as owner:
            await owner.execute(NAIVE.encode())
        return place


@contextlib.contextmanager
def stage(*, full: bool = False) -> Iterator[Stage]:
    """A temporary server with PostgreSQL's own defaults, max_connections of 100 among them, on a socket and on TCP."""
    with tempfile.TemporaryDirectory(prefix="aioqueue-published-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o711)  # noqa: S103 - as root the server is another user, who must get through
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        settings = {"listen_addresses": "*", "port": str(port), "max_connections": "100", "max_wal_size": "4GB"}
        with embedded.start(Path(home) / "server", settings=settings) as server:
            with psycopg.connect(server.dsn("superuser", "postgres"), autocommit=True) as boss:
                row = boss.execute("SHOW hba_file").fetchone()
                assert row is not None
                rules = Path(row[0])
                rules.write_text(TRUSTED + rules.read_text())
                boss.execute("SELECT pg_reload_conf()")
            yield Stage(server, port, full)


async def value(conn: AsyncConnection[Any], query: str, *params: object) -> Any:
    """The first value of a query's first row."""
    row = await (await conn.execute(query.encode(), params)).fetchone()
    return None if row is None else row[0]


async def until(condition: Callable[[], Awaitable[object]], *, seconds: float = PATIENCE, pause: float = 0.02) -> bool:
    """Wait until it holds; whether it did in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110 - what is waited for happens in another process
                await asyncio.sleep(pause)
            return True
    return False


async def vacuum(boss: AsyncConnection[Any], table: str) -> int:
    """VACUUM VERBOSE; the dead rows that it may not remove yet."""
    said: list[str] = []
    listener = said.append
    boss.add_notice_handler(lambda notice: listener(notice.message_primary or ""))
    await boss.execute(f"VACUUM (VERBOSE) {table}".encode())
    found = re.findall(r"(\d+) are dead but not yet removable", "\n".join(said))
    return sum(map(int, found))


async def least_vacuum(boss: AsyncConnection[Any], table: str, tries: int = 20) -> int:
    """The least of some VACUUMs: one that begins during a worker's short transaction is held back by that."""
    left = await vacuum(boss, table)
    for _ in range(tries):
        if not left:
            break
        await asyncio.sleep(0.05)
        left = await vacuum(boss, table)
    return left
