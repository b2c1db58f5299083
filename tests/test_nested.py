"""Nested tenants: a block of another tenant's within a job's transaction, and the job's own again after it, also on error."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, LiteralString

import psycopg
import pytest

from aioqueue import (
    AioQueue,
    InvalidOption,
    Job,
    JobContext,
    JobFacts,
    JobState,
    JobTransaction,
    TenantSettings,
    TransactionViolation,
    current_job,
)
from aioqueue.outcome import Failed, Reason
from tests.kit import Bench, bench
from tests.shop import add_probe, assert_clean, notes, write
from tests.sql.engine import Session
from tests.test_identity import SEEN, clerk, user_of

pytestmark = pytest.mark.anyio

__all__ = ["clerk"]


async def test_a_block_is_the_other_tenants_and_what_comes_after_it_the_jobs_own(at: Bench, shop: Session) -> None:
    names: list[Any] = []

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        async with tx.tenant("b"):
            await write(tx, "inside")
            facts = current_job()
            names.append((tx.tenant, facts and facts.tenant, await tx.fetch_all("SELECT tenant FROM shop.note")))
            async with tx.tenant("c"):
                await write(tx, "deeper")
            await write(tx, "inside again")
        names.append((tx.tenant, await tx.fetch_all("SELECT tenant FROM shop.note")))
        await write(tx, "after")

    async def short(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await work(tx)

    at.tasks.task(name="work")(work)
    at.tasks.task(name="short")(short)
    found = add_probe(at)
    for task in ("work", "short"):
        outcome = await at.run(task, tenant="a")
        assert not isinstance(outcome, Failed), outcome
        assert names == [("b", "b", [("b",)]), ("a", [("a",)])]
        assert await notes(shop) == [
            ("a", "before"), ("b", "inside"), ("c", "deeper"), ("b", "inside again"), ("a", "after"),
        ]  # fmt: skip
        await shop.rows("DELETE FROM shop.note")
        await shop.rows("DELETE FROM aioqueue.live")
        names.clear()
    await assert_clean(at, found)


async def test_a_job_of_no_tenant_works_for_one_after_the_other(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        assert not tx.tenant
        for tenant in ("a", "b"):
            async with tx.tenant(tenant):
                await write(tx, "one")
            assert await tx.fetch_all("SELECT 1 FROM shop.note") == []

    at.tasks.task(name="work")(work)
    assert await at.run("work") is None, at.outcomes
    assert await notes(shop) == [("a", "one"), ("b", "one")]


async def test_an_error_in_a_block_rolls_it_back_and_restores_the_tenant(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        with pytest.raises(ZeroDivisionError):
            async with tx.tenant("b"):
                await write(tx, "gone")
                raise ZeroDivisionError
        with pytest.raises(psycopg.errors.DivisionByZero):
            async with tx.tenant("b"), tx.tenant("c"):
                await tx.execute("SELECT 1 / 0")
        assert tx.tenant == "a"
        await write(tx, "kept")

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert await notes(shop) == [("a", "kept")]


async def test_jobs_enqueued_in_a_block_are_the_other_tenants(worker_dsn: str, shop: Session) -> None:
    app = AioQueue(schema=shop.store.schema)

    @app.task(name="child")
    async def child() -> None:
        pass

    @app.task(name="parent")
    async def parent(tx: JobTransaction) -> None:
        await child.enqueue()
        async with tx.tenant("b"):
            await child.enqueue()
            await child.options(tenant="c").enqueue()
        await child.enqueue()

    async with bench(worker_dsn, shop, app) as at:
        assert await at.run("parent", tenant="a") is None, at.outcomes
        made = await shop.rows("SELECT tenant FROM aioqueue.job WHERE task = 'child' ORDER BY id")
        assert sorted(tenant for (tenant,) in made) == ["a", "a", "b", "c"]


@pytest.mark.parametrize("tenant", [None, "a"])
async def test_the_tenant_of_a_transaction_can_be_given_on(worker_dsn: str, shop: Session, tenant: str | None) -> None:
    """Empty is none there, and what is made of it keeps no transaction."""
    app = AioQueue(worker_dsn, schema=shop.store.schema)
    made: list[Job[None]] = []

    @app.task(name="child")
    async def child() -> None:
        pass

    @app.task(name="parent")
    async def parent(tx: JobTransaction) -> None:
        made.append(await child.options(tenant=tx.tenant).enqueue())
        made.append(app.job(made[0].id, tenant=tx.tenant))

    async with bench(worker_dsn, shop, app) as at, app:
        assert await at.run("parent", tenant=tenant) is None, at.outcomes
        assert await shop.rows("SELECT tenant FROM aioqueue.job WHERE task = 'child'") == [(tenant or "",)]
        assert [(job.tenant, type(job.tenant)) for job in made] == [(tenant, type(tenant))] * 2


async def test_a_handle_that_a_job_makes_is_of_the_tenant_of_its_job(worker_dsn: str, shop: Session) -> None:
    app = AioQueue(worker_dsn, schema=shop.store.schema)
    made: list[Job[None]] = []

    @app.task(name="child")
    async def child() -> None:
        pass

    @app.task(name="parent")
    async def parent(tx: JobTransaction) -> None:
        async with tx.tenant("b"):
            made.append(await child.enqueue())
            made.append(await app.enqueue_by_name("child"))
            made.extend(await child.enqueue_many([{}]))
        for job in made:
            await job.cancel()
        made.append(await child.enqueue())

    async with bench(worker_dsn, shop, app) as at, app:
        assert await at.run("parent", tenant="a") is None, at.outcomes
        assert [job.tenant for job in made] == ["b", "b", "b", "a"]
        assert [(await job.status()).state for job in made] == [JobState.CANCELLED] * 3 + [JobState.READY]


async def test_settings_and_role_follow_the_tenant(shop: Session, worker_dsn: str, clerk: str) -> None:
    def values(facts: JobFacts) -> Mapping[str, str]:
        return user_of(facts) if facts.tenant == "a" else {"app.region": "north"}

    seen: list[Any] = []

    async def work(tx: JobTransaction) -> None:
        async with tx.tenant("b"):
            seen.append(await tx.fetch_one(SEEN))
            seen.append(await tx.fetch_value("SELECT current_setting('app.region', true)"))
        seen.append(await tx.fetch_one(SEEN))
        seen.append(await tx.fetch_value("SELECT current_setting('app.region', true)"))

    tenants = TenantSettings(values=values, role=lambda facts: clerk if facts.tenant == "a" else None)
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), tenants=tenants) as at:
        at.tasks.task(name="work")(work)
        assert await at.run("work", tenant="a") is None, at.outcomes
    assert seen == [("b", "", "", "aioqueue_worker"), "north", ("a", "account of a", "1", clerk), ""]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("SET app.tenant = 'c'", "inside"),
        ("SET app.tenant = 'c'", "before"),
        ("SET LOCAL app.tenant = 'a'", "inside"),
        ("RESET app.tenant", "inside"),
        ("SET ROLE aioqueue_worker", "inside"),
        ("SET ROLE aioqueue_worker", "before"),
        ("ROLLBACK TO SAVEPOINT _pg3_2", "inside"),
        ("COMMIT; BEGIN", "inside"),
        ("COMMIT; BEGIN", "before"),
    ],
)
@pytest.mark.parametrize("swallows", [False, True], ids=["let out", "swallowed"])
async def test_a_block_hides_no_breach(at: Bench, shop: Session, text: LiteralString, where: str, swallows: bool) -> None:
    """Its end would put the tenant back, and the check at the end of the transaction see nothing."""
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        with contextlib.suppress(TransactionViolation, psycopg.Error) if swallows else contextlib.nullcontext():
            if where == "before":
                await tx.execute(text)
            async with tx.tenant("b"):
                if where == "inside":
                    await tx.execute(text)
                await write(tx, "wrong")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed), outcome
    # psycopg finds its savepoint gone before we look, and a transaction without a tenant refuses the write.
    refused = ("savepoint", "row-level security")
    assert outcome.reason is Reason.VIOLATION or any(word in outcome.error.message for word in refused), outcome
    assert await notes(shop) == []
    await assert_clean(at, found)


async def test_blocks_that_overlap_fail_the_job(at: Bench, shop: Session) -> None:
    """Two tasks of one job enter and leave them in turn: neither could know whose rows it sees."""

    async def work(tx: JobTransaction) -> None:
        first, second = tx.tenant("b"), tx.tenant("c")
        await first.__aenter__()
        await second.__aenter__()
        with contextlib.suppress(Exception):
            await first.__aexit__(None, None, None)
        with contextlib.suppress(Exception):
            await second.__aexit__(None, None, None)

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert "tx.tenant()" in outcome.error.message


@pytest.mark.parametrize("swallows", [False, True], ids=["let out", "swallowed"])
@pytest.mark.parametrize("act", ["enters", "writes", "enqueues"])
async def test_what_another_task_does_during_a_block_fails_the_job(
    worker_dsn: str, shop: Session, act: str, swallows: bool
) -> None:
    """It would be done for the tenant of a block that it knows nothing of."""
    app = AioQueue(schema=shop.store.schema)
    refused: list[BaseException] = []

    @app.task(name="child")
    async def child() -> None:
        pass

    @app.task(name="work")
    async def work(tx: JobTransaction) -> None:
        entered, done = asyncio.Event(), asyncio.Event()

        async def one() -> None:
            async with tx.tenant("b"):
                entered.set()
                await done.wait()
                await write(tx, "of b")
                await child.enqueue()

        async def other() -> None:
            await entered.wait()
            assert tx.tenant == "a"
            try:
                if act == "enters":
                    async with tx.tenant("c"):
                        pass
                elif act == "writes":
                    await write(tx, "of a")
                else:
                    await child.enqueue()
            except TransactionViolation as error:
                refused.append(error)
                if not swallows:
                    raise
            finally:
                done.set()

        await asyncio.gather(one(), other())

    async with bench(worker_dsn, shop, app) as at:
        outcome = await at.run("work", tenant="a")
        assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
        assert len(refused) == 1 and "innermost block of tx.tenant()" in outcome.error.message
        assert await notes(shop) == []
        assert await shop.rows("SELECT 1 FROM aioqueue.job WHERE task = 'child'") == []


async def test_a_statement_whose_turn_comes_in_another_tasks_block_is_refused(at: Bench, shop: Session) -> None:
    """It was sent off before the block was entered, and waits for the connection meanwhile."""

    async def work(tx: JobTransaction) -> None:
        async def enter() -> None:
            async with tx.tenant("b"):
                await write(tx, "of b")

        async with tx.connection.lock:
            writing = asyncio.create_task(write(tx, "of a"))
            entering = asyncio.create_task(enter())
            await asyncio.sleep(0)
        await asyncio.gather(entering, writing, return_exceptions=True)

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert await notes(shop) == []


async def test_tasks_that_are_started_in_a_block_are_in_it(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        async with tx.tenant("b"):

            async def one(body: str) -> None:
                assert tx.tenant == "b"
                await write(tx, body)

            await asyncio.gather(one("x"), one("y"))
        await asyncio.gather(*[write(tx, "z")])

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert sorted(await notes(shop)) == [("a", "z"), ("b", "x"), ("b", "y")]


async def test_a_task_that_outlives_its_block_sends_nothing_more(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        left = asyncio.Event()

        async def late() -> None:
            await left.wait()
            await write(tx, "late")

        async with tx.tenant("b"):
            task = asyncio.create_task(late())
        left.set()
        await task

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert await notes(shop) == []


async def test_a_block_in_one_of_the_same_tenant(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        async with tx.tenant("b"):
            async with tx.tenant("b"):
                await write(tx, "one")
            await write(tx, "two")
            async with tx.tenant("a"), tx.tenant("a"):
                await write(tx, "three")
        await write(tx, "four")

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    assert await notes(shop) == [("b", "one"), ("b", "two"), ("a", "three"), ("a", "four")]


async def test_a_cancelled_block_leaves_nothing(at: Bench, shop: Session) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        async with tx.tenant("b"):
            await write(tx, "one")
            await asyncio.Event().wait()

    at.tasks.task(name="work", timeout=0.2)(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.TIME_LIMIT
    assert await notes(shop) == []
    await assert_clean(at, found)


async def test_a_name_that_is_none_is_refused_before_anything_is_set(at: Bench) -> None:
    async def work(tx: JobTransaction) -> None:
        for name in ("", " ", "x" * 201, 7, None):
            with pytest.raises(InvalidOption):
                async with tx.tenant(name):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
                    raise AssertionError

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
