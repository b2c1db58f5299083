"""tenant_default: defaults of the tenant setting that are stored, and one that a session has besides."""

from collections.abc import AsyncIterator

import pytest

from tests.doctor.conftest import Execute
from tests.postgres import Database
from tests.sql.checks.conftest import Ask, MakeRole

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def afterwards(boss: Execute, database: Database) -> AsyncIterator[None]:
    yield
    await boss(
        "ALTER ROLE ALL RESET app.tenant",
        "ALTER ROLE aioqueue_worker RESET app.tenant",
        f"ALTER DATABASE {database.name} RESET ALL",
        "ALTER DATABASE postgres RESET app.tenant",
    )


async def test_stored_ones_of_this_database_and_of_all(ask: Ask, boss: Execute, database: Database, make_role: MakeRole) -> None:
    assert await ask("tenant_default") == []
    await make_role("a")
    await make_role('odd "role')
    here = database.name
    await boss(
        'ALTER ROLE a SET "App"."Tenant" = \'x=7\'',
        f'ALTER ROLE "odd ""role" IN DATABASE {here} SET app.tenant = \'8\'',
        f"ALTER DATABASE {here} SET app.tenant = '9'",
        "ALTER ROLE ALL SET app.tenant = '10'",
    )
    assert await ask("tenant_default") == [
        ('"odd ""role"', here, "8", True),
        ("a", None, "x=7", True),
        (None, here, "9", True),
        (None, None, "10", True),
    ]
    assert await ask("tenant_default", setting="APP.tenant") == await ask("tenant_default")


async def test_what_is_no_default_of_it(ask: Ask, boss: Execute, database: Database, make_role: MakeRole) -> None:
    """None is no tenant; other settings; another database's sessions."""
    await make_role("a")
    await boss(
        "ALTER ROLE a SET app.tenant = ''",
        f"ALTER DATABASE {database.name} SET app.tenant_kind = '7'",
        f"ALTER ROLE a IN DATABASE {database.name} SET my.app = 'app.tenant=7'",
        "ALTER DATABASE postgres SET app.tenant = '7'",
        "ALTER ROLE a IN DATABASE postgres SET app.tenant = '7'",
    )
    assert await ask("tenant_default") == []


async def test_one_that_comes_with_the_connection(ask: Ask, boss: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    await boss("ALTER ROLE aioqueue_worker SET app.tenant = '7'")
    monkeypatch.setenv("PGOPTIONS", "-c app.tenant=7")
    stored = ("aioqueue_worker", None, "7", True)
    assert await ask("tenant_default", by=("worker",)) == [stored], "it is the one that is stored"
    assert await ask("tenant_default", by=("owner", "client")) == [stored, (None, None, "7", False)]
    monkeypatch.setenv("PGOPTIONS", "-c app.tenant=8")
    assert await ask("tenant_default") == [stored, (None, None, "8", False)]
