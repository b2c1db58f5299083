"""What policies go by: settings made of the job's facts and a role, set locally, checked at the end, gone afterwards."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from aioqueue import AioQueue, ConfigurationError, JobContext, JobFacts, JobTransaction, TenantSettings
from aioqueue.identity import Identity
from aioqueue.outcome import Failed, Reason
from tests.kit import Bench, bench
from tests.shop import notes, write
from tests.sql.engine import Session
from tests.test_context import JOB

pytestmark = pytest.mark.anyio

ROLE = 'Shop "clerk"'


@pytest.fixture
async def clerk(shop: Session) -> AsyncIterator[str]:
    """An ordinary role that the worker is a member of, with rights on the shop and none on aioqueue's schema."""
    name = sql.Identifier(ROLE)
    for text in (
        "CREATE ROLE {} NOLOGIN",
        "GRANT USAGE ON SCHEMA shop TO {}",
        "GRANT ALL ON ALL TABLES IN SCHEMA shop TO {}",
        "GRANT {} TO aioqueue_worker",
    ):
        await shop.conn.execute(sql.SQL(text).format(name))
    yield ROLE
    await shop.conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
    await shop.conn.execute(sql.SQL("DROP ROLE {}").format(name))


def user_of(facts: JobFacts) -> Mapping[str, str]:
    return {"app.account": f"account of {facts.tenant}", "app.attempt": str(facts.attempt)}


SEEN = (
    "SELECT current_setting('app.tenant', true), current_setting('app.account', true), current_setting('app.attempt', true),"
    " current_user::text"
)


def show(at: Bench, seen: list[Any]) -> None:
    async def work(tx: JobTransaction) -> None:
        seen.append(await tx.fetch_one(SEEN))
        await write(tx, "one")

    async def short(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await work(tx)

    at.tasks.task(name="work")(work)
    at.tasks.task(name="short")(short)


@pytest.mark.parametrize("task", ["work", "short"])
async def test_several_settings_and_the_role_are_set_and_gone_afterwards(
    shop: Session, worker_dsn: str, clerk: str, task: str
) -> None:
    tenants = TenantSettings(values=user_of, role=lambda facts: clerk if facts.tenant == "a" else None)
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), tenants=tenants) as at:
        seen: list[Any] = []
        show(at, seen)
        for tenant in ("a", "b", "a"):
            await at.run(task, tenant=tenant)
            assert await at.engine.value("SELECT count(*) FROM aioqueue.live WHERE worker IS NOT NULL") == (task == "short")
            await shop.rows("DELETE FROM aioqueue.live")
        assert not [outcome for outcome in at.outcomes.values() if isinstance(outcome, Failed)]
        a, b = ("a", "account of a", "1", clerk), ("b", "account of b", "1", "aioqueue_worker")
        assert seen == [a, b, a]
        async with at.database.runtime() as conn:
            row = await (await conn.execute(SEEN)).fetchone()
        assert row == ("", "", "", "aioqueue_worker")
    assert await notes(shop) == [("a", "one"), ("b", "one"), ("a", "one")]


BREAKS: dict[LiteralString, str] = {
    "SET app.account = 'root'": "app.account",
    "SET LOCAL app.attempt = '9'": "app.attempt",
    "SET LOCAL app.tenant = 'b'": "app.tenant",
    "RESET ROLE": "SET ROLE",
    "SET ROLE aioqueue_worker": "SET ROLE",
    "SET SESSION AUTHORIZATION aioqueue_worker": "SET ROLE",
    "SET SESSION AUTHORIZATION DEFAULT": "SET ROLE",
    "SAVEPOINT s; SET LOCAL app.account = 'root'; RELEASE s": "app.account",
    "SELECT set_config('aioqueue_job.role', 'aioqueue_worker', true), set_config('role', 'none', true)": "SET ROLE",
}


@pytest.mark.parametrize("text", BREAKS)
async def test_each_of_them_is_checked_at_the_end(shop: Session, worker_dsn: str, clerk: str, text: LiteralString) -> None:
    tenants = TenantSettings(values=user_of, role=clerk)
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), tenants=tenants) as at:

        async def work(tx: JobTransaction) -> None:
            await write(tx, "one")
            await tx.execute(text)

        at.tasks.task(name="work")(work)
        outcome = await at.run("work", tenant="a")
        assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
        assert BREAKS[text] in outcome.error.message
    assert await notes(shop) == []


async def test_a_savepoint_that_is_rolled_back_brings_them_back(shop: Session, worker_dsn: str, clerk: str) -> None:
    tenants = TenantSettings(values=user_of, role=clerk)
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), tenants=tenants) as at:

        async def work(tx: JobTransaction) -> None:
            await tx.execute("SAVEPOINT s; SET LOCAL app.account = 'root'; RESET ROLE; SET app.tenant = 'b'; ROLLBACK TO s")
            await write(tx, "one")

        at.tasks.task(name="work")(work)
        assert await at.run("work", tenant="a") is None, at.outcomes
    assert await notes(shop) == [("a", "one")]


@pytest.mark.parametrize("role", ["no such role", "aioqueue_owner"])
async def test_a_role_that_cannot_be_taken_fails_the_attempt_with_the_reason(shop: Session, worker_dsn: str, role: str) -> None:
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), tenants=TenantSettings(role=role)) as at:
        show(at, [])
        for task in ("work", "short"):
            outcome = await at.run(task, tenant="a")
            assert isinstance(outcome, Failed) and outcome.delay is not None, outcome
            assert role in outcome.error.message
    assert await notes(shop) == []


async def test_a_function_that_raises_fails_the_attempt(shop: Session, worker_dsn: str) -> None:
    def values(facts: JobFacts) -> Mapping[str, str]:
        raise LookupError(f"who is {facts.tenant}?")

    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), tenants=TenantSettings(values=values)) as at:
        show(at, [])
        for task in ("work", "short"):
            outcome = await at.run(task, tenant="a")
            assert isinstance(outcome, Failed) and outcome.error.message == "who is a?"
    assert await notes(shop) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tenant": "x"}, "a dot"),
        ({"app.tenant": "x"}, "aioqueue's own"),
        ({"aioqueue_job.marker": "x"}, "aioqueue's own"),
        ({"App.Tenant": "x"}, "aioqueue's own"),
        ({"AIOQUEUE_JOB.role": "x"}, "aioqueue's own"),
        ({"app.account": 7}, "app.account: expected a text"),
        ({"app.account": "a\0b"}, "app.account: expected a text"),
        ({7: "x"}, "a dot"),
    ],
)
def test_values_that_cannot_be_set_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Identity.of(JOB, TenantSettings(values=lambda _: given))


@pytest.mark.parametrize("role", ["", " ", 7])
def test_a_role_that_is_no_name_is_refused(role: Any) -> None:
    with pytest.raises(ConfigurationError, match="tenants role"):
        Identity.of(JOB, TenantSettings(role=lambda _: role))


async def test_an_enqueue_under_a_role_needs_the_rights_of_a_client(
    shop: Session, worker_dsn: str, owner: psycopg.AsyncConnection[Any], clerk: str
) -> None:
    app = AioQueue(schema=shop.store.schema)

    @app.task(name="child")
    async def child() -> None:
        pass

    @app.task(name="parent")
    async def parent(tx: JobTransaction) -> None:
        await child.enqueue()

    async with bench(worker_dsn, shop, app, tenants=TenantSettings(role=clerk)) as at:
        outcome = await at.run("parent", tenant="a")
        assert isinstance(outcome, Failed) and "permission denied for schema" in outcome.error.message
        schema = sql.Identifier(shop.store.schema)
        for text in ("GRANT USAGE ON SCHEMA {} TO {}", "GRANT EXECUTE ON FUNCTION {}.enqueue_alike TO {}"):
            await owner.execute(sql.SQL(text).format(schema, sql.Identifier(clerk)))
        await shop.rows("DELETE FROM aioqueue.live")
        assert await at.run("parent", tenant="a") is None, at.outcomes
        assert await shop.rows("SELECT task, tenant FROM aioqueue.job WHERE task = 'child'") == [("child", "a")]
