"""A flow: the session's database with the tables that tasks write to, and worker processes that do not outlive the test."""

from collections.abc import AsyncIterator, Iterator

import pytest
from psycopg import AsyncConnection

from aioqueue import migrate
from aioqueue.store import Store
from benchmarks.proxy import Proxy
from tests.flow.processes import TABLES, Flow
from tests.postgres import Database, Server
from tests.sql.engine import Session


@pytest.fixture
async def flow(database: Database, schema: str) -> AsyncIterator[Flow]:
    conn = await AsyncConnection.connect(database.dsn("owner"), autocommit=True)
    flow = Flow(Session(conn, Store(schema)), database.dsn("worker"), schema)
    try:
        await conn.execute(TABLES)
        yield flow
    finally:
        flow.close()
        await conn.execute("DROP SCHEMA flow CASCADE")
        await conn.close()


@pytest.fixture
def proxy(flow: Flow, database: Database) -> Iterator[Proxy]:
    """A proxy between the flow's processes and their database; what tasks note goes past it."""
    address = database.server.cluster.address()
    assert address is not None
    with Proxy(f"{address.socket_dir}/.s.PGSQL.{address.port}") as running:
        flow.evidence = flow.dsn
        flow.dsn = f"postgresql://aioqueue_worker@127.0.0.1:{running.port}/{database.name}?connect_timeout=2"
        yield running


@pytest.fixture
def superuser_dsn(database: Database) -> str:
    return database.dsn("superuser")


@pytest.fixture
async def own_server(request: pytest.FixtureRequest, schema: str) -> AsyncIterator[tuple[Server, Flow, str]]:
    """A server that the test may crash: what was committed stays, unlike on the session's."""
    with Server(int(str(request.config.getoption("postgres")))) as server:
        database = server.create()
        async with await AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as boss:
            await boss.execute("ALTER ROLE ALL SET synchronous_commit = on")
        owner = database.dsn("owner")
        await migrate.migrate(owner, schema=schema)
        await migrate.grant(owner, schema=schema, role="aioqueue_worker", kind="worker")
        conn = await AsyncConnection.connect(owner, autocommit=True)
        await conn.execute(TABLES)
        flow = Flow(Session(conn, Store(schema)), database.dsn("worker"), schema)
        try:
            yield server, flow, owner
        finally:
            flow.close()
            await flow.owner.conn.close()
