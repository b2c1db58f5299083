"""A server that tests may break, mended and emptied after each; a proxy before it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aioqueue import listen
from benchmarks.proxy import Proxy
from tests.outage.server import DATABASE, OutageServer
from tests.postgres import Database

EFFECT = (
    "CREATE SCHEMA effects AUTHORIZATION aioqueue_owner",
    "CREATE TABLE effects.effect (job_id uuid NOT NULL)",
    "GRANT USAGE ON SCHEMA effects TO aioqueue_worker",
    "GRANT SELECT, INSERT ON effects.effect TO aioqueue_worker",
    f"ALTER DATABASE {DATABASE} SET search_path = effects",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests as slow: three minutes in all."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def breakable(request: pytest.FixtureRequest, schema: str) -> Iterator[OutageServer]:
    """The server of this folder's tests; they take `outage`."""
    with OutageServer(int(str(request.config.getoption("postgres"))), schema) as server:
        server.run(*EFFECT)
        yield server


@pytest.fixture
def outage(breakable: OutageServer) -> Iterator[OutageServer]:
    """A server to break."""
    yield breakable
    breakable.go_on()
    with contextlib.suppress(psycopg.OperationalError):
        breakable.run("ALTER SYSTEM RESET ALL", "SELECT pg_reload_conf()")
    breakable.stop()
    breakable.start()
    breakable.empty(Database(breakable, DATABASE), breakable.schema)
    breakable.run("TRUNCATE effects.effect")


@pytest.fixture
def proxy(outage: OutageServer) -> Iterator[Proxy]:
    """A proxy before the server."""
    with Proxy(outage.port) as running:
        yield running


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener asks for a sign of life every half second."""
    monkeypatch.setattr(listen, "PROBE_INTERVAL", 0.5)
    monkeypatch.setattr(listen, "ANSWER_TIMEOUT", 0.5)
