"""report: what running jobs say of themselves, for many at once; a zombie's word changes nothing."""

import json
from typing import Any

import psycopg
import pytest

from tests.sql.engine import Session, progress

pytestmark = pytest.mark.anyio


async def report(session: Session, *reports: dict[str, object]) -> None:
    await session.store.report(session.conn, json.dumps(reports))


async def rows(boss: Session) -> list[tuple[Any, ...]]:
    return await boss.rows("SELECT job_id, attempt, number, value, message FROM aioqueue.progress ORDER BY 1, 2, 3")


async def test_each_report_takes_the_place_of_the_one_before(boss: Session, one: Session) -> None:
    ids = sorted(await one.enqueue(3))
    jobs = {job.job_id: job for job in await one.claim(await one.register())}
    await report(one, *(progress(jobs[job_id], 0.25, m="ü") for job_id in ids))
    assert await rows(boss) == [(job_id, 1, 1, 0.25, "ü") for job_id in ids]
    first, second, third = (jobs[job_id] for job_id in ids)
    await report(one, progress(first, 0.5, 2, [1]), progress(second, 1, 7, [1, 5, 6]), progress(third, None, 1, [1]))
    assert await rows(boss) == [(ids[0], 1, 2, 0.5, None), (ids[1], 1, 7, 1.0, None)]
    now = "SELECT bool_and(reported_at BETWEEN now() - interval '1 min' AND clock_timestamp()) FROM aioqueue.progress"
    assert await boss.value(now)


async def test_the_same_call_again_changes_nothing(boss: Session, one: Session) -> None:
    await one.enqueue_one()
    job = await one.claim_one(await one.register())
    for _ in range(2):
        await report(one, progress(job, 0.25))
    await report(one, progress(job, 0.75))
    assert [row[2:4] for row in await rows(boss)] == [(1, 0.25)]


async def test_a_job_that_is_no_longer_the_workers_gets_no_row(boss: Session, one: Session) -> None:
    ids = await one.enqueue(3)
    worker = await one.register()
    lost, ended, other = await one.claim(worker)
    await boss.end_lease(worker)
    await one.rescue()
    again = await one.claim(await one.register())
    await one.record(again[0].worker, {"j": str(ended.job_id), "l": 0, "v": 0, "a": 2, "o": "succeeded"})
    await report(one, progress(lost), progress(ended), progress(other), *(progress(job, 0.75) for job in again[:1]))
    assert [(row[0], row[1], row[3]) for row in await rows(boss)] == [(again[0].job_id, 2, 0.75)]
    assert {job.job_id for job in again} == set(ids)


async def test_a_zombie_removes_nothing_of_its_successors(boss: Session, one: Session) -> None:
    await one.enqueue_one()
    worker = await one.register()
    zombie = await one.claim_one(worker)
    await boss.end_lease(worker)
    await one.rescue()
    job = await one.claim_one(await one.register())
    await report(one, progress(job))
    # As after a failover, when both count alike.
    zombie.attempt = job.attempt
    await report(one, progress(zombie, 1, 2, [1]), progress(zombie, None, 2, [1]))
    assert [row[2:4] for row in await rows(boss)] == [(1, 0.5)]


async def test_it_waits_for_nobody_who_holds_the_job(boss: Session, one: Session, two: Session) -> None:
    await one.enqueue_one()
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    await one.finish(job)
    await report(two, progress(job))
    assert len(await rows(boss)) == 1
    await one.commit()


@pytest.mark.parametrize("wrong", [{"p": 1.5}, {"p": -0.1}, {"m": "x" * 501}])
async def test_what_is_no_share_or_too_long_is_refused(one: Session, wrong: dict[str, Any]) -> None:
    await one.enqueue_one()
    job = await one.claim_one(await one.register())
    with pytest.raises(psycopg.errors.CheckViolation):
        await report(one, {**progress(job), **wrong})


async def test_the_client_may_not_call_it(one: Session, guest: Session) -> None:
    await one.enqueue_one()
    job = await one.claim_one(await one.register())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await report(guest, progress(job))


async def test_the_table_costs_no_wal(boss: Session) -> None:
    assert await boss.value("SELECT relpersistence FROM pg_class WHERE oid = 'aioqueue.progress'::regclass") == "u"


async def test_a_report_and_a_look_cost_the_same_after_many_under_a_held_horizon(
    boss: Session, one: Session, two: Session
) -> None:
    """Each writes a row and leaves a dead one, all of which stay; neither may walk over them."""
    job_id = await one.enqueue_one()
    job = await one.claim_one(await one.register())
    await two.begin()
    await two.rows("SELECT pg_current_xact_id()")
    number = 0

    async def buffers(statement: str, *params: object) -> int:
        found = []
        for _ in range(3):
            ((plan,),) = await one.rows(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *params)
            found.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
        return min(found)

    async def price() -> tuple[int, int]:
        nonlocal number
        again = [progress(job, 0.5, number + 1, [number])]
        wrote = await buffers("SELECT aioqueue.report(%s::text::jsonb)", json.dumps(again))
        number += 1
        return wrote, await buffers("SELECT * FROM aioqueue.follow(%s::uuid[], ARRAY[NULL])", [job_id])

    async def more(times: int) -> None:
        nonlocal number
        for _ in range(times):
            await report(one, progress(job, 0.5, number + 1, [number]))
            number += 1

    await more(10)
    first = await price()
    await more(1_500)
    last = await price()
    await two.commit()
    assert [now <= before + 6 for before, now in zip(first, last, strict=True)] == [True, True], (first, last)
