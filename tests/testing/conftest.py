"""An app with tasks of every kind on the test's database, and its queue."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import AioQueue, testing
from tests.kit import MakeApp
from tests.testing.tasks import register


@pytest.fixture
def app(make_app: MakeApp) -> AioQueue[Any]:
    """Closed: a queue opens it."""
    app = make_app()
    register(app)
    return app


@pytest.fixture
async def queue(app: AioQueue[Any], owner_dsn: str) -> AsyncIterator[testing.Queue]:
    async with testing.queue(app, owner_dsn=owner_dsn) as opened:
        yield opened


@pytest.fixture
async def notes(owner: AsyncConnection[TupleRow]) -> AsyncIterator[AsyncConnection[TupleRow]]:
    """The owner, who has a table notes.note that workers may write, each of their tenant."""
    await owner.execute("CREATE SCHEMA notes; CREATE TABLE notes.note (tenant text, text text)")
    await owner.execute("ALTER TABLE notes.note ENABLE ROW LEVEL SECURITY")
    await owner.execute("CREATE POLICY own ON notes.note USING (tenant = current_setting('app.tenant', true))")
    await owner.execute("GRANT USAGE ON SCHEMA notes TO aioqueue_worker; GRANT SELECT, INSERT ON notes.note TO aioqueue_worker")
    yield owner
    await owner.execute("DROP SCHEMA notes CASCADE")
