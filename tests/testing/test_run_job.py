"""run_job(): one job, committed, whatever else is ready."""

from typing import Any
from uuid import uuid4

import pytest
from psycopg import AsyncConnection
from psycopg.errors import InsufficientPrivilege
from psycopg.rows import TupleRow

from aioqueue import AioQueue, InvalidPayload, JobContext, JobState, JobTransaction, testing
from tests.kit import MakeApp
from tests.testing.tasks import Broken, Order, register

pytestmark = pytest.mark.anyio


async def test_runs_the_one_that_is_named(app: AioQueue[Any], queue: testing.Queue) -> None:
    first = await app.get("add").enqueue(1)
    second = await app.get("add").enqueue(2)
    ran = await queue.run_job(second)
    assert (ran.job_id, ran.state, ran.result) == (second.id, "succeeded", 3)
    assert (await first.status()).state is JobState.READY
    assert (await queue.run_job(str(first.id))).result == 2


async def test_takes_the_call_that_enqueues(app: AioQueue[Any], queue: testing.Queue) -> None:
    ran = await queue.run_job(app.get("order").options(tenant="42").enqueue(Order(customer="Ada", cents=[5])))
    assert (ran.result, ran.tenant) == (5, "42")
    with pytest.raises(InvalidPayload):
        await queue.run_job(app.get("add").enqueue("one"))


async def test_takes_what_an_assertion_returns(app: AioQueue[Any], queue: testing.Queue) -> None:
    await app.get("parent").enqueue(2)
    await queue.run_job((await queue.assert_enqueued("parent"))[0])
    _, second = await queue.assert_enqueued("add", count=2)
    assert (await queue.run_job(second)).result == 2


async def test_raises_the_task_s_own_error(app: AioQueue[Any], queue: testing.Queue) -> None:
    with pytest.raises(Broken):
        await queue.run_job(app.get("break").enqueue())
    ran = await queue.run_job(app.get("break").enqueue(), raises=False)
    assert (ran.state, ran.reason) == ("scheduled", "error")


async def test_the_time_of_a_scheduled_one_is_put_forward(app: AioQueue[Any], queue: testing.Queue) -> None:
    later = await app.get("add").options(delay=3600).enqueue(1)
    other = await app.get("add").options(delay=60).enqueue(2)
    assert (await queue.run_job(later)).state == "succeeded"
    assert (await other.status()).state is JobState.SCHEDULED


async def test_without_the_owner_s_rights_time_stands_still(app: AioQueue[Any]) -> None:
    async with testing.queue(app) as queue:
        later = await app.get("add").options(delay=3600).enqueue(1)
        with pytest.raises(testing.TestingError, match="owner_dsn"):
            await queue.run_job(later)
        with pytest.raises(testing.TestingError, match="owner_dsn"):
            await queue.drain(include_scheduled=True)


async def test_one_that_cannot_run_is_an_error_that_says_why(app: AioQueue[Any], queue: testing.Queue) -> None:
    job = await app.get("add").enqueue(1)
    await queue.drain()
    with pytest.raises(testing.TestingError, match="is succeeded"):
        await queue.run_job(job)
    with pytest.raises(testing.TestingError, match="is unknown"):
        await queue.run_job(uuid4())


async def test_in_a_paused_queue_too(app: AioQueue[Any], queue: testing.Queue, make_app: MakeApp, owner_dsn: str) -> None:
    async with make_app(owner_dsn) as owning:
        await owning.pause_queue("default")
    with pytest.raises(testing.TestingError, match="could not be claimed"):
        await queue.run_job(app.get("add").enqueue(1))


async def test_an_app_of_a_client_s_rights_has_its_jobs_run_by_a_worker_s(
    make_app: MakeApp, client_dsn: str, worker_dsn: str, owner_dsn: str, notes: AsyncConnection[TupleRow]
) -> None:
    app = make_app(client_dsn)
    register(app)
    async with testing.queue(app, worker_dsn=worker_dsn, owner_dsn=owner_dsn) as queue:
        ran = await queue.run_job(app.get("note").options(tenant="42", delay=60).enqueue("hello"))
        assert ran.state == "succeeded"
        await queue.assert_enqueued("note", tenant="42")
    rows = await (await notes.execute("SELECT * FROM notes.note")).fetchall()
    assert rows == [("42", "hello")]


async def test_row_level_security_holds(app: AioQueue[Any], queue: testing.Queue, notes: AsyncConnection[TupleRow]) -> None:
    @app.task(name="forge")
    async def forge(tx: JobTransaction) -> None:
        await tx.execute("INSERT INTO notes.note (tenant, text) VALUES ('43', 'not mine')")

    with pytest.raises(InsufficientPrivilege, match="row-level security"):
        await queue.run_job(forge.options(tenant="42").enqueue())


async def test_an_attempt_that_is_lost_unasked_is_an_error(app: AioQueue[Any], queue: testing.Queue) -> None:
    @app.task(name="zombie")
    async def zombie(ctx: JobContext) -> None:
        await queue._die(ctx.worker)

    with pytest.raises(testing.JobsFailed, match="attempt 1: lost"):
        await queue.run_job(zombie.enqueue())
