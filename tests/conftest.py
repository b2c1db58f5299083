"""Options and fixtures of the whole suite: a server for the session, a migrated database, connections.

`pytest --postgres 15` chooses the server's version, `pytest --schema NAME` where aioqueue's tables are.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import AioQueue, migrate
from tests.kit import MakeApp, Seen, session
from tests.postgres import VERSIONS, Database, Server, VersionMissing, programs
from tests.shop import at, shop  # noqa: F401 - fixtures of the whole suite
from tests.sql.engine import Session

PROCESSES = 5

# Many of these take seconds, for processes that start or leases that end.
LONG = (
    "contrib/test_uvicorn.py", "documents", "flow", "pooler/test_flow.py", "test_benchmarks.py", "test_cli_dev.py",
    "test_embedded.py", "test_fairness.py", "test_life.py", "test_misbehaviours.py", "testing/test_plugin.py",
)  # fmt: skip

# Read by the type checkers, never run.
collect_ignore = ["typing"]

# What these show is the same on every version of the server, or they bring a server of their own.
ONCE = (
    "callers", "contrib", "documents", "flow/test_chaos.py", "flow/test_connections.py", "flow/test_hosts.py",
    "flow/test_leases.py", "flow/test_misbehaving.py", "flow/test_network.py", "flow/test_outages.py", "flow/test_pooler.py",
    "flow/test_rescue.py", "flow/test_stopping.py", "flow/test_waking.py", "pooler/test_doctor.py", "pooler/test_flow.py",
    "pooler/test_limits.py",
    "published", "test_benchmarks.py", "test_cli.py", "test_cli_dev.py", "test_cli_health.py", "test_cli_logs.py",
    "test_cli_tenant.py", "test_cli_worker.py", "test_context.py", "test_data.py", "test_demo.py", "test_documents.py",
    "test_dsn.py", "test_embedded.py", "test_endurance.py", "test_events.py", "test_fairness.py", "test_floor.py",
    "test_frames.py", "test_identity.py", "test_job.py", "test_job_connection.py", "test_job_log.py", "test_keep.py",
    "test_life.py", "test_middleware.py", "test_misbehaviours.py", "test_outcome.py", "test_overdue.py", "test_patience.py",
    "test_payload.py", "test_pool_connection.py", "test_public.py", "test_resources.py", "test_retry.py",
    "test_session_tasks.py", "test_settings.py", "test_shares.py", "test_slots.py", "test_suspect.py", "test_task.py",
    "test_trip.py", "test_typing.py", "test_wakeup.py", "test_watch.py", "testing",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aioqueue")
    group.addoption("--postgres", type=int, choices=VERSIONS, default=18, help="the server's version (18)")
    group.addoption("--schema", default="aioqueue", help="the schema of aioqueue's tables (aioqueue)")
    group.addoption("--pictures", type=Path, metavar="DIRECTORY", help="keep what the browser shows there; default: nowhere")


def pytest_configure(config: pytest.Config) -> None:
    try:
        programs(int(str(config.getoption("postgres"))))
    except VersionMissing as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> str:
    return f"PostgreSQL {config.getoption('postgres')}, schema {config.getoption('schema')}"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for the tests: five, since most of them wait; none besides ours for single files, which begin sooner so."""
    return 0 if all(Path(argument.partition("::")[0]).is_file() for argument in config.args) else PROCESSES


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is to run on one version only; begin with the slow and the long ones, since several processes share the tests."""
    paths = {item.path for item in items}
    once, long = _below(paths, ONCE), _below(paths, LONG)
    for item in items:
        if item.path in once:
            item.add_marker(pytest.mark.once)
    yield  # the folders' own marks, the choice by -m, the random order
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path not in long))


def _below(paths: set[Path], listed: tuple[str, ...]) -> set[Path]:
    here = Path(__file__).parent
    return {path for path in paths if any(path.is_relative_to(here / each) for each in listed)}


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def schema(request: pytest.FixtureRequest) -> str:
    """The schema that aioqueue lives in."""
    return str(request.config.getoption("schema"))


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the wanted version, in a directory of its own, gone at the end."""
    with Server(int(str(request.config.getoption("postgres")))) as running:
        yield running


@pytest.fixture(scope="session")
def template(server: Server, schema: str) -> Database:
    """A migrated database that nobody connects to, so that it can be copied."""
    database = server.create()

    async def prepare() -> None:
        await migrate.migrate(database.dsn("owner"), schema=schema)
        await migrate.grant(database.dsn("owner"), schema=schema, role="aioqueue_worker", kind="worker")
        await migrate.grant(database.dsn("owner"), schema=schema, role="aioqueue_client", kind="client")

    asyncio.run(prepare())
    return database


@pytest.fixture(scope="session")
def migrated(server: Server, template: Database) -> Database:
    """The session's one migrated database; tests take `database`, which is clean."""
    return server.create(template)


@pytest.fixture
def own_database(server: Server, template: Database) -> Iterator[Database]:
    """A migrated database of the test's own, for what changes the tables themselves; dropped after the test."""
    database = server.create(template)
    yield database
    server.drop(database)


@pytest.fixture
def database(server: Server, migrated: Database, schema: str) -> Iterator[Database]:
    """The migrated database, emptied after the test."""
    yield migrated
    server.empty(migrated, schema)


@pytest.fixture
def owner_dsn(database: Database) -> str:
    return database.dsn("owner")


@pytest.fixture
def worker_dsn(database: Database) -> str:
    return database.dsn("worker")


@pytest.fixture
def client_dsn(database: Database) -> str:
    return database.dsn("client")


@pytest.fixture
def fresh_database(server: Server) -> Iterator[Callable[[], Database]]:
    """A function that creates an empty database, without aioqueue; dropped after the test."""
    created: list[Database] = []

    def create() -> Database:
        created.append(server.create())
        return created[-1]

    yield create
    for database in created:
        server.drop(database)


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[AsyncConnection[TupleRow]]:
    conn = await AsyncConnection.connect(dsn, autocommit=True)
    try:
        yield conn
    finally:
        await conn.close()


@pytest.fixture
async def owner(owner_dsn: str) -> AsyncIterator[AsyncConnection[TupleRow]]:
    """A connection as aioqueue_owner, in autocommit."""
    async with _connection(owner_dsn) as conn:
        yield conn


@pytest.fixture
async def worker_conn(worker_dsn: str) -> AsyncIterator[AsyncConnection[TupleRow]]:
    """A connection as aioqueue_worker, in autocommit."""
    async with _connection(worker_dsn) as conn:
        yield conn


@pytest.fixture
async def client_conn(client_dsn: str) -> AsyncIterator[AsyncConnection[TupleRow]]:
    """A connection as aioqueue_client, in autocommit."""
    async with _connection(client_dsn) as conn:
        yield conn


@pytest.fixture
def seen() -> Seen:
    """The events of the test's apps."""
    return Seen()


@pytest.fixture
def make_app(worker_dsn: str, schema: str, seen: Seen) -> MakeApp:
    """A function that makes an app with one task, `add`; its events are in `seen`."""

    def make(dsn: str = worker_dsn, **settings: Any) -> AioQueue:
        app = AioQueue(dsn, schema=schema, observers=[seen], **settings)

        @app.task(name="add")
        async def add(a: int, b: int = 1) -> int:
            return a + b

        return app

    return make


@pytest.fixture
async def app(make_app: MakeApp) -> AsyncIterator[AioQueue]:
    """One of these, open."""
    async with make_app() as opened:
        yield opened


@pytest.fixture
async def boss(database: Database, schema: str) -> AsyncIterator[Session]:
    """A session of the schema's owner, who may read and change everything."""
    async with session(database.dsn("owner"), schema) as made:
        yield made


@pytest.fixture
async def superuser(database: Database, schema: str) -> AsyncIterator[Session]:
    """A session of the superuser, who sees what others' sessions do."""
    async with session(database.dsn("superuser"), schema) as made:
        yield made
