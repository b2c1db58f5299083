"""What `on=` takes and what it refuses, without the import of any library that the caller has not imported."""

import subprocess
import sys
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from aioqueue import AioQueue, InvalidOption
from aioqueue.callers.caller import Statements
from aioqueue.callers.sqlalchemy import as_text
from tests.callers.conftest import Open
from tests.callers.drivers import AWAITED, BLOCKING, Driver
from tests.kit import MakeApp

pytestmark = pytest.mark.anyio


def test_nothing_is_imported_that_the_caller_has_not_imported() -> None:
    code = (
        "import sys, aioqueue; from aioqueue.callers import recognise; assert recognise(object()) is None;"
        "print(*{'asyncpg', 'sqlalchemy', 'sqlmodel', 'django', 'greenlet', 'psycopg2', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "wrong",
    ["dsn", 1, object(), psycopg.AsyncConnection, AioQueue("postgresql://nowhere/none")],
    ids=lambda wrong: type(wrong).__name__,
)
async def test_anything_else_is_refused_with_what_is_accepted(make_app: MakeApp, wrong: object) -> None:
    add = make_app().get("add").options(on=wrong)
    with pytest.raises(
        InvalidOption, match=r"on: expected a psycopg AsyncConnection, an asyncpg Connection, an SQLAlchemy Async"
    ):
        await add.enqueue(1)
    with pytest.raises(InvalidOption, match=r"on: expected a psycopg Connection, an SQLAlchemy Session or Connection, a Django"):
        add.enqueue_sync(1)


async def test_engines_and_pools_are_no_connections(make_app: MakeApp, client_dsn: str) -> None:
    url = sqlalchemy.make_url(client_dsn).set(drivername="postgresql+psycopg")
    async with asyncpg.create_pool(client_dsn, min_size=0) as pool:
        for wrong in (create_async_engine(url), sqlalchemy.create_engine(url), pool):
            with pytest.raises(InvalidOption, match=f"got {type(wrong).__module__}.{type(wrong).__name__}"):
                await make_app().get("add").options(on=wrong).enqueue(1)


@pytest.mark.parametrize("kind", BLOCKING, ids=lambda kind: kind.__name__)
async def test_a_library_that_blocks_is_told_of_enqueue_sync(make_app: MakeApp, open_driver: Open, kind: type[Driver]) -> None:
    async with open_driver(kind) as driver:
        with pytest.raises(InvalidOption, match=r"blocks: use enqueue_sync"):
            await make_app().get("add").options(on=driver.on).enqueue(1)


@pytest.mark.parametrize("kind", AWAITED, ids=lambda kind: kind.__name__)
async def test_a_library_that_awaits_is_told_of_enqueue(make_app: MakeApp, open_driver: Open, kind: type[Driver]) -> None:
    async with open_driver(kind) as driver:
        with pytest.raises(InvalidOption, match=r"is awaited: use 'await"):
            make_app().get("add").options(on=driver.on).enqueue_sync(1)


async def test_enqueue_sync_needs_a_connection(make_app: MakeApp) -> None:
    with pytest.raises(InvalidOption, match=r"on: enqueue_sync writes with your connection only"):
        make_app().get("add").enqueue_sync(1)


def test_another_database_is_refused(make_app: MakeApp) -> None:
    with Session(sqlalchemy.create_engine("sqlite://")) as other, pytest.raises(InvalidOption, match="dialect 'sqlite'"):
        make_app().get("add").options(on=other).enqueue_sync(1)


@pytest.mark.parametrize("dialect", [postgresql.asyncpg.dialect, postgresql.psycopg.dialect])
def test_a_schema_with_colons_reaches_the_server_as_it_is(dialect: Any) -> None:
    text = as_text(Statements('a:b ::c"d').cancel_job)
    compiled = text.compile(dialect=dialect())
    assert '"a:b ::c""d".cancel_job(' in str(compiled)
    assert set(compiled.params) == {"p1", "p2"}
