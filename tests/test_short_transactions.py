"""Short transactions of a job that holds nothing: enqueues join them; a second one beside an open one is refused."""

import pytest

from aioqueue import AioQueue, JobContext, JobFailed, JobState, JobTransaction, Retry

pytestmark = pytest.mark.anyio


async def test_an_enqueue_inside_it_joins_it_and_its_tenant(worker_dsn: str, schema: str) -> None:
    app = AioQueue(worker_dsn, schema=schema)
    children = []

    @app.task(name="child")
    async def child(tx: JobTransaction) -> str | None:
        return tx.tenant

    @app.task(name="parent", retry=Retry(max_attempts=1))
    async def parent(ctx: JobContext) -> None:
        async with ctx.transaction():
            children.append(await child.enqueue())
        try:
            async with ctx.transaction():
                children.append(await child.enqueue())
                raise ZeroDivisionError
        except ZeroDivisionError:
            children.append(await child.enqueue())

    async with app, app.worker():
        await (await parent.options(tenant="T").enqueue()).result(20)
        kept, undone, outside = children
        assert await kept.result(20) == "T"
        assert await outside.result(20) == "T"
        async with app.database.runtime() as conn:
            assert await app.store.job_status(conn, undone.id) is None
        assert (await kept.status()).state is JobState.SUCCEEDED


async def test_a_second_one_inside_the_first_is_refused_instead_of_waiting_for_ever(worker_dsn: str, schema: str) -> None:
    app = AioQueue(worker_dsn, schema=schema)

    @app.task(name="nested", retry=Retry(max_attempts=1))
    async def nested(ctx: JobContext) -> None:
        async with ctx.transaction(), ctx.transaction():
            raise AssertionError("never reached")

    async with app, app.worker():
        with pytest.raises(JobFailed, match=r"is open already.*savepoint"):
            await (await nested.enqueue()).result(20)
