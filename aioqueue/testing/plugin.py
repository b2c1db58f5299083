"""The pytest plugin: options, and fixtures of databases. All of them are plain functions, so that they serve under anyio's plugin
and under pytest-asyncio alike; what is awaited in a test, `aioqueue.testing` has.
"""

from __future__ import annotations

import os
import statistics
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from aioqueue import embedded
from aioqueue.embedded_cluster import OWNER
from aioqueue.settings import DEFAULT_SCHEMA

from .databases import Database, Databases, MakeTables

FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
}
"""Of the embedded server of tests: a crash of the machine may cost its data, which are worth nothing."""

_TIMINGS = pytest.StashKey[list[tuple[list[float], list[float]]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of the configuration."""
    group = parser.getgroup("aioqueue", "aioqueue's testing kit")
    group.addoption(
        "--aioqueue-dsn",
        metavar="DSN",
        help="the PostgreSQL server that tests make their databases on, as a role that may; default: AIOQUEUE_TEST_DSN, "
        "else an embedded one",
    )
    group.addoption("--aioqueue-role", metavar="ROLE", help="the role that tests connect as; default: the databases' owner")
    group.addoption("--aioqueue-timings", action="store_true", help="say at the end what the tests' databases took")
    parser.addini("aioqueue_dsn", "as --aioqueue-dsn")
    parser.addini("aioqueue_role", "as --aioqueue-role")
    parser.addini("aioqueue_schema", "the schema of aioqueue's tables", default=DEFAULT_SCHEMA)


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the timings of this process and of those of pytest-xdist."""
    config.stash[_TIMINGS] = []


def run_name(given: str | None) -> str:
    """Name a run: after the one that pytest-xdist gives to all of its processes, or anew."""
    return uuid.uuid5(uuid.NAMESPACE_OID, given or uuid.uuid4().hex).hex[:8]


def _setting(config: pytest.Config, name: str) -> str | None:
    given = config.getoption(f"--{name.replace('_', '-')}") or config.getini(name)
    return str(given) if given else None


@pytest.fixture(scope="session")
def aioqueue_tables() -> MakeTables | None:
    """Override it with a fixture that returns a function: called once for a run, it makes your tables in the database it is
    given the DSN of, as the owner. aioqueue's schema is there by then. It may be async.
    """
    return None


@pytest.fixture(scope="session")
def aioqueue_databases(request: pytest.FixtureRequest, aioqueue_tables: MakeTables | None) -> Iterator[Databases]:
    """What makes the databases of the tests, for all of a session."""
    config = request.config
    given = _setting(config, "aioqueue_dsn") or os.environ.get("AIOQUEUE_TEST_DSN")
    options: dict[str, Any] = {
        "run": run_name(os.environ.get("PYTEST_XDIST_TESTRUNUID")),
        "process": os.environ.get("PYTEST_XDIST_WORKER", "main"),
        "schema": str(config.getini("aioqueue_schema")),
        "role": _setting(config, "aioqueue_role"),
        "tables": aioqueue_tables,
    }
    if given is not None:
        with Databases(given, **options) as databases:
            yield databases
            _keep_timings(config, databases)
        return
    directory = embedded.default_data_dir()
    with embedded.start(directory.with_name(f"{directory.name}-test"), settings=FAST) as server:
        admin = server.dsn("superuser", "postgres")
        with Databases(admin, owner=OWNER, logins=True, **options) as databases:
            yield databases
            _keep_timings(config, databases)


@pytest.fixture
def aioqueue_database(aioqueue_databases: Databases) -> Iterator[Database]:
    """A database of the test's own, with aioqueue's schema and your tables; dropped after the test."""
    with aioqueue_databases.lent() as database:
        yield database


@pytest.fixture
def aioqueue_dsn(aioqueue_database: Database) -> str:
    """The DSN of the test's own database."""
    return aioqueue_database.dsn


@pytest.fixture(scope="session")
def aioqueue_shared_database(aioqueue_databases: Databases) -> Iterator[Database]:
    """One database for all tests of a process, for those that roll back what they do."""
    with aioqueue_databases.lent() as database:
        yield database


@pytest.fixture(scope="session")
def aioqueue_shared_dsn(aioqueue_shared_database: Database) -> str:
    """The DSN of the database for all tests of a process."""
    return aioqueue_shared_database.dsn


def _keep_timings(config: pytest.Config, databases: Databases) -> None:
    kept = (databases.timings.created, databases.timings.waited)
    config.stash[_TIMINGS].append(kept)
    output: dict[str, Any] | None = getattr(config, "workeroutput", None)
    if output is not None:
        output["aioqueue_timings"] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the timings of a process of pytest-xdist."""
    kept = getattr(node, "workeroutput", {}).get("aioqueue_timings")
    if kept is not None:
        node.config.stash[_TIMINGS].append(tuple(kept))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what the databases took, if asked."""
    if not config.getoption("--aioqueue-timings"):
        return
    created = [seconds for some, _ in config.stash[_TIMINGS] for seconds in some]
    waited = [seconds for _, some in config.stash[_TIMINGS] for seconds in some]
    terminalreporter.section("aioqueue's test databases")
    for what, found in (("created", created), ("waited for by tests", waited)):
        if found:
            times = f"median {statistics.median(found) * 1000:.0f} ms, longest {max(found) * 1000:.0f} ms"
            terminalreporter.write_line(f"{len(found)} {what}: {times}")
