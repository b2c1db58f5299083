"""The few connections of a worker process: cancelled jobs lose none, nobody waits for another, the runtime keeps its own."""

import asyncio
import signal

import pytest

from tests.flow.processes import Flow
from tests.flow.tasks import made
from tests.kit import until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

POOL = 4
MINE = "FROM pg_stat_activity WHERE application_name = 'aioqueue' AND pid <> pg_backend_pid()"


async def test_hundreds_of_cancelled_jobs_lose_no_connection(flow: Flow, superuser: Session) -> None:
    worker = await flow.start(lease=10, poll=0.1, pool=POOL)
    async with made(flow.dsn, schema=flow.schema) as app:
        for _ in range(4):
            ids = await flow.enqueue("sleeps_in_query", 30) + await flow.enqueue("for_ever", 30)
            await flow.until("count(*) >= 3 FROM flow.note WHERE job_id = ANY (%s)", ids)
            await asyncio.gather(*(app.job(job).cancel() for job in ids))
            await flow.until_ended(ids)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"cancelled"}
    after = await flow.enqueue("counted", 20)
    await flow.until_ended(after)
    counted = await flow.owner.rows("SELECT job_id FROM flow.counted")
    assert {job for (job,) in counted} == set(after), "a cancelled job's transaction is rolled back"
    await until(superuser, f"SELECT count(*) <= %s AND bool_and(state = 'idle') {MINE}", POOL + 2)
    assert worker.process.poll() is None
    assert worker.log.count("cannot reach the database") == 0


async def test_a_job_cancelled_inside_its_query_leaves_none_running_and_the_next_one_works(
    flow: Flow, superuser: Session
) -> None:
    queries = f"{MINE} AND query = 'SELECT pg_sleep(60)' AND state = 'active'"
    await flow.start(lease=10, poll=0.1, pool=3)
    (job,) = await flow.enqueue("sleeps_in_query")
    await until(superuser, f"SELECT count(*) = 1 {queries}")
    await flow.command("job", "cancel", str(job))
    await flow.until_ended([job])
    assert await superuser.value(f"SELECT count(*) {queries}") == 0
    # The pool has one connection for jobs: the next one has that.
    (after,) = await flow.enqueue("counted")
    await flow.until_ended([after])
    assert await flow.outcomes() == {job: ("cancelled", 1), after: ("succeeded", 1)}


@pytest.mark.parametrize("outside", [False, True])
async def test_jobs_that_enqueue_inside_their_transactions_do_not_wait_for_each_other(flow: Flow, outside: bool) -> None:
    jobs = await flow.enqueue("enqueues", 30, payload=f'{{"outside": {str(outside).lower()}}}')
    await flow.start("-c", "30", pool=3)
    await flow.until("count(*) = 60 FROM aioqueue.outcome")
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    assert await flow.value("count(DISTINCT job_id) FROM flow.counted") == len(jobs)


async def test_a_worker_keeps_its_lease_while_its_jobs_have_every_connection_that_they_can_get(flow: Flow) -> None:
    worker = await flow.start("-c", "40", lease=1.5, pool=3)
    other = await flow.start("-c", "1", lease=1.5, pool=3)
    jobs = await flow.enqueue("keeps_transaction", 40)
    await flow.until_started(2)
    began = await flow.value("clock_timestamp()")
    await flow.until(
        "count(*) = 2 FROM aioqueue.worker WHERE pid = ANY (%s) AND NOT dead AND beat_at > %s + interval '4 s'",
        [worker.pid, other.pid], began,
    )  # fmt: skip
    flow.gate.open()
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    assert await flow.value("NOT EXISTS (SELECT FROM aioqueue.attempt WHERE reason <> 'no connection')"), "spared, and none lost"
    assert "lost its lease" not in worker.log + other.log


async def test_too_small_a_pool_is_refused_at_the_start(flow: Flow) -> None:
    worker = await flow.start(pool=2, ready=False)
    assert await worker.ended() != 0
    assert "pool size: at least 3" in worker.log


async def test_a_beat_over_a_third_of_the_lease_is_refused_at_the_start(flow: Flow) -> None:
    worker = await flow.start(lease=30, beat=11, ready=False)
    assert await worker.ended() != 0
    assert "beat: at most a third of the lease (10 s), got 11" in worker.log


async def test_idle_workers_end_at_once_when_they_are_signalled_and_leave_nothing(flow: Flow, superuser: Session) -> None:
    workers = [await flow.start(lease=None, ready=False) for _ in range(4)]
    await flow.until("count(*) = 4 FROM aioqueue.worker WHERE NOT dead")
    await until(superuser, f"SELECT count(*) = 4 {MINE} AND query LIKE 'LISTEN%%'")
    for worker in workers:
        worker.signal(signal.SIGTERM)
    for worker in workers:
        assert await worker.ended() == 0
        assert "Traceback" not in worker.log
    assert await flow.value("count(*) FROM aioqueue.worker") == 0
    await until(superuser, f"SELECT count(*) = 0 {MINE}")
