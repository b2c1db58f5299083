"""The plugin in a pytest of its own: under anyio's plugin, under pytest-asyncio in both modes, with processes of xdist."""

import importlib.metadata
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aioqueue.testing import Databases
from aioqueue.testing.databases import PREFIX
from aioqueue.testing.plugin import run_name
from tests.postgres import Server

pytestmark = pytest.mark.timeout(240)

APP = """
from aioqueue import AioQueue, JobTransaction

app = AioQueue("postgresql://nobody@nowhere.invalid/none", schema={schema!r})


@app.task
async def note(tx: JobTransaction, text: str) -> str:
    await tx.execute("INSERT INTO note (text) VALUES (%s)", [text])
    return text
"""

CONFTEST = """
import psycopg
import pytest
{imports}
from aioqueue import testing

from app import app


@pytest.fixture(scope="session")
def aioqueue_tables():
    def make(dsn):
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE note (text text)")
    return make


{fixture}
async def queue(aioqueue_dsn):
    async with testing.queue(app, aioqueue_dsn) as queue:
        yield queue
"""

TESTS = """
import psycopg
import pytest

from app import note

{mark}


async def test_committed(queue, aioqueue_dsn):
    await note.enqueue("hello")
    await queue.assert_enqueued(note, payload={{"text": "hello"}}, count=1)
    assert (await queue.drain()).states == ["succeeded"]
    with psycopg.connect(aioqueue_dsn) as conn:
        assert conn.execute("SELECT text FROM note").fetchall() == [("hello",)]


async def test_rolled_back(queue, aioqueue_dsn):
    async with await psycopg.AsyncConnection.connect(aioqueue_dsn) as conn:
        await conn.execute("SELECT 1")
        ran = await queue.run_job(note.options(on=conn).enqueue("hello"), on=conn)
        assert ran.result == "hello"
        await conn.rollback()
    await queue.refute_enqueued()
"""

ANYIO = ("", "@pytest.fixture", "pytestmark = pytest.mark.anyio", "asyncio")
STRICT = ("import pytest_asyncio", "@pytest_asyncio.fixture", "pytestmark = pytest.mark.asyncio", "anyio")
AUTO = ("", "@pytest.fixture", "", "anyio")
ASYNCIO = "-oasyncio_default_fixture_loop_scope=function"
"""pytest-asyncio warns of everybody who does not say it."""


@pytest.fixture(scope="module")
def uid(server: Server, schema: str) -> Iterator[str]:
    """The name of a run that lives as long as these tests, which are all processes of it: its template is made once."""
    uid = uuid.uuid4().hex

    def tables(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE note (text text); GRANT ALL ON note TO aioqueue_worker")

    with Databases(server.dsn("superuser", "postgres"), run=run_name(uid), schema=schema, tables=tables) as databases:
        databases.template()
        yield uid


@pytest.fixture
def project(tmp_path: Path, schema: str) -> Path:
    (tmp_path / "app.py").write_text(APP.format(schema=schema))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naioqueue_schema = {schema}\nfilterwarnings = error\n")
    return tmp_path


def write(project: Path, kind: tuple[str, str, str, str]) -> str:
    imports, fixture, mark, other = kind
    backend = '\n\n\n@pytest.fixture(scope="session")\ndef anyio_backend():\n    return "asyncio"\n' if kind is ANYIO else ""
    (project / "conftest.py").write_text(CONFTEST.format(imports=imports, fixture=fixture) + backend)
    (project / "test_app.py").write_text(TESTS.format(mark=mark))
    return f"-pno:{other}"


def run(project: Path, server: Server, *options: str, uid: str, own_run: bool = False, **env: str) -> str:
    """Run pytest in the project on the server of these tests, as a process of run `uid` or as a run of its own; its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "AIOQUEUE", "PG"))}
    here = {"AIOQUEUE_TEST_DSN": server.dsn("superuser", "postgres")} | ({} if own_run else {"PYTEST_XDIST_TESTRUNUID": uid})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-pno:randomly", "-pno:cacheprovider", *options],
        cwd=project,
        env={**inherited, **here, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with psycopg.connect(server.dsn("superuser", "postgres")) as conn:
        left = {name for (name,) in conn.execute("SELECT datname FROM pg_database WHERE datname ~ %s", [f"^{PREFIX}"])}
    assert left == {PREFIX + run_name(uid)}
    return done.stdout


def test_the_plugin_is_found_by_its_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="pytest11", name="aioqueue")
    assert entry.value == "aioqueue.testing.plugin"


def test_the_kit_needs_no_pytest() -> None:
    program = "import sys, aioqueue.testing; assert not {'pytest', '_pytest', 'sqlalchemy', 'asyncpg'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_under_anyio_s_plugin(project: Path, server: Server, uid: str) -> None:
    out = run(project, server, write(project, ANYIO), "--aioqueue-timings", uid=uid)
    assert "2 passed" in out
    assert re.search(r"3 created: median \d+ ms", out)
    assert re.search(r"2 waited for by tests: median \d+ ms", out)


@pytest.mark.parametrize(("mode", "kind"), [("strict", STRICT), ("auto", AUTO)])
def test_under_pytest_asyncio(project: Path, server: Server, uid: str, mode: str, kind: tuple[str, str, str, str]) -> None:
    assert "2 passed" in run(project, server, write(project, kind), ASYNCIO, f"--asyncio-mode={mode}", uid=uid)


@pytest.mark.slow
def test_with_both_plugins_installed(project: Path, server: Server, uid: str) -> None:
    write(project, ANYIO)
    assert "2 passed" in run(project, server, ASYNCIO, uid=uid)


def test_with_processes_of_xdist(project: Path, server: Server, uid: str) -> None:
    out = run(project, server, write(project, ANYIO), "-n2", "--aioqueue-timings", uid=uid, own_run=True)
    assert "2 passed" in out
    assert re.search(r"2 waited for by tests: median \d+ ms", out)


SHARED = """
import psycopg


def test_one(aioqueue_shared_dsn, aioqueue_database):
    with psycopg.connect(aioqueue_shared_dsn) as conn:
        conn.execute("INSERT INTO note VALUES ('left')")
        who = conn.execute("SELECT current_user::text, current_database()::text").fetchone()
    assert who[0] == "aioqueue_worker"
    assert who[1] != aioqueue_database.name


def test_two(aioqueue_shared_dsn):
    with psycopg.connect(aioqueue_shared_dsn) as conn:
        assert conn.execute("SELECT * FROM note").fetchall() == [("left",)]
"""


def test_a_role_and_a_database_for_all_tests(project: Path, server: Server, uid: str) -> None:
    write(project, AUTO)
    (project / "test_app.py").write_text(SHARED)
    assert "2 passed" in run(project, server, "--aioqueue-role=aioqueue_worker", ASYNCIO, "--asyncio-mode=auto", uid=uid)


@pytest.mark.slow
def test_the_dsn_is_given_by_option_or_configuration_first(project: Path, server: Server, uid: str) -> None:
    write(project, AUTO)
    dsn, wrong = server.dsn("superuser", "postgres"), "postgresql://nobody@nowhere.invalid/none"
    options = (ASYNCIO, "--asyncio-mode=auto", "-k", "rolled")
    assert "1 passed" in run(project, server, f"--aioqueue-dsn={dsn}", *options, uid=uid, AIOQUEUE_TEST_DSN=wrong)
    with (project / "pytest.ini").open("a") as file:
        file.write(f"aioqueue_dsn = {dsn}\n")
    assert "1 passed" in run(project, server, *options, uid=uid, AIOQUEUE_TEST_DSN=wrong)
