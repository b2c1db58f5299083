"""`job.retry()`: a dead or cancelled job is run again as a new one; the handle of that is of the same type and tenant."""

import pytest

from aioqueue import (
    AioQueue,
    AppNotOpen,
    JobContext,
    JobFailed,
    JobNotFound,
    JobState,
    JobTransaction,
    Retry,
    RetryRefused,
    TenantRequired,
    TenantSettings,
)
from tests.kit import MakeApp
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_the_old_job_keeps_its_end_and_the_new_one_runs(app: AioQueue) -> None:
    broken = True

    @app.task(name="mend", retry=Retry(max_attempts=1))
    async def mend(n: int) -> int:
        if broken:
            raise ValueError("not yet")
        return n

    async with app.worker():
        old = await mend.options(tenant="a").enqueue(7)
        with pytest.raises(JobFailed):
            await old.result(30)
        broken = False
        new = await app.job(old.id, of=mend, tenant="a").retry()
        assert await new.result(30) == 7
    assert (new.id != old.id, new.tenant) == (True, "a")
    status = await new.status()
    assert (status.state, status.retry_of, status.tenant) == (JobState.SUCCEEDED, old.id, "a")
    assert (await old.status()).state is JobState.DEAD


async def test_what_has_not_ended_badly_is_refused(app: AioQueue) -> None:
    job = await app.get("add").enqueue(1)
    with pytest.raises(RetryRefused, match=f"job {job.id} is neither dead nor cancelled but unfinished") as refused:
        await job.retry()
    assert refused.value.job_id == job.id
    async with app.worker():
        await job.result(30)
    with pytest.raises(RetryRefused, match="but succeeded; only such jobs can be run again"):
        await job.retry()


async def test_another_tenants_job_is_as_unknown_as_none(app: AioQueue) -> None:
    job = await app.get("add").options(tenant="a").enqueue(1)
    await job.cancel()
    with pytest.raises(JobNotFound):
        await app.job(job.id, tenant="b").retry()

    @app.task(name="tries")
    async def tries(ctx: JobContext, job_id: str) -> str:
        try:
            return str((await app.job(job_id).retry()).tenant)
        except JobNotFound:
            return "unknown"

    async with app.worker():
        assert await (await tries.options(tenant="b").enqueue(str(job.id))).result(30) == "unknown"
        assert await (await tries.options(tenant="a").enqueue(str(job.id))).result(30) == "None"


async def test_in_a_jobs_own_transaction_it_is_rolled_back_with_it(app: AioQueue, boss: Session) -> None:
    old = await app.get("add").options(tenant="a").enqueue(1)
    await old.cancel()

    @app.task(name="again", retry=Retry(max_attempts=1))
    async def again(tx: JobTransaction, fails: bool) -> str:
        new = await old.retry()
        if fails:
            raise ValueError
        return str(new.id)

    async with app.worker(queues=["default"]):
        with pytest.raises(JobFailed):
            await (await again.options(tenant="a").enqueue(True)).result(30)
        assert await boss.rows("SELECT FROM aioqueue.job WHERE retry_of IS NOT NULL") == []
        new = await (await again.options(tenant="a").enqueue(False)).result(30)
        assert await app.job(new).result(30) == 2
    assert await boss.rows("SELECT id::text, retry_of FROM aioqueue.job WHERE retry_of IS NOT NULL") == [(new, old.id)]


async def test_a_job_without_a_tenant_that_its_task_requires_now_says_so(make_app: MakeApp) -> None:
    async with make_app() as before:
        old = await before.get("add").enqueue(1)
        await old.cancel()
    async with make_app(tenants=TenantSettings(required=True)) as app, app.worker():
        with pytest.raises(TenantRequired, match="task 'add'"):
            await app.job(old.id).retry()


async def test_it_needs_an_open_app(make_app: MakeApp) -> None:
    async with make_app() as app:
        job = await app.get("add").enqueue(1)
    with pytest.raises(AppNotOpen):
        await job.retry()
