"""A caller's connection of each library, in a transaction of the client's role, and a table of the caller's own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from tests.callers.drivers import AWAITED, BLOCKING, Driver

Open = Callable[..., AbstractAsyncContextManager[Driver]]


@pytest.fixture
def open_driver(client_dsn: str) -> Open:
    """Opens a connection of a library."""

    @asynccontextmanager
    async def opening(kind: type[Driver], **options: Any) -> AsyncIterator[Driver]:
        driver = kind(client_dsn, **options)
        await driver.open()
        try:
            yield driver
        finally:
            await driver.close()

    return opening


@pytest.fixture(params=[*AWAITED, *BLOCKING], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[Driver]:
    return request.param


@pytest.fixture
async def driver(open_driver: Open, kind: type[Driver]) -> AsyncIterator[Driver]:
    """The caller's connection; nothing has been done on it."""
    async with open_driver(kind) as opened:
        yield opened


@pytest.fixture
async def shop(owner: AsyncConnection[TupleRow]) -> AsyncIterator[AsyncConnection[TupleRow]]:
    """The owner, who has a table shop.orders (n int) that callers may write."""
    await owner.execute("CREATE SCHEMA shop; CREATE TABLE shop.orders (n int PRIMARY KEY)")
    await owner.execute("GRANT USAGE ON SCHEMA shop TO aioqueue_client; GRANT SELECT, INSERT ON shop.orders TO aioqueue_client")
    yield owner
    await owner.execute("DROP SCHEMA shop CASCADE")
