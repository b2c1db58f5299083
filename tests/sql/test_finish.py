"""finish: running → succeeded as the last statement of the job's own transaction, or nothing of it commits."""

import asyncio
import json

import psycopg
import pytest

from aioqueue.transaction_store import NOT_OWNED, VIOLATION
from tests.sql.conftest import Connect
from tests.sql.engine import Session, blocked, changed, entry

pytestmark = pytest.mark.anyio


async def sqlstate(session: Session, *arguments: object, call: str = "finish") -> str | None:
    """Finish (or confirm); the SQLSTATE of its refusal, None for none."""
    try:
        await getattr(session, call)(*arguments)
    except psycopg.Error as error:
        return error.sqlstate
    return None


async def test_success_and_the_jobs_writes_commit_together(boss: Session, one: Session) -> None:
    job_id = await one.enqueue_one(tenant="T")
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    await one.rows("CREATE TEMP TABLE written AS SELECT 1")
    await one.finish(job, '{"total": 7}')
    assert await boss.state(job_id) == "running"
    await one.commit()
    (row,) = await boss.rows(
        "SELECT state, attempt, result, started_at IS NOT NULL, started_at <= finished_at FROM aioqueue.jobs"
    )
    assert row == ("succeeded", 1, {"total": 7}, True, True)
    assert await one.places(job_id) == ["outcome"]
    assert await one.value("SELECT count(*) FROM written") == 1


async def test_a_rollback_leaves_the_job_running(one: Session) -> None:
    job_id = await one.enqueue_one()
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    await one.finish(job)
    await one.rollback()
    assert await one.places(job_id) == ["live"]
    assert await one.state(job_id) == "running"


@pytest.mark.parametrize(("call", "result"), [("finish", ["7"]), ("confirm", [])])
async def test_a_worker_of_older_code_is_served_and_checked(one: Session, call: str, result: list[str]) -> None:
    """Until migration 11 the settings were an object of JSON, and the last but one argument."""
    await one.enqueue(tenant="T")
    job = await one.claim_one(await one.register())
    statement = f"SELECT aioqueue.{call}(%s, %s, %s, %s, %s{', %s::text::jsonb' * (1 + len(result))})"
    await one.open_job(job)
    with pytest.raises(psycopg.DatabaseError, match=r"app\.tenant") as refused:
        await one.rows(statement, *job.fence, json.dumps({"app.tenant": "U"}), *result)
    assert refused.value.sqlstate == VIOLATION
    await one.rollback()
    await one.open_job(job)
    await one.rows(statement, *job.fence, json.dumps({"app.tenant": "T"}), *result)
    await one.commit()
    assert await one.state(job.job_id) == ("succeeded" if result else "running")


@pytest.mark.parametrize("call", ["finish", "confirm"])
@pytest.mark.parametrize("part", ["lane", "vt", "attempt", "worker"])
async def test_each_part_of_the_fence_refuses(one: Session, part: str, call: str) -> None:
    await one.enqueue(tenant="T")
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    setattr(job, part, getattr(job, part) + 1)
    assert await sqlstate(one, job, call=call) == NOT_OWNED
    await one.rollback()


@pytest.mark.parametrize("call", ["finish", "confirm"])
@pytest.mark.parametrize(
    "act",
    [
        "COMMIT; BEGIN",
        "ROLLBACK; BEGIN",
        "SELECT set_config('app.tenant', 'other', true)",
        "SELECT set_config('app.tenant', '', true)",
        "SET LOCAL app.tenant TO DEFAULT",
        "SET LOCAL ROLE aioqueue_worker",
        "SET LOCAL row_security = off",
        "SELECT set_config('aioqueue_job.marker', 'guessed', true)",
    ],
)
async def test_a_transaction_that_is_no_longer_the_jobs_is_refused(boss: Session, connect: Connect, act: str, call: str) -> None:
    one = await connect("superuser")  # who may take any role
    await one.enqueue(tenant="T")
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    await one.rows(act)
    assert await sqlstate(one, job, call=call) == VIOLATION
    await one.rollback()
    assert await boss.state(job.job_id) == "running"


async def test_finish_waits_for_rescue_and_is_refused(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await boss.end_lease(worker)
    await two.begin()
    assert await two.rescue() == (worker, 1)
    await one.open_job(job)
    async with blocked(boss, one, sqlstate(one, job), by=two) as answer:
        await two.commit()
    assert answer.result() == NOT_OWNED
    await one.rollback()
    assert await two.state(job.job_id) == "ready"


async def test_rescue_passes_over_a_job_that_is_finishing(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.open_job(job)
    await one.finish(job)
    await boss.end_lease(worker)
    assert await two.rescue() == (worker, 0)
    await one.commit()
    assert await two.rescue() == (worker, 0)
    assert await two.rescue() is None
    assert await two.places(job.job_id) == ["outcome"]


async def test_of_two_finishes_one_wins(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    job = await one.claim_one(await one.register())
    for session in (one, two):
        await session.open_job(job)
    await one.finish(job, "1")
    async with blocked(boss, two, sqlstate(two, job, "2"), by=one) as answer:
        await one.commit()
    await two.rollback()
    assert answer.result() == NOT_OWNED
    assert await boss.value("SELECT result FROM aioqueue.jobs") == 1


async def test_a_finish_waits_for_a_cancel_and_keeps_its_success(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    job = await one.claim_one(await one.register())
    await two.begin()
    assert await two.cancel(job.job_id) == "running"
    await one.open_job(job)
    async with blocked(boss, one, one.finish(job), by=two):
        await two.commit()
    await one.commit()
    assert await one.state(job.job_id) == "succeeded"


async def test_sabotaged_without_the_worker_in_the_fence_a_zombie_commits(boss: Session, one: Session) -> None:
    await one.enqueue(2)
    worker = await one.register()
    jobs = await one.claim(worker)
    for job in jobs:
        job.worker += 1
    await one.open_job(jobs[0])
    assert await sqlstate(one, jobs[0]) == NOT_OWNED
    await one.rollback()
    async with changed(boss, "finish", ("l.worker = p_worker AND ", "")):
        await one.open_job(jobs[1])
        assert await sqlstate(one, jobs[1]) is None
        await one.rollback()


async def test_cancelling_the_client_while_it_waits_leaves_the_job_running(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue()
    job = await one.claim_one(await one.register())
    await two.begin()
    await two.cancel(job.job_id)
    await one.open_job(job)
    task = asyncio.create_task(sqlstate(one, job))
    await boss.wait_blocked(one, two)
    await two.value("SELECT pg_cancel_backend(%s)", one.pid)
    assert await task == "57014"
    await one.rollback()
    await two.commit()
    assert await one.record(job.worker, entry(job, "error", d=0)) == {job.job_id: "cancelled"}


async def test_the_keys_are_free_with_the_commit_and_not_before(one: Session, two: Session) -> None:
    key = await one.limit("T", 1)
    await one.enqueue(2, tenant="T")
    worker, other = await one.register(), await two.register()
    job = await one.claim_one(worker)
    await one.open_job(job)
    await one.finish(job)
    assert await two.claim(other) == [], "a claim does not wait for a job's own transaction"
    await one.rollback()
    assert await two.held() == [(key, job.job_id)]
    await one.open_job(job)
    await one.finish(job)
    await one.commit()
    assert await two.held() == [] and await two.unpark(key) == 1
    assert len(await two.claim(other)) == 1


async def test_what_a_limit_has_counted_meanwhile_goes_with_the_end(one: Session, two: Session) -> None:
    """The claim has given the job no key. Nothing is parked, so no sweep would come by and delete the row."""
    await one.enqueue_one(tenant="T")
    job = await one.claim_one(await one.register())
    key = await two.limit("T", 5)
    await two.store.settle_limits(two.conn)
    assert not job.keys and await two.held() == [(key, job.job_id)]
    await one.open_job(job)
    await one.finish(job)
    await one.commit()
    assert await two.held() == []
