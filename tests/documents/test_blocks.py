"""Every block of code of every page runs, on a real server; what does not is an exception with its reason (pages.py)."""

import asyncio
import os
import sys
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from aioqueue import embedded, migrate
from tests.documents import given
from tests.documents.pages import ALL, NOT_RUN, PAGES, ROOT, blocks
from tests.documents.runner import PageRun, remove_embedded_data
from tests.postgres import Database, Server

pytestmark = pytest.mark.anyio

OWN_TEST = {"tutorial.md": "tests/documents/test_tutorial.py"}
"""Pages whose blocks are run in another way."""
WITH_CODE = [page for page in PAGES if page.name not in OWN_TEST and any(block.runs for block in blocks(page))]


def test_there_is_something_to_run() -> None:
    assert len(ALL) >= 35
    assert {"README.md", "transactions.md", "fastapi.md"} <= {page.name for page in WITH_CODE}


def test_every_exception_is_still_there() -> None:
    assert set(NOT_RUN) <= {(block.page, block.first) for block in ALL}
    assert all((ROOT / test).exists() for test in OWN_TEST.values())


async def administer(dsn: str, *statements: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        for statement in statements:
            await conn.execute(statement.encode())


@pytest.fixture(scope="module")
def default_schema(server: Server) -> Iterator[Database]:
    """A database with the schema under its default name, which the pages use; it is copied only."""
    database = server.create()

    async def prepare() -> None:
        await migrate.migrate(database.dsn("owner"))
        await migrate.grant(database.dsn("owner"), role="aioqueue_worker", kind="worker")
        await migrate.grant(database.dsn("owner"), role="aioqueue_client", kind="client")

    asyncio.run(prepare())
    yield database
    server.drop(database)


@pytest.fixture
async def page_database(server: Server, default_schema: Database) -> AsyncIterator[Database]:
    """A database of the page's own, with the roles that pages speak of."""
    database = server.create(default_schema)
    boss = database.dsn("superuser")
    remove = f"DROP ROLE IF EXISTS {', '.join(given.MADE)}"
    await administer(boss, remove, given.ROLES, given.TABLES, f"ALTER DATABASE {database.name} SET search_path = shop, public")
    yield database
    for role in given.MADE:
        await administer(
            boss,
            f"DO $$ BEGIN IF to_regrole('{role}') IS NOT NULL THEN DROP OWNED BY {role}; DROP ROLE {role}; END IF; END $$",
        )
    server.drop(database)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
async def test_the_page_runs(page: Path, page_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOQUEUE_DSN", page_database.dsn("worker"))
    monkeypatch.chdir(tmp_path)
    # What a reader who has installed it has on the path, and PostgreSQL's programs of the wheel.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), str(embedded.programs()), os.environ["PATH"]]))
    (tasks,) = [block for block in blocks(PAGES[0]) if block.file == "tasks.py"]
    module = types.ModuleType("tasks")
    monkeypatch.setitem(sys.modules, "tasks", module)  # where pydantic looks for what a model's annotations name
    exec(compile(tasks.text, str(tasks), "exec"), module.__dict__)  # noqa: S102 - the project's own page
    (tmp_path / "tasks.py").write_text(tasks.text)
    run = PageRun(page_database, tmp_path, module.__dict__)
    async with run.opened:
        run.opened.callback(remove_embedded_data)
        await given.every_page(run)
        if page.name in given.BEFORE:
            await given.BEFORE[page.name](run)
        if page.name in given.SQL:
            await run.sql(given.SQL[page.name], "owner")
        for block in blocks(page):
            try:
                await run.run(block)
            except Exception as error:
                error.add_note(f"in the block {block}; what its fragments are given stands in tests/documents/given.py")
                raise
        await run.pytest(page.name)
        if page.name in given.AFTER:
            await given.AFTER[page.name](run)
