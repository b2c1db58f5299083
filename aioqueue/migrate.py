"""Brings the schema to this code's version, checks at start that the two fit, and grants the roles their rights (rights.py).

Migrations run in one transaction under a transaction-scoped advisory lock, so any number of processes may start at once,
behind a transaction-mode pooler too. Nothing else in aioqueue runs DDL.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import psycopg
from psycopg import sql

from .connector import connection_string
from .errors import SchemaError
from .rights import Kind, grants, holders
from .server import deadline
from .settings import DEFAULT_SCHEMA, RetentionSettings, check_schema_name
from .sql import as_sql, functions, migrations, place, quote_schema

__all__ = ["grant", "grants", "migrate"]  # what the documentation names; the rest is the package's

ANSWER_SECONDS = 10.0
"""Seconds that one small call may take."""
MIGRATE_SECONDS = 600.0
"""Seconds that a migration may take in all, unless told otherwise."""
LOCK_SECONDS = 0.7
"""Seconds that a migration waits for a table: claims that come meanwhile wait behind it."""
PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between its attempts."""
TURN_SECONDS = 60.0
"""Seconds that it waits for another migration of the schema to end."""

_VERSION_TABLE = """
CREATE TABLE IF NOT EXISTS aioqueue.schema_version (
    version    integer     NOT NULL PRIMARY KEY,
    serves     integer     NOT NULL,
    name       text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""


class SchemaLocked(psycopg.errors.LockNotAvailable):
    """Somebody holds a table that a migration changes, or migrates for long; nothing was changed. The message says who."""


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """What a database holds beside what this code needs; version 0 is no schema at all."""

    schema: str
    version: int
    serves: int
    needed: int
    pending: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether this code can run on the schema."""
        return self.serves <= self.needed <= self.version


RANGED = 5
"""The version from which on there are ranges of id time."""
_MAKE_RANGES = f"aioqueue.make_ranges({RetentionSettings().width:.0f}, 2, 100, NULL)"
"""As the workers' pruner does with its defaults, but whatever it takes."""


def code_version() -> int:
    """Return the schema version that this code needs."""
    return migrations()[-1].version


def _command(schema: str) -> str:
    option = "" if schema == DEFAULT_SCHEMA else f" --schema {shlex.quote(schema)}"
    return f"python -m aioqueue migrate{option}"


def _as_it_is(statements: str) -> sql.SQL:
    # From the package's own files, with the quoted schema name in it already; a second time would break some names.
    return sql.SQL(statements)  # pyright: ignore[reportArgumentType] - our own files, not input


async def status(conn: psycopg.AsyncConnection, *, schema: str) -> SchemaStatus:
    """Read the schema's version. Changes nothing; a missing schema, or one without rights, is version 0."""
    cursor = await conn.execute(
        "SELECT n.oid IS NOT NULL, has_schema_privilege(n.oid, 'USAGE'),"
        " EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relname = 'schema_version')"
        " FROM (SELECT %s AS name) x LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = x.name",
        (schema,),
    )
    row = await cursor.fetchone()
    exists, usable, versioned = map(bool, row) if row else (False, False, False)
    if exists and not usable:
        raise SchemaError(
            f"schema {quote_schema(schema)} is there, but this role has no rights in it: have its owner run "
            f"{_command(schema)} --grants ROLE (and --as client, for a role that runs no jobs)"
        )
    version = serves = 0
    if versioned:
        cursor = await conn.execute(
            as_sql("SELECT coalesce(max(version), 0), coalesce(max(serves), 0) FROM aioqueue.schema_version", schema)
        )
        found = await cursor.fetchone()
        version, serves = found if found else (0, 0)
    pending = tuple(f"{m.version:04d}_{m.name}" for m in migrations() if m.version > version)
    return SchemaStatus(schema, version, serves, code_version(), pending)


async def check(conn: psycopg.AsyncConnection, *, schema: str) -> None:
    """Raise SchemaError, with the exact command to run, unless this code can run on the database's schema."""
    found = await status(conn, schema=schema)
    name = quote_schema(schema)
    if found.version == 0:
        raise SchemaError(f"no aioqueue schema {name} in this database: as its owner, run {_command(schema)}")
    if found.version < found.needed:
        raise SchemaError(
            f"schema {name} is at version {found.version}, this code needs {found.needed}: as its owner, run {_command(schema)}"
        )
    if found.serves > found.needed:
        raise SchemaError(
            f"schema {name} is at version {found.version}, which serves code from schema version {found.serves} on; this code "
            f"is at {found.needed}: install a newer aioqueue-pg"
        )


def script(*, schema: str = DEFAULT_SCHEMA, since: int = 0, roles: Iterable[tuple[Kind, str]] = ()) -> str:
    """Return the SQL that brings a schema from version `since` to this code's, as one transaction, to be read and run.

    `roles`: see `holders`.
    """
    body = _script(schema=schema, since=since)
    if not body:
        return ""
    body = "\n".join([body, *(grants(role=role, schema=schema, kind=kind) for kind, role in roles)])
    return f"BEGIN;\nSET LOCAL lock_timeout = '5s';\nSET LOCAL check_function_bodies = off;\n{body}\nCOMMIT;"


def _script(*, schema: str, since: int) -> str:
    check_schema_name(schema)
    parts = [] if since else [f"CREATE SCHEMA IF NOT EXISTS {quote_schema(schema)};", place(_VERSION_TABLE, schema)]
    pending = [m for m in migrations() if m.version > since]
    parts += [place(m.text, schema) for m in pending]
    if pending:
        parts += [place(text, schema) for text in functions().values()]
        # One by one: a schema that holds other people's functions too keeps their rights as they are.
        parts += [place(f"REVOKE ALL ON FUNCTION aioqueue.{name} FROM PUBLIC;", schema) for name in functions()]
    parts += [
        place(
            f"INSERT INTO aioqueue.schema_version (version, serves, name) VALUES ({m.version}, {m.serves}, '{m.name}');",  # noqa: S608 - the package's own file names
            schema,
        )
        for m in pending
    ]
    if pending and since < RANGED:
        # Before the first job comes, or while the tables are locked anyway.
        parts.append(place(f"SELECT {_MAKE_RANGES};", schema))
    return "\n".join(parts)


@contextlib.asynccontextmanager
async def connect(dsn: str, seconds: float = ANSWER_SECONDS) -> AsyncIterator[psycopg.AsyncConnection]:
    """Open a connection; the block's end commits. All of it takes at most so long, whatever the server does."""
    # As through a pooler: none of the time-outs that the runtime's statements have.
    conn = await psycopg.AsyncConnection.connect(connection_string(dsn, pooler=True))
    async with _within(conn, seconds), conn:
        yield conn


@contextlib.asynccontextmanager
async def _within(conn: psycopg.AsyncConnection, seconds: float) -> AsyncIterator[None]:
    ends = time.monotonic() + seconds
    try:
        async with deadline(conn, seconds):
            yield
    except psycopg.OperationalError as error:
        if time.monotonic() < ends:
            raise
        raise psycopg.OperationalError(f"the server has not done it within {seconds:g} s; it may hang") from error


async def migrate(dsn: str, *, schema: str = DEFAULT_SCHEMA, timeout: float = MIGRATE_SECONDS) -> SchemaStatus:
    """Apply what is pending, as the role of `dsn`, which becomes (or is) the owner; return what there was before.

    One transaction: it is all there afterwards, or nothing. Safe to run from many processes at once. Where a table is locked it
    tries again for about 20 s, so that nobody's work waits behind it, and then raises SchemaLocked, which names the holder: run
    it again. Raises psycopg.OperationalError where the server gives no first answer within 10 s, or all of it has taken
    `timeout` seconds.
    """
    check_schema_name(schema)
    async with connect(dsn, timeout) as conn:
        # Who waited for the lock must see what its holder did, whatever the database's default is.
        await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        async with _within(conn, min(ANSWER_SECONDS, timeout)):
            await _check_encoding(conn)
        for pause in (*PAUSES, None):
            turn = False
            try:
                await conn.execute(as_sql(f"SET LOCAL lock_timeout = '{TURN_SECONDS:.3f}s'", schema))
                await conn.execute(
                    "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%s, 0))", (_lock(schema),)
                )
                turn = True
                return await _bring_up(conn, schema=schema)
            except psycopg.errors.LockNotAvailable as error:
                await conn.rollback()
                if pause is None or not turn:
                    raise SchemaLocked(await _locked(conn, schema=schema)) from error
            await asyncio.sleep(pause)
    raise AssertionError  # the last attempt returns or raises


async def _bring_up(conn: psycopg.AsyncConnection, *, schema: str) -> SchemaStatus:
    before = await status(conn, schema=schema)
    if before.pending:
        roles = await holders(conn, schema=schema)
        await conn.execute(as_sql(f"SET LOCAL lock_timeout = '{LOCK_SECONDS:.3f}s'", schema))
        await conn.execute("SET LOCAL check_function_bodies = off")
        cursor = await conn.execute("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s", (schema,))
        if await cursor.fetchone() is None:
            await conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        text = _script(schema=schema, since=before.version)
        if before.version == 0:
            # An existing schema is used as it is: CREATE SCHEMA IF NOT EXISTS would ask for the right to create one.
            text = text.partition("\n")[2]
        await conn.execute(_as_it_is(text))
        for kind, role in roles:
            await conn.execute(_as_it_is(grants(role=role, schema=schema, kind=kind)))
    else:
        # What its workers leave out because it takes too long beside their work, if anything.
        with contextlib.suppress(psycopg.errors.LockNotAvailable):
            async with conn.transaction():
                await conn.execute(as_sql(f"SELECT {_MAKE_RANGES}", schema))
    return before


def _lock(schema: str) -> str:
    return f"aioqueue migrate {schema}"


async def _locked(conn: psycopg.AsyncConnection, *, schema: str) -> str:
    """Say who holds a lock of the schema's tables, or that of its migrations, the longest in its transaction."""
    cursor = await conn.execute(
        "SELECT l.pid, a.usename, a.application_name, a.state, pg_catalog.date_part('epoch', clock_timestamp() - a.xact_start),"
        " pg_catalog.string_agg(DISTINCT c.relname, ', ' ORDER BY c.relname)"
        " FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid"
        " LEFT JOIN pg_catalog.pg_class c ON l.locktype = 'relation' AND c.oid = l.relation AND c.relkind IN ('r', 'p')"
        " AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace n WHERE n.nspname = %s)"
        " WHERE l.granted AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()"
        " AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())"
        " AND (c.oid IS NOT NULL OR l.locktype = 'advisory' AND l.objsubid = 1"
        " AND (l.classid::bigint << 32 | l.objid::bigint) = pg_catalog.hashtextextended(%s, 0))"
        " GROUP BY l.pid, l.virtualtransaction, a.usename, a.application_name, a.state, a.xact_start"
        " ORDER BY a.xact_start LIMIT 1",
        (schema, _lock(schema)),
    )
    found = await cursor.fetchone()
    end = "nothing was changed; run it again"
    if found is None:
        return f"somebody held the schema's tables until now: {end}"
    pid, user, application, state, seconds, tables = found
    held = "migrates this schema" if tables is None else f"holds {tables}"
    if pid is None:
        return f"a prepared transaction {held}: {end} when it has ended; pg_prepared_xacts names it"
    since = "" if seconds is None else f" for {seconds:.0f} s"
    who = f"session {pid} of {user or 'another role'} ({application or 'no name'}, {state or 'what it does is not shown'}{since})"
    return f"{who} {held}: {end} when it has ended, or end it: SELECT pg_terminate_backend({pid})"


async def _check_encoding(conn: psycopg.AsyncConnection) -> None:
    encoding = conn.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise SchemaError(
            f"this database is encoded as {encoding}, which cannot store every text that a job may hold: make one with "
            "CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


async def grant(dsn: str, *, role: str, schema: str = DEFAULT_SCHEMA, kind: Kind = "worker") -> None:
    """Grant a role its rights, as the owner. Raises psycopg.errors.UndefinedObject for an unknown role."""
    async with connect(dsn) as conn:
        await conn.execute(_as_it_is(grants(role=role, schema=schema, kind=kind)))
