"""Tenants that are required: an enqueue without one is refused wherever it is made, but for cross-tenant tasks."""

from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue import AioQueue, JobContext, JobFailed, Retry, TaskDefinitionError, TenantRequired, TenantSettings
from tests.kit import Bench, session
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


def make_app(dsn: str, schema: str, *, required: bool = False) -> AioQueue:
    app = AioQueue(dsn, schema=schema, tenants=TenantSettings(required=required))

    @app.task(name="plain")
    async def plain() -> None:
        pass

    @app.task(name="strict", require_tenant=True)
    async def strict() -> None:
        pass

    @app.task(name="for all", require_tenant=False)
    async def for_all() -> None:
        pass

    return app


@pytest.mark.parametrize(("required", "refused"), [(False, {"strict"}), (True, {"plain", "strict"})])
async def test_an_enqueue_without_a_tenant_is_refused_where_the_task_or_the_app_says_so(
    worker_dsn: str, schema: str, shop: Session, required: bool, refused: set[str]
) -> None:
    async with make_app(worker_dsn, schema, required=required) as app:
        for name, task in app.tasks.items():
            for enqueue in (
                lambda task=task: task.enqueue(),
                lambda task=task: task.enqueue_many([{}, {}]),
                lambda task=task: task.options(on=app).enqueue(),
                lambda name=name: app.enqueue_by_name(name),
            ):
                if name in refused:
                    with pytest.raises(TenantRequired, match=rf"task '{name}' runs for a tenant only.*\.options\(tenant="):
                        await enqueue()
                else:
                    await enqueue()
            await task.options(tenant="a").enqueue()
        found = await shop.rows("SELECT task, tenant FROM aioqueue.job WHERE tenant = ''")
        assert {task for task, _ in found} == set(app.tasks) - refused


@pytest.mark.parametrize("required", [False, True])
async def test_a_client_that_knows_only_the_name_is_refused_by_the_database(
    worker_dsn: str, client_conn: AsyncConnection[Any], schema: str, required: bool, client_dsn: str
) -> None:
    """In SQL too, whatever options are given; and by an app that has not registered the task."""
    async with make_app(worker_dsn, schema, required=required) as app, app.worker():
        pass
    refused = {"strict", "plain"} if required else {"strict"}
    async with session(client_dsn, schema) as client, AioQueue(client_dsn, schema=schema) as stranger:
        for name in ("strict", "plain", "for all"):
            calls = (
                "SELECT aioqueue.enqueue(%s)",
                "SELECT aioqueue.enqueue(%s, queue => 'q', priority => 1, max_attempts => 2)",
            )
            for call in calls:
                if name not in refused:
                    await client.rows(call, name)
                    continue
                with pytest.raises(psycopg.Error, match=f"task {name} runs for a tenant only") as caught:
                    await client.rows(call, name)
                assert caught.value.sqlstate == "AQ004"
            await client.rows("SELECT aioqueue.enqueue(%s, tenant => 'a')", name)
            if name in refused:
                with pytest.raises(TenantRequired, match=name):
                    await stranger.enqueue_by_name(name)
                with pytest.raises(TenantRequired, match=name):
                    await stranger.enqueue_by_name(name, on=client_conn)
            else:
                await stranger.enqueue_by_name(name)
            await stranger.enqueue_by_name(name, tenant="a")


async def test_one_without_a_tenant_among_many_refuses_all(worker_dsn: str, schema: str, shop: Session, client_dsn: str) -> None:
    async with make_app(worker_dsn, schema) as app, app.worker():
        pass
    async with session(client_dsn, schema) as client:
        jobs = '[{"task": "strict", "tenant": "a"}, {"task": "plain"}, {"task": "strict"}]'
        with pytest.raises(psycopg.Error, match="task strict"):
            await client.rows("SELECT aioqueue.enqueue_many(%s)", jobs)
    assert await shop.rows("SELECT * FROM aioqueue.job") == []


async def test_what_a_worker_says_last_holds(worker_dsn: str, schema: str, shop: Session) -> None:
    for required in (True, False):
        async with make_app(worker_dsn, schema, required=required) as app, app.worker():
            pass
        rows = await shop.rows("SELECT name, require_tenant FROM aioqueue.task ORDER BY name")
        assert rows == [("for all", False), ("plain", required), ("strict", True)]


async def test_a_job_that_was_there_before_is_dead_at_once_and_never_run(worker_dsn: str, schema: str) -> None:
    async with make_app(worker_dsn, schema) as app:
        job = await app.get("plain").enqueue()
    ran: list[int] = []
    later = AioQueue(worker_dsn, schema=schema, tenants=TenantSettings(required=True))

    @later.task(name="plain", retry=Retry(max_attempts=5))
    async def plain() -> None:
        ran.append(1)

    async with later, later.worker():
        with pytest.raises(JobFailed, match=r"after attempt 1.*runs for a tenant only"):
            await later.job(job.id).result(20)
    assert not ran


async def test_children_inherit_and_another_tenant_is_named(at: Bench, shop: Session) -> None:
    app = at.tasks
    assert isinstance(app, AioQueue)

    @app.task(name="child", require_tenant=True)
    async def child() -> None:
        pass

    @app.task(name="parent")
    async def parent(ctx: JobContext) -> None:
        async with ctx.transaction():
            await child.enqueue()
            await child.options(tenant="b").enqueue()
            await app.enqueue_by_name("child")
            with pytest.raises(TenantRequired):
                await child.options(on=app).enqueue()

    outcome = await at.run("parent", tenant="a")
    assert getattr(outcome, "result", outcome) == "null"
    made = await shop.rows("SELECT tenant FROM aioqueue.job WHERE task = 'child' ORDER BY tenant")
    assert made == [("a",), ("a",), ("b",)]


@pytest.mark.parametrize("wrong", ["yes", 2])
def test_what_is_neither_true_nor_false_is_refused(wrong: Any) -> None:
    with pytest.raises(TaskDefinitionError, match="require_tenant"):

        @AioQueue().task(require_tenant=wrong)
        async def work() -> None:
            pass
