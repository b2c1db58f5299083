"""What the trials share: a server of their own, databases on it, worker processes, the table at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import TupleRow

from aioqueue import embedded, migrate
from aioqueue.embedded import EmbeddedServer, Role
from aioqueue.embedded_cluster import OWNER

ROOT = Path(__file__).parents[2]
SETTINGS = {"fsync": "off", "max_connections": "300", "shared_buffers": "128MB", "max_wal_size": "4GB"}
START_SECONDS = 120.0


@dataclass
class Verdict:
    """What a trial found: rows of a table, and what was wrong."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def row(self, what: str, value: object) -> None:
        """Add a line to the table."""
        self.rows.append((what, str(value)))

    def check(self, holds: bool, what: str) -> None:
        """Something must hold."""
        if not holds:
            self.faults.append(what)

    def print(self, title: str) -> None:
        """Print the table."""
        width = max((len(what) for what, _ in self.rows), default=0)
        print(f"{title}:")
        for what, value in self.rows:
            print(f"  {what:{width}}  {value}")
        for fault in self.faults[:10]:
            print(f"  FAULT {fault}")
        print("  every check held" if not self.faults else f"  FAILED: {len(self.faults)} faults", flush=True)


class Place:
    """One database with a migrated schema."""

    def __init__(self, server: EmbeddedServer, name: str) -> None:
        self._server = server
        self._name = name

    def dsn(self, role: Role) -> str:
        """The URI for a role."""
        return self._server.dsn(role, self._name)

    @contextlib.asynccontextmanager
    async def watcher(self) -> AsyncIterator[AsyncConnection[TupleRow]]:
        """A connection of the superuser, under a name that no library of ours has."""
        async with await AsyncConnection.connect(
            self.dsn("superuser"), autocommit=True, application_name="endurance-watch"
        ) as conn:
            yield conn

    async def enqueue(self, task: str, payloads: Iterable[object], *, queue: str = "default", max_attempts: int = 3) -> None:
        """Enqueue jobs of a task, as a client."""
        options = {"task": task, "queue": queue, "max_attempts": max_attempts}
        jobs = json.dumps([{**options, "payload": payload} for payload in payloads])
        async with await AsyncConnection.connect(self.dsn("client"), autocommit=True) as conn:
            await conn.execute("SELECT aioqueue.enqueue_many(%s::jsonb)", [jobs])

    async def rows(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        """Rows of one query of the superuser."""
        async with self.watcher() as conn:
            return await (await conn.execute(query.encode(), params or None)).fetchall()

    async def until(self, condition: str, *params: object, seconds: float) -> bool:
        """Wait until a condition of the database holds; whether it did in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.watcher() as conn:
                while True:
                    row = await (await conn.execute(f"SELECT {condition}".encode(), params or None)).fetchone()
                    if row and row[0]:
                        return True
                    await asyncio.sleep(0.05)
        return False


class Bench:
    """The server and a directory for logs; databases are made as they are asked for."""

    def __init__(self, server: EmbeddedServer, directory: Path) -> None:
        self._server = server
        self.directory = directory

    async def place(self, name: str) -> Place:
        """Make a database with a migrated schema."""
        async with await AsyncConnection.connect(self._server.dsn("superuser", "postgres"), autocommit=True) as conn:
            await conn.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(name), sql.Identifier(OWNER)))
        place = Place(self._server, name)
        await migrate.migrate(place.dsn("owner"))
        await migrate.grant(place.dsn("owner"), role="aioqueue_worker", kind="worker")
        await migrate.grant(place.dsn("owner"), role="aioqueue_client", kind="client")
        async with await AsyncConnection.connect(place.dsn("owner"), autocommit=True) as conn:
            await conn.execute("CREATE SCHEMA trial CREATE TABLE note (job_id uuid NOT NULL)")
            await conn.execute("GRANT USAGE ON SCHEMA trial TO aioqueue_worker")
            await conn.execute("GRANT INSERT, SELECT ON trial.note TO aioqueue_worker")
        return place

    @contextlib.contextmanager
    def worker(self, place: Place, name: str, *options: str) -> Iterator[Process]:
        """A worker process, which does not outlive the block."""
        process = Process(self.directory / name, place.dsn("worker"), options)
        try:
            yield process
        finally:
            process.kill()


class Process:
    """One worker process with its log and its diary (see tasks.py)."""

    def __init__(self, stem: Path, dsn: str, options: tuple[str, ...]) -> None:
        self.log, self.diary = stem.with_suffix(".log"), stem.with_suffix(".diary")
        self.diary.touch()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_"))}
        environ |= {"AIOQUEUE_DSN": dsn, "ENDURANCE_DIARY": str(self.diary), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "aioqueue", "worker", "-A", "benchmarks.endurance_trials.tasks:app", *options]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether it is no more."""
        return self.process.poll() is not None

    async def wait_ready(self) -> None:
        """Wait until it serves."""
        await self.wait(lambda: " serves " in self.log.read_text(errors="replace"))

    async def wait(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait for a condition of its files. Raises TimeoutError, and RuntimeError when it has ended before."""
        async with asyncio.timeout(seconds):
            while not condition():
                if self.ended:
                    raise RuntimeError(f"a worker has ended with {self.process.returncode}: see {self.log}")
                await asyncio.sleep(0.02)

    def notes(self, word: str) -> list[list[str]]:
        """The lines of its diary that begin with a word, without it."""
        lines = [line.split() for line in self.diary.read_text().splitlines()]
        return [line[1:] for line in lines if line[:1] == [word]]

    async def stop(self) -> int:
        """SIGTERM it and wait for its end; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 90)

    def kill(self) -> None:
        """SIGKILL it, if it still is, and wait for its end."""
        if not self.ended:
            self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A server in a temporary directory, which goes with it; logs stay."""
    with tempfile.TemporaryDirectory(prefix="aioqueue-endurance-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o711)  # noqa: S103 - as root the server is another user, who must get through
        logs = Path(tempfile.mkdtemp(prefix="aioqueue-endurance-logs-"))
        with embedded.start(Path(home) / "server", settings=SETTINGS) as server:
            yield Bench(server, logs)
