"""The options that every command takes, before or after its name, and where the database is by them.

In this order: --dsn, the app's own DSN (-A), AIOQUEUE_DSN, DATABASE_URL, PG*, the embedded server. The schema likewise:
--schema, the app's, AIOQUEUE_SCHEMA, aioqueue.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from psycopg import AsyncConnection

from aioqueue import embedded, migrate
from aioqueue.app import AioQueue
from aioqueue.database import Database
from aioqueue.dsn import find_dsn, no_dsn
from aioqueue.errors import ConfigurationError
from aioqueue.server import deadline
from aioqueue.settings import DEFAULT_SCHEMA, PoolSettings, check_schema_name
from aioqueue.store import Store

from .failure import Common, Misuse
from .loading import load_app

F = TypeVar("F", bound=Callable[..., Any])

READ_SECONDS = 30
"""Seconds that one statement of a reading command may take; they are all bounded, but a held xmin horizon slows them."""
HIGHEST_PORT = 65535
COMMAND_SECONDS = 60.0
"""Seconds that all of a command may take: the server may hang."""

option = functools.partial(click.option, show_envvar=True)
as_json = option("--json", is_flag=True, help="Print JSON.")


def address(_ctx: click.Context | None, _param: click.Parameter | None, value: str | None) -> tuple[str, int] | None:
    """Return the host and port of [HOST:]PORT; an IPv6 address in brackets."""
    if value is None:
        return None
    host, colon, port = value.rpartition(":")
    known = host.startswith("[") or (bool(host) and ":" not in host) or not colon
    if not (known and port.isascii() and port.isdecimal() and int(port) <= HIGHEST_PORT):
        raise click.BadParameter(f"expected PORT or HOST:PORT, such as 8080, 0.0.0.0:8080 or [::]:8080, got {value!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    common = ctx.ensure_object(Common)
    assert param.name is not None  # noqa: S101 - every option has a name
    if ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
        common.given.add(param.name)
        setattr(common, param.name, value)
    elif value and not getattr(common, param.name):
        setattr(common, param.name, value)


def common_options(command: F) -> F:
    """Give a command the options that every command takes; it finds them in `Common`."""
    shared = functools.partial(option, expose_value=False, callback=_keep)
    for decorate in (
        shared("-v", "--verbose", is_flag=True, envvar="AIOQUEUE_VERBOSE", help="Show tracebacks."),
        shared("--schema", envvar="AIOQUEUE_SCHEMA", metavar="NAME", help="PostgreSQL schema of the queue (aioqueue)."),
        shared("--dsn", envvar="AIOQUEUE_DSN", metavar="URI", help="Where the database is: postgresql://…"),
        shared("-A", "--app", envvar="AIOQUEUE_APP", metavar="MODULE:APP", help="The app: its tasks, DSN and schema."),
    ):
        command = decorate(command)
    return command


@dataclass(frozen=True, slots=True)
class Place:
    """A database and the schema in it."""

    dsn: str
    schema: str
    embedded: bool = False


def find_schema(common: Common, app: AioQueue | None) -> str:
    """Return the schema's name. Raises ConfigurationError for one that cannot be."""
    if app is not None and "schema" not in common.given:
        return app.settings.schema
    return check_schema_name(DEFAULT_SCHEMA if common.schema is None else common.schema)


def given_dsn(common: Common, app: AioQueue | None) -> str | None:
    """Return the DSN, or None where it is the embedded server that is meant."""
    return find_dsn(common.dsn if "dsn" in common.given else None if app is None else app.dsn)


@contextlib.contextmanager
def reach(common: Common, *, role: embedded.Role) -> Iterator[Place]:
    """Find the database; the embedded server, where it is that, runs for the block. `role` is for that server only."""
    app = None if common.app is None else load_app(common.app)
    schema = find_schema(common, app)
    dsn = given_dsn(common, app)
    if dsn is not None:
        yield Place(dsn, schema)
        return
    if not embedded.available():
        raise no_dsn()
    directory = None if app is None else app.data_dir
    if role != "owner" and not ((place := directory or embedded.default_data_dir()) / "pgdata").exists():
        raise ConfigurationError(
            f"no database is given, and no embedded one is kept in {place}: give --dsn or set AIOQUEUE_DSN, or make one "
            "there with 'python -m aioqueue migrate'"
        )
    with embedded.start(directory) as server:
        yield Place(server.dsn(role), schema, embedded=True)


@contextlib.asynccontextmanager
async def connected(common: Common) -> AsyncIterator[tuple[AsyncConnection[Any], Store]]:
    """Connect in autocommit, as worker on the embedded server. Raises SchemaError where the schema does not fit."""
    with reach(common, role="worker") as place:
        async with await Database(place.dsn, PoolSettings()).connect() as conn, deadline(conn, COMMAND_SECONDS):
            await migrate.check(conn, schema=place.schema)
            yield conn, Store(place.schema)


@contextlib.asynccontextmanager
async def reading(common: Common) -> AsyncIterator[tuple[AsyncConnection[Any], Store]]:
    """Connect, in one transaction that only reads."""
    async with connected(common) as (conn, store), conn.transaction():
        # The planner's guesses for bounded scans are high, and compiling for them takes longer than they do.
        local = {"statement_timeout": f"{READ_SECONDS}s", "transaction_read_only": "on", "jit": "off"}
        await store.set_local(conn, local)
        yield conn, store


def make_app(common: Common, *, start_timeout: float | None = 0.0) -> AioQueue:
    """Return the app of -A, or one without tasks, on the database that the options name. Raises Failure.

    `start_timeout` is in place of the app's own, unless it is None.
    """
    app = _make_app(common)
    if start_timeout is not None:
        app.settings = replace(app.settings, pool=replace(app.settings.pool, start_timeout=start_timeout))
    return app


def _make_app(common: Common) -> AioQueue:
    if common.app is None:
        return AioQueue(find_dsn(common.dsn if "dsn" in common.given else None), schema=find_schema(common, None))
    if "dsn" in common.given and common.dsn is not None:
        # Before the import: an app may read it there, or AioQueue() later.
        os.environ["AIOQUEUE_DSN"] = common.dsn
    app = load_app(common.app)
    if "dsn" in common.given and app.dsn is not None and find_dsn(app.dsn) != find_dsn(common.dsn):
        raise Misuse(f"{common.app} has a DSN of its own: leave --dsn out, or write AioQueue() there without one")
    if "schema" in common.given and common.schema != app.settings.schema:
        raise Misuse(f"{common.app} has schema {app.settings.schema!r}: leave --schema out, or change it there")
    return app
