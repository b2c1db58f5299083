"""worker_roles: whose rights count, by who asks: the roles that were granted a worker's rights, or its own."""

import pytest

from aioqueue.sql import quote_schema
from tests.doctor.conftest import Execute
from tests.postgres import Database
from tests.sql.checks.conftest import Ask, MakeRole
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, whose grants are changed."""
    return own_database


async def told(ask: Ask, who: str, *, mine: bool = False, taken: str | None = None) -> list[str]:
    return [role for (role,) in await ask("worker_roles", by=(who,), mine=mine, taken=taken)]


async def test_an_administrator_is_told_all_and_others_their_own(ask: Ask, boss: Execute, make_role: MakeRole) -> None:
    """By a group, too; who can log in, and is not the owner or who may everything as it is."""
    await make_role("Night shift", "LOGIN IN ROLE aioqueue_worker")
    await make_role("no_heir", "LOGIN NOINHERIT IN ROLE aioqueue_worker")
    await make_role("no_login", "IN ROLE aioqueue_worker")
    await make_role("stranger", "LOGIN")
    await make_role("mighty", "LOGIN SUPERUSER")
    await make_role("deputy", "LOGIN IN ROLE aioqueue_owner")
    await boss(
        "GRANT aioqueue_worker TO aioqueue_owner",
        "CREATE FUNCTION public.claim() RETURNS int LANGUAGE sql RETURN 1",
        "GRANT EXECUTE ON FUNCTION public.claim() TO stranger",
    )
    try:
        for who in ("owner", "superuser"):
            assert await told(ask, who) == ["Night shift", "aioqueue_worker", "deputy", "no_heir"]
    finally:
        await boss("REVOKE aioqueue_worker FROM aioqueue_owner")
    for who in ("owner", "superuser"):
        assert await told(ask, who) == ["Night shift", "aioqueue_worker", "no_heir"]
    assert await told(ask, "worker") == ["aioqueue_worker"]
    assert await told(ask, "client") == ["aioqueue_client"]


async def test_a_worker_asks_for_itself_whoever_it_is(ask: Ask) -> None:
    assert [await told(ask, who, mine=True) for who in ("worker", "owner", "superuser")] == [
        ["aioqueue_worker"],
        ["aioqueue_owner"],
        ["postgres"],
    ]


async def test_the_role_that_transactions_take_on_counts_alone(ask: Ask, make_role: MakeRole) -> None:
    await make_role("Odd clerk")
    for mine in (False, True):
        assert await ask("worker_roles", mine=mine, taken="Odd clerk") == [("Odd clerk",)]
        assert await ask("worker_roles", mine=mine, taken="nobody") == []


async def test_where_nobody_was_granted_anything_workers_are_who_asks(ask: Ask, superuser: Session, make_role: MakeRole) -> None:
    """A right of everybody's names nobody; a superuser counts who was granted it by name."""
    every = f"ALL FUNCTIONS IN SCHEMA {quote_schema(superuser.store.schema)}"
    await superuser.rows(f"REVOKE ALL ON {every} FROM aioqueue_worker")
    await superuser.rows(f"GRANT EXECUTE ON {every} TO PUBLIC")
    assert await told(ask, "owner") == ["aioqueue_owner"]
    assert await told(ask, "superuser") == ["postgres"]
    await make_role("mighty", "LOGIN SUPERUSER")
    await superuser.rows(f"GRANT EXECUTE ON {every} TO mighty")
    assert await told(ask, "owner") == ["mighty"]
