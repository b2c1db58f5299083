"""set_queue: a paused queue's jobs are left where they are, and claimed once it is resumed."""

import psycopg
import pytest

from aioqueue.job import lane
from tests.sql.engine import LANE, Session

pytestmark = pytest.mark.anyio
OTHER = lane("other", 0)


@pytest.mark.parametrize("limited", [False, True])
async def test_a_paused_queue_gives_nothing_and_the_others_do(one: Session, limited: bool) -> None:
    if limited:
        await one.limit("somebody", 1)
    first, second = await one.enqueue_one(), await one.enqueue_one(queue="other")
    worker = await one.register()
    await one.store.set_queue(one.conn, "default", paused=True)
    assert [job.job_id for job in await one.claim(worker, lanes=[LANE, OTHER])] == [second]
    assert await one.state(first) == "ready"
    await one.store.set_queue(one.conn, "default", paused=False)
    assert [job.job_id for job in await one.claim(worker, lanes=[LANE, OTHER])] == [first]


async def test_what_runs_goes_on(one: Session) -> None:
    await one.enqueue()
    worker = await one.register()
    job = await one.claim_one(worker)
    await one.store.set_queue(one.conn, "default", paused=True)
    assert await one.record(worker, {"j": str(job.job_id), "l": job.lane, "v": job.vt, "a": 1, "o": "succeeded"}) == {
        job.job_id: "succeeded"
    }


@pytest.mark.parametrize("name", ["", " ", "x" * 201, None])
async def test_what_is_no_name_is_refused(one: Session, name: str | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await one.rows("SELECT aioqueue.set_queue(%s, true)", name)
