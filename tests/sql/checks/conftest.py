"""The statements of the doctor's checks, one by one: what each finds, row by row, told alike to all roles that may ask."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest

from aioqueue.doctor.examination import oids, quoted
from tests.doctor.conftest import Execute, boss, examination, shop  # noqa: F401 - fixtures of these tests, too
from tests.kit import session
from tests.postgres import Database
from tests.sql.engine import Session

Rows = list[tuple[Any, ...]]
Ask = Callable[..., Awaitable[Rows]]
MakeRole = Callable[..., Awaitable[None]]

EVERYBODY = ("worker", "owner", "client")


@pytest.fixture
def ask(database: Database, schema: str, superuser: Session) -> Ask:
    """A function that runs a check's statement as each of `by`, who must all be told the same; its rows.

    Tables are given by name, policies by table and name.
    """

    async def numbers(query: str, given: Iterable[Any]) -> str:
        return oids([await superuser.value(query, *each) for each in given])

    async def run(
        name: str,
        *,
        by: tuple[str, ...] = EVERYBODY,
        tables: Iterable[str] = (),
        related: Iterable[str] = (),
        policies: Iterable[tuple[str, str]] = (),
        **params: object,
    ) -> Rows:
        for kind, given in (("tables", tables), ("related", related)):
            params[kind] = await numbers("SELECT %s::regclass::oid::bigint", [(table,) for table in given])
        params["policies"] = await numbers(
            "SELECT oid::bigint FROM pg_policy WHERE polrelid = %s::regclass AND polname = %s", policies
        )
        found = []
        for role in by:
            async with examination(database, schema, role) as made:
                found.append([tuple(row.values()) for row in await made.rows(name, **params)])
        assert all(rows == found[0] for rows in found), found
        return found[0]

    return run


@pytest.fixture
async def make_role(boss: Execute) -> AsyncIterator[MakeRole]:  # noqa: F811
    """A function that creates a role, with these options; dropped after the test with all that it has."""
    made: list[str] = []

    async def create(name: str, options: str = "") -> None:
        await boss(f"CREATE ROLE {quoted(name)} {options}")
        made.append(quoted(name))

    yield create
    for name in reversed(made):
        await boss(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


@pytest.fixture
async def boss_session(database: Database, schema: str) -> AsyncIterator[Session]:
    """A session of the schema's owner."""
    async with session(database.dsn("owner"), schema) as made:
        yield made
