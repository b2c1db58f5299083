"""The databases of one run of tests: a template made once, copies of it, and none of them left behind.

Needs no pytest; it blocks. Every process of the run holds a shared advisory lock for as long as it lives, however it ends. Who
gets the lock of another run alone finds that run dead, and drops what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count

import psycopg
from psycopg import Connection, sql
from psycopg.errors import InsufficientPrivilege

from aioqueue import migrate
from aioqueue.settings import DEFAULT_SCHEMA

from .dsns import as_role, of_login, with_database

PREFIX = "aioqueue_test_"
STRATEGY = "FILE_COPY"
"""How the server copies the template, a thousand small files: it takes a little less than WAL_LOG does, and writes no WAL."""

MakeTables = Callable[[str], Awaitable[object] | object]
"""Makes the application's own tables in the template, whose DSN it is given."""


@dataclass(frozen=True, slots=True)
class Database:
    """One database of a test. `dsn` connects as the role that tests have unless they ask for another."""

    name: str
    dsn: str
    owner_dsn: str
    """As the owner of the database and of aioqueue's schema."""
    logins: bool
    """Whether every role may log in without a password, as on the embedded server."""

    def as_role(self, role: str) -> str:
        """Return the DSN of another role.

        On the embedded server that role logs in; on another one the role of `aioqueue_dsn` takes it at the start (SET ROLE).
        """
        return of_login(self.owner_dsn, role) if self.logins else as_role(self.owner_dsn, role)


@dataclass(slots=True)
class Timings:
    """Seconds, one for each database of a test."""

    created: list[float] = field(default_factory=list)
    """What CREATE DATABASE took, and what belongs to it."""
    waited: list[float] = field(default_factory=list)
    """What of it the test waited for: the next one is made while a test runs."""


class Databases:
    """The databases of one process of one run; a context manager.

    `dsn` leads to a database of the server that is only connected to (`postgres`, say), as a role that may create databases.
    `owner`: the role that owns what is created (None: that of the DSN). `role`: what tests connect as (None: the owner). `run`
    is the same in all processes of one run (pytest-xdist) and in no other; `process` tells these apart.
    """

    def __init__(
        self,
        dsn: str,
        *,
        run: str,
        process: str = "main",
        schema: str = DEFAULT_SCHEMA,
        owner: str | None = None,
        role: str | None = None,
        logins: bool = False,
        tables: MakeTables | None = None,
    ) -> None:
        if not re.fullmatch(r"[0-9a-f]{8}", run) or not re.fullmatch(r"[a-z0-9]{1,10}", process):
            raise ValueError(f"expected a run of 8 hexadecimal digits and a short process name, got {run!r} and {process!r}")
        self._dsn = dsn
        self._run = run
        self._process = process
        self._schema = schema
        self._owner = owner
        self._role = role
        self._logins = logins
        self._tables = tables
        self._numbers = count(1)
        self._made = False
        """Whether the template is there, for as long as this process holds the run's lock."""
        self._guard: Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aioqueue test databases")
        self._spare: Future[Database] | None = None
        self.timings = Timings()

    def __enter__(self) -> Databases:
        self._guard = self._connect()
        self._guard.execute("SELECT pg_advisory_lock_shared(hashtextextended(%s, 0))", [PREFIX + self._run])
        self._drop_stale()
        return self

    def __exit__(self, *_: object) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(psycopg.Error):
                self.give_back(spare.result())
        self._thread.shutdown(wait=True)
        guard, self._guard = self._guard, None
        if guard is None:
            return
        with guard:
            guard.execute("SELECT pg_advisory_unlock_shared(hashtextextended(%s, 0))", [PREFIX + self._run])
            self._drop_run(guard, self._run)

    def template(self) -> str:
        """Return the name of the template, making it unless a process of the run has: migrated, with the application's tables."""
        name = PREFIX + self._run
        if self._made:
            return name
        with self._connect() as conn:
            # Until the connection is closed: whoever comes second finds it ready.
            conn.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [f"{name} template"])
            if conn.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is None:
                unfinished = f"{name}_new"
                self._drop(conn, unfinished)
                self._create(conn, unfinished, sql.SQL(""))
                made = self._database(unfinished)
                _await(migrate.migrate(made.owner_dsn, schema=self._schema))
                if self._logins:
                    for kind in ("worker", "client"):
                        _await(migrate.grant(made.owner_dsn, role=f"aioqueue_{kind}", schema=self._schema, kind=kind))
                if self._tables is not None:
                    done = self._tables(made.owner_dsn)
                    if inspect.isawaitable(done):
                        _await(done)
                # What the tables' maker has left open (an engine's pool) would hold it up, and every copy after it.
                conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [unfinished])
                conn.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(unfinished), sql.Identifier(name)))
        self._made = True
        return name

    def take(self) -> Database:
        """Return a copy of the template. The next one is made at once, in a thread, so that whoever takes it need not wait."""
        began = time.perf_counter()
        ready = self._spare if self._spare is not None else self._thread.submit(self._copy)
        database = ready.result()
        self.timings.waited.append(time.perf_counter() - began)
        self._spare = self._thread.submit(self._copy)
        return database

    def give_back(self, database: Database) -> None:
        """Drop the database soon, ending the sessions in it."""
        self._thread.submit(self._drop_one, database.name)

    def _copy(self) -> Database:
        template = self.template()
        name = f"{PREFIX}{self._run}_{self._process}_{next(self._numbers)}"
        began = time.perf_counter()
        with self._connect() as conn:
            self._create(conn, name, sql.SQL("TEMPLATE {} STRATEGY {}").format(sql.Identifier(template), sql.SQL(STRATEGY)))
        self.timings.created.append(time.perf_counter() - began)
        return self._database(name)

    def _database(self, name: str) -> Database:
        dsn = owner = with_database(self._dsn, name)
        if self._owner is not None:
            owner = of_login(dsn, self._owner) if self._logins else as_role(dsn, self._owner)
        made = Database(name, owner, owner, self._logins)
        return made if self._role is None else Database(name, made.as_role(self._role), owner, self._logins)

    def _create(self, conn: Connection, name: str, how: sql.Composable) -> None:
        owner = sql.SQL("OWNER {}").format(sql.Identifier(self._owner)) if self._owner else sql.SQL("")
        conn.execute(sql.SQL("CREATE DATABASE {} {} {}").format(sql.Identifier(name), owner, how))

    def _drop_one(self, name: str) -> None:
        with self._connect() as conn:
            self._drop(conn, name)

    def _drop(self, conn: Connection, name: str) -> None:
        conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _drop_stale(self) -> None:
        """Drop what runs have left that are over: killed, most likely."""
        with self._connect() as conn:
            rows = conn.execute("SELECT datname FROM pg_database WHERE datname ~ %s", [f"^{PREFIX}[0-9a-f]{{8}}(_|$)"])
            for run in {name[len(PREFIX) :][:8] for (name,) in rows.fetchall()} - {self._run}:
                self._drop_run(conn, run)

    def _drop_run(self, conn: Connection, run: str) -> None:
        """Drop all databases of a run, if no process of it lives."""
        key = PREFIX + run
        row = conn.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", [key]).fetchone()
        if row is None or not row[0]:
            return
        try:
            rows = conn.execute("SELECT datname FROM pg_database WHERE datname ~ %s", [f"^{key}(_|$)"]).fetchall()
            for (name,) in rows:
                with contextlib.suppress(InsufficientPrivilege):  # another user's of the server, who will
                    self._drop(conn, name)
        finally:
            conn.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [key])

    @contextlib.contextmanager
    def lent(self) -> Iterator[Database]:
        """Lend a database for a block."""
        database = self.take()
        try:
            yield database
        finally:
            self.give_back(database)

    def _connect(self) -> Connection:
        return psycopg.connect(self._dsn, autocommit=True, connect_timeout=10)


def _await(awaitable: Awaitable[object]) -> None:
    """Await something in a thread of its own: in this one a loop may run."""

    async def run() -> None:
        await awaitable

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, run()).result()
