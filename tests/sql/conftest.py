"""Sessions for the tests of the SQL: two or three of the worker's role, one of the owner's, one of the client's."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from psycopg import AsyncConnection

from aioqueue.store import Store
from tests.postgres import Database
from tests.sql.engine import Session
from tests.sql.ranges import drop_ranges

Connect = Callable[[str], Awaitable[Session]]


@asynccontextmanager
async def _sessions(database: Database, schema: str) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def open_session(role: str) -> Session:
            conn = await AsyncConnection.connect(database.dsn(role), autocommit=True)
            stack.push_async_callback(conn.close)
            return Session(conn, Store(schema))

        yield open_session


@pytest.fixture
async def connect(database: Database, schema: str) -> AsyncIterator[Connect]:
    """A function that opens one more session as owner, worker, client or superuser; closed after the test."""
    async with _sessions(database, schema) as sessions:
        yield sessions


@pytest.fixture
async def boss(connect: Connect) -> Session:
    """As the schema's owner, who may read and change everything."""
    return await connect("owner")


@pytest.fixture
async def one(connect: Connect) -> Session:
    return await connect("worker")


@pytest.fixture
async def two(connect: Connect) -> Session:
    return await connect("worker")


@pytest.fixture
async def three(connect: Connect) -> Session:
    return await connect("worker")


@pytest.fixture
async def guest(connect: Connect) -> Session:
    """As the client role."""
    return await connect("client")


@pytest.fixture
async def own(own_database: Database, schema: str) -> AsyncIterator[Connect]:
    """As `connect`, to a migrated database of the test's own without ranges of id time, for tests of these."""
    async with _sessions(own_database, schema) as sessions:
        await drop_ranges(await sessions("owner"))
        yield sessions
