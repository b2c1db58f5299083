"""connections: of each role what its workers may take and what its sessions have, here and everywhere; and the limits."""

from contextlib import AsyncExitStack
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.doctor.conftest import Execute, connection
from tests.postgres import Database
from tests.sql.checks.conftest import Ask, MakeRole
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, whose limit is set."""
    return own_database


async def of(ask: Ask, role: str | None, who: str = "owner") -> list[tuple[Any, ...]]:
    """The row of a role without its name; others' sessions come and go."""
    return [tuple(row[1:]) for row in await ask("connections", by=(who,), usual=6) if row[0] == role]


async def register(session: Session, role: str | None, *connections: int | None) -> None:
    """Register workers that connect as this role."""
    for each in connections:
        worker = await session.register()
        await session.rows("UPDATE aioqueue.worker SET role = %s, connections = %s WHERE id = %s", role, each, worker)


async def test_sessions_and_living_workers_of_a_role(
    ask: Ask, boss: Execute, database: Database, superuser: Session, make_role: MakeRole
) -> None:
    """A worker that does not say what it takes counts as usual; the dead, and those whose lease is over, not at all."""
    odd = 'Odd "one'
    await make_role(odd, "LOGIN CONNECTION LIMIT 7")
    await make_role("other", "LOGIN")
    await make_role("without_workers", "LOGIN")
    await boss(f"ALTER DATABASE {database.name} CONNECTION LIMIT 50")
    here, elsewhere = database.dsn("superuser"), database.server.dsn("superuser", "postgres")
    limits = (50, database.name, 200, 3)
    for who in ("worker", "owner"):
        assert await of(ask, odd, who) == []
    async with AsyncExitStack() as stack:
        for dsn in (here, here, elsewhere):
            await stack.enter_async_context(connection(make_conninfo(dsn, user=odd)))
        await stack.enter_async_context(connection(make_conninfo(here, user="without_workers")))
        await register(superuser, "other", 1, 2, None)
        await register(superuser, odd, 4, 5, 6)
        first, second = [each for (each,) in await superuser.rows("SELECT id FROM aioqueue.worker WHERE connections IN (4, 5)")]
        await superuser.rows("UPDATE aioqueue.worker SET dead = true WHERE id = %s", first)
        await superuser.end_lease(second)
        for who in ("worker", "owner"):
            assert await of(ask, odd, who) == [(1, 6, 3, 2, 7, '"Odd ""one"', *limits)]
            assert await of(ask, "other", who) == [(3, 9, 0, 0, -1, "other", *limits)]
            assert await of(ask, "without_workers", who) == [(0, 0, 1, 1, -1, "without_workers", *limits)]


async def test_a_worker_whose_role_is_not_known_is_one_of_who_asks(ask: Ask, superuser: Session) -> None:
    await register(superuser, None, 9)
    for who, role in (("worker", "aioqueue_worker"), ("owner", "aioqueue_owner")):
        ((workers, need, *_),) = await of(ask, role, who)
        assert (workers, need) == (1, 9)


async def test_the_session_that_asks_is_not_counted(ask: Ask, database: Database) -> None:
    """Where no other is there, a row has the limits all the same."""
    rows = await ask("connections", by=("worker",), usual=6)
    assert "aioqueue_worker" not in {row[0] for row in rows}
    assert {row[7:] for row in rows} == {(-1, database.name, 200, 3)}
