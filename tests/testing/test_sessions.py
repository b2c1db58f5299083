"""Tasks that take a JobSession: drained as all others, lost with their worker, refused in a transaction of the test's."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import sqlalchemy
from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from aioqueue import AioQueue, ConfigurationError, migrate, testing
from aioqueue.contrib.sqlalchemy import JobSession
from tests.kit import MakeApp
from tests.postgres import Database as ServerDatabase

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncpg", "psycopg"])
async def engine(request: pytest.FixtureRequest, worker_dsn: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(sqlalchemy.make_url(worker_dsn).set(drivername=f"postgresql+{request.param}"))
    yield made
    await made.dispose()


@pytest.fixture
def app(make_app: MakeApp, engine: AsyncEngine) -> AioQueue[Any]:
    app = make_app(session=async_sessionmaker(engine))

    @app.task(name="write")
    async def write(session: JobSession, note: str) -> str:
        await session.execute(text("INSERT INTO notes.note VALUES (:tenant, :note)"), {"tenant": session.tenant, "note": note})
        return note

    return app


@pytest.mark.parametrize(("point", "states"), [("before_record", ["lost", "succeeded"]), ("after_commit", ["succeeded"])])
async def test_its_writes_are_there_once(
    app: AioQueue[Any], notes: AsyncConnection[TupleRow], point: Any, states: list[str]
) -> None:
    async with testing.queue(app) as queue:
        queue.crash_worker_at(point, "write")
        await app.get("write").options(tenant="42").enqueue("hello")
        runs = await queue.drain()
        assert runs.states == states
        assert runs[-1].result == "hello"
    assert await (await notes.execute("SELECT * FROM notes.note")).fetchall() == [("42", "hello")]


async def test_within_a_test_s_transaction_it_is_refused(
    app: AioQueue[Any], worker_dsn: str, notes: AsyncConnection[TupleRow]
) -> None:
    async with testing.queue(app) as queue, await AsyncConnection.connect(worker_dsn) as conn:
        job = await app.get("write").options(tenant="42", on=conn).enqueue("hello")
        with pytest.raises(testing.TestingError, match="takes a session"):
            await queue.run_job(job, on=conn)
        await conn.commit()
        assert (await queue.drain()).states == ["succeeded"]


async def test_an_engine_of_another_database_is_refused_where_the_test_opens_the_queue(
    app: AioQueue[Any], fresh_database: Callable[[], ServerDatabase], engine: AsyncEngine, schema: str
) -> None:
    other = fresh_database()
    await migrate.migrate(other.dsn("owner"), schema=schema)
    with pytest.raises(ConfigurationError, match="another database"):
        async with testing.queue(app, other.dsn("owner")):
            raise AssertionError("it is open")
    with testing.use(app, other.dsn("owner")), pytest.raises(ConfigurationError, match="another database"):
        async with app.worker():
            raise AssertionError("it is open")
    assert not app.is_open
