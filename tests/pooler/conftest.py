"""PgBouncer in transaction mode in front of the session's server, and its server connections, one by one.

It lends them in turn (server_round_robin), so that two transactions of one client never meet the same session by luck.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, LiteralString

import pytest
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import AioQueue
from benchmarks.pgbouncer import PROGRAM, PgBouncer, pgbouncer
from tests.kit import MakeApp, Seen
from tests.postgres import Database

POOL_SIZE = 4
"""Connections of the server that PgBouncer shares out."""


@pytest.fixture(scope="module")
def pooler(migrated: Database) -> Iterator[PgBouncer]:
    if PROGRAM is None:
        pytest.skip("PgBouncer is not here: apt-get install pgbouncer")
    with pgbouncer(migrated.dsn("worker"), default_pool_size=POOL_SIZE, server_round_robin=1) as running:
        yield running


@pytest.fixture
def pooled_dsn(pooler: PgBouncer, worker_dsn: str) -> str:
    """The worker's role, through the pooler."""
    return pooler.dsn(worker_dsn)


@pytest.fixture
def make_pooled(pooled_dsn: str, schema: str, seen: Seen) -> MakeApp:
    """A function that makes an app behind the pooler; its events are in `seen`."""

    def make(**settings: Any) -> AioQueue:
        return AioQueue(pooled_dsn, schema=schema, observers=[seen], **settings)

    return make


@asynccontextmanager
async def every_session(dsn: str) -> AsyncIterator[list[AsyncConnection[TupleRow]]]:
    """Every server connection of the pooler at once, each in a transaction of a stranger's client; committed at the end."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await AsyncConnection.connect(dsn, prepare_threshold=None)) for _ in range(POOL_SIZE)
        ]
        pids = set()
        for client in clients:
            row = await (await client.execute("SELECT pg_backend_pid()")).fetchone()
            assert row is not None
            pids.add(row[0])
        assert len(pids) == POOL_SIZE
        yield clients


async def ask_every_session(dsn: str, query: LiteralString) -> list[Any]:
    """The first value of a query in each server connection."""
    async with every_session(dsn) as clients:
        found = []
        for client in clients:
            row = await (await client.execute(query)).fetchone()
            assert row is not None
            found.append(row[0])
        return found


async def tell_every_session(dsn: str, statement: LiteralString) -> None:
    """Run a statement in each server connection, as a stranger who commits it."""
    async with every_session(dsn) as clients:
        for client in clients:
            await client.execute(statement)
