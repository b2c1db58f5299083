"""server_settings: as the sessions of the role that asks get them, in milliseconds."""

import pytest

from tests.doctor.conftest import Execute
from tests.postgres import Database
from tests.sql.checks.conftest import Ask

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, with which its settings go."""
    return own_database


async def test_the_idle_time_out_of_the_server_the_database_and_the_role(ask: Ask, boss: Execute, database: Database) -> None:
    assert await ask("server_settings") == [(0,)]
    await boss(f"ALTER DATABASE {database.name} SET idle_in_transaction_session_timeout = '1h'")
    assert await ask("server_settings") == [(3_600_000,)]
    await boss(f"ALTER ROLE aioqueue_worker IN DATABASE {database.name} SET idle_in_transaction_session_timeout = '5s'")
    assert await ask("server_settings", by=("worker",)) == [(5_000,)]
    assert await ask("server_settings", by=("owner", "client")) == [(3_600_000,)]
