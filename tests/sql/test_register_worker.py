"""register_worker: a living worker, its tasks' defaults, and jobs that waited for a task it knows."""

import asyncio

import psycopg
import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


def task(name: str, **changes: object) -> dict[str, object]:
    return {"name": name, "queue": "default", "priority": 0, "max_attempts": 5, **changes}


async def test_the_worker_and_its_tasks_stand_in_their_tables(boss: Session, one: Session) -> None:
    worker = await one.register(tasks=[task("b", queue="q"), task("a", priority=-1, max_attempts=2)])
    assert await boss.rows("SELECT id, dead, running, lease_until > now() FROM aioqueue.worker") == [(worker, False, 0, True)]
    assert await boss.rows("SELECT name, queue, priority, max_attempts FROM aioqueue.task ORDER BY 1") == [
        ("a", "default", -1, 2), ("b", "q", 0, 5),
    ]  # fmt: skip


async def test_what_it_takes_of_the_servers_connections_and_as_whom(boss: Session, one: Session) -> None:
    await one.register(1)
    assert await boss.rows("SELECT connections, role FROM aioqueue.worker") == [(None, "aioqueue_worker")]
    await one.store.register_worker(
        one.conn, worker=2, host="h", pid=1, version="0", queues=["q"], concurrency=1, lease=60, tasks=[], connections=6
    )
    assert await boss.value("SELECT connections FROM aioqueue.worker WHERE id = 2") == 6


async def test_an_identity_is_used_once(one: Session) -> None:
    worker = await one.register()
    with pytest.raises(psycopg.errors.UniqueViolation):
        await one.register(worker)


async def test_tasks_are_written_only_when_changed(boss: Session, one: Session) -> None:
    await one.register(tasks=[task("a"), task("b")])
    before = dict(await boss.rows("SELECT name, xmin::text FROM aioqueue.task"))
    stamps = dict(await boss.rows("SELECT name, seen_at FROM aioqueue.task"))
    await one.register(tasks=[task("a"), task("b", queue="new")])
    after = dict(await boss.rows("SELECT name, seen_at FROM aioqueue.task"))
    assert after["a"] == stamps["a"]
    assert after["b"] > stamps["b"]
    assert set(before) == {"a", "b"}


async def test_workers_that_start_together_with_tasks_in_any_order_do_not_deadlock(
    one: Session, two: Session, three: Session
) -> None:
    names = [f"task {n}" for n in range(30)]

    async def start(session: Session, order: list[str]) -> None:
        for n in range(10):
            await session.register(tasks=[task(name, priority=n % 3) for name in order])

    await asyncio.gather(start(one, names), start(two, names[::-1]), start(three, names[15:] + names[:15]))


async def test_jobs_of_a_task_that_nobody_knew_are_due_at_once(boss: Session, one: Session) -> None:
    known, unknown = await one.enqueue_one(task="new"), await one.enqueue_one(task="other")
    worker = await one.register()
    jobs = await one.claim(worker)
    await one.record(worker, *(entry(job, "unknown task", d=600, s=True, u=job.task) for job in jobs))
    assert await one.store.promote(one.conn, limit=10) == 0
    await one.register(tasks=[task("new")])
    assert await one.store.promote(one.conn, limit=10) == 1
    assert (await one.state(known), await one.state(unknown)) == ("ready", "scheduled")
    again = await one.claim_one(worker)
    assert (again.job_id, again.attempt, again.spared) == (known, 2, 1)


async def test_a_cancel_of_such_a_job_wins_or_loses_but_never_doubles(boss: Session, one: Session, two: Session) -> None:
    job_id = await one.enqueue_one(delay=600)
    await boss.rows("UPDATE aioqueue.scheduled SET unknown_task = 't'")
    await two.begin()
    await two.register(tasks=[task("t")])
    answer = asyncio.create_task(one.cancel(job_id))
    await boss.wait_blocked(one, two)
    await two.commit()
    assert await answer == "cancelled"
    assert await one.places(job_id) == ["outcome"]


async def test_limits_of_tasks_come_and_go_with_the_code(boss: Session, one: Session) -> None:
    rows = "SELECT kind, name, max_running, settled FROM aioqueue.limits ORDER BY kind"
    await one.limit_task("t", 5, per_key=2)
    assert await boss.rows(rows) == [("key", "t", 2, True), ("task", "t", 5, True)]
    await one.limit_task("t", 6)
    assert await boss.rows(rows) == [("task", "t", 6, True)]
    await one.limit_task("u")
    await one.limit_task("t")
    assert await boss.rows(rows) == []
