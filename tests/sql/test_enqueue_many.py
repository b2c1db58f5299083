"""enqueue_many: jobs in the caller's transaction, with their options, checked, at positions above virtual time."""

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from aioqueue.job import lane, new_job_id
from tests.sql.conftest import Connect
from tests.sql.engine import LANE, Session, blocked

pytestmark = pytest.mark.anyio


async def many(session: Session, *jobs: Any) -> list[UUID]:
    """Enqueue jobs as a client in any language would."""
    return [row[0] for row in await session.rows("SELECT aioqueue.enqueue_many(%s::jsonb)", json.dumps(jobs))]


async def test_one_with_every_option_and_one_with_none(boss: Session, guest: Session) -> None:
    job_id = uuid4()
    full = {
        "task": "a", "payload": [1, None], "tenant": "T", "queue": "q", "priority": -2, "delay": 90.5, "max_attempts": 9,
        "id": str(job_id),
    }  # fmt: skip
    first, second = await many(guest, full, {"task": "b"})
    assert first == job_id
    rows = await boss.rows(
        "SELECT id, task, payload, tenant, queue, priority, max_attempts, state, run_at - created_at"
        " FROM aioqueue.jobs ORDER BY task"
    )
    assert rows[0][:8] == (job_id, "a", [1, None], "T", "q", -2, 9, "scheduled")
    assert rows[0][8].total_seconds() == pytest.approx(90.5)
    assert rows[1] == (second, "b", {}, None, "default", 0, 5, "ready", None)
    assert second.version == 7


async def test_ids_come_in_the_order_of_the_jobs(guest: Session) -> None:
    ids = [uuid4() for _ in range(50)]
    assert await many(guest, *({"task": "a", "id": str(i), "delay": n % 3} for n, i in enumerate(ids))) == ids


async def test_options_left_out_come_from_what_workers_wrote(boss: Session, one: Session, guest: Session) -> None:
    await one.register(tasks=[{"name": "known", "queue": "special", "priority": 2, "max_attempts": 1}])
    await many(guest, {"task": "known"}, {"task": "known", "queue": "mine", "priority": 0}, {"task": "other"})
    found = await boss.rows("SELECT queue, priority, max_attempts FROM aioqueue.job ORDER BY queue")
    assert found == [("default", 0, 5), ("mine", 0, 1), ("special", 2, 1)]
    lanes = await boss.rows("SELECT lane FROM aioqueue.live ORDER BY lane")
    assert [row[0] for row in lanes] == sorted([lane("default", 0), lane("mine", 0), lane("special", 2)])


async def test_delay_and_run_at(boss: Session, guest: Session) -> None:
    jobs = [
        {"task": "past", "run_at": "2020-01-01T00:00:00Z"},
        {"task": "none", "delay": 0},
        {"task": "negative", "delay": -5},
        {"task": "far", "run_at": "2999-01-01T00:00:00+02:00"},
        {"task": "words", "delay": "1 day 2 hours"},
    ]
    await many(guest, *jobs)
    states = dict(await boss.rows("SELECT task, state FROM aioqueue.jobs"))
    assert states == {"past": "ready", "none": "ready", "negative": "ready", "far": "scheduled", "words": "scheduled"}
    times = await boss.rows(
        "SELECT j.task, extract(epoch FROM s.run_at - j.created_at)::float, s.run_at = '2998-12-31T22:00Z'"
        " FROM aioqueue.scheduled s JOIN aioqueue.job j ON j.id = job_id ORDER BY 1"
    )
    assert (times[0][0], times[0][2]) == ("far", True)
    assert times[1][:2] == ("words", 93_600.0)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({}, "job 2 of 2: task: expected a name of 1 to 200 characters, got NULL"),
        ({"task": " "}, "job 2 of 2: task: expected a name"),
        ({"task": "t" * 201}, "job 2 of 2: task: expected a name"),
        (5, "job 2 of 2: task: expected a name"),
        ({"task": "t", "queue": ""}, "queue: expected a name of 1 to 200 characters, got ''"),
        ({"task": "t", "tenant": ""}, "tenant: expected a name of 1 to 200 characters or NULL, got ''"),
        ({"task": "t", "tenant": "x" * 201}, "tenant: expected"),
        ({"task": "t", "priority": 3}, "priority: expected -2 to 2, got 3"),
        ({"task": "t", "priority": -3}, "priority: expected -2 to 2, got -3"),
        ({"task": "t", "max_attempts": 0}, "max_attempts: expected 1 to 10000, got 0"),
        ({"task": "t", "delay": 1, "run_at": "2999-01-01Z"}, "delay, run_at: expected one of them"),
        ({"task": "t", "run_at": "infinity"}, "run_at"),
        ({"task": "t", "run_at": "-infinity"}, "run_at"),
        ({"task": "t", "run_at": "12000-01-01Z"}, "run_at"),
        ({"task": "t", "run_at": "0044-03-15 BC"}, "run_at"),
        ({"task": "t", "delay": "20000 years"}, "run_at"),
        ({"task": "t", "id": "no"}, "uuid"),
        ({"task": "t", "run_at": "soon"}, "timestamp"),
        ({"task": "t", "priority": "high"}, "integer"),
    ],
)
async def test_a_bad_job_refuses_the_batch_and_says_why(boss: Session, guest: Session, job: object, message: str) -> None:
    with pytest.raises(psycopg.DataError, match=message):
        await many(guest, {"task": "good"}, job)
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []


@pytest.mark.parametrize("given", ["NULL", "'{}'", "'\"text\"'", "'5'", "'null'"])
async def test_what_is_no_array_is_refused(guest: Session, given: str) -> None:
    with pytest.raises(psycopg.DataError, match="jobs: expected a jsonb array"):
        await guest.rows(f"SELECT aioqueue.enqueue_many({given})")


async def test_no_jobs_are_no_jobs(guest: Session) -> None:
    assert await many(guest) == []


async def test_what_jsonb_cannot_hold_never_comes_in(boss: Session, guest: Session) -> None:
    for bad in ('"\\u0000"', '"\\ud800"', "NaN"):
        with pytest.raises(psycopg.DataError):
            await guest.rows("SELECT aioqueue.enqueue_many(%s::text::jsonb)", f'[{{"task": "t", "payload": {bad}}}]')
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
    odd: dict[str, object] = {"quote'\"": "back\\slash $1 %s {}", "emoji": "🐘", "null": None, "deep": [[[[]]]]}
    await many(guest, {"task": 'we\'ird "task" \\ 🐘', "payload": odd, "tenant": "te'nant", "queue": "qu%eue"})
    assert await boss.rows("SELECT task, payload, tenant, queue FROM aioqueue.jobs") == [
        ('we\'ird "task" \\ 🐘', odd, "te'nant", "qu%eue")
    ]


async def test_both_or_neither(boss: Session, one: Session) -> None:
    await one.rows("CREATE TEMP TABLE mine (n int)")
    for end, kept in (("ROLLBACK", 0), ("COMMIT", 1)):
        await one.begin()
        await one.rows("INSERT INTO mine VALUES (1)")
        await one.enqueue()
        assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
        await one.rows(end)
        assert len(await boss.rows("SELECT 1 FROM aioqueue.jobs")) == kept
        assert await one.value("SELECT count(*) FROM mine") == kept


async def test_a_savepoint_rolled_back_takes_its_jobs_along(boss: Session, one: Session) -> None:
    await one.begin()
    kept = await one.enqueue_one()
    await one.rows("SAVEPOINT s")
    await one.enqueue(3)
    await one.enqueue(delay=60)
    await one.rows("ROLLBACK TO s")
    await one.commit()
    assert await boss.rows("SELECT id FROM aioqueue.job") == [(kept,)]
    assert [job.job_id for job in await one.claim(await one.register())] == [kept]


async def test_the_same_job_again_is_success_and_adds_nothing(boss: Session, one: Session, guest: Session) -> None:
    facts = {"task": "t", "payload": {"a": 1}, "tenant": "T", "id": str(uuid4())}
    other = {"task": "t", "id": str(uuid4())}
    assert await many(guest, facts) == await many(guest, facts)
    both = await many(guest, facts, other)
    assert [str(i) for i in both] == [facts["id"], other["id"]]
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 2
    worker = await one.register()
    for job in await one.claim(worker):
        await one.record(worker, {"j": str(job.job_id), "l": job.lane, "v": job.vt, "a": 1, "o": "succeeded"})
    await many(guest, facts, other)
    assert await one.claim(worker) == [], "it has run already"


async def test_one_id_twice_in_a_batch_is_one_job(boss: Session, guest: Session) -> None:
    facts = {"task": "t", "id": str(uuid4())}
    assert len(await many(guest, facts, {"task": "u"}, facts)) == 3
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 2
    later = {"task": "t", "id": str(uuid4()), "delay": 60}
    await many(guest, later, later)
    assert await boss.value("SELECT count(*) FROM aioqueue.scheduled") == 1


@pytest.mark.parametrize("change", [{"task": "other"}, {"payload": {"a": 2}}, {"tenant": "U"}, {"tenant": None}])
async def test_an_id_taken_by_another_job_is_refused(boss: Session, guest: Session, change: dict[str, object]) -> None:
    facts = {"task": "t", "payload": {"a": 1}, "tenant": "T", "id": str(uuid4())}
    await many(guest, facts)
    with pytest.raises(psycopg.errors.UniqueViolation, match=f"job id {facts['id']} is taken by another job"):
        await many(guest, {"task": "new"}, facts | change)
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 1


async def test_the_same_id_at_once_waits_and_is_one_job(boss: Session, one: Session, two: Session) -> None:
    facts = {"task": "t", "id": str(uuid4())}
    await one.begin()
    await many(one, facts)
    async with blocked(boss, two, many(two, facts), by=one) as answer:
        await one.commit()
    assert [str(i) for i in answer.result()] == [facts["id"]]
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 1


async def test_fifty_first_users_of_a_queue_beside_an_open_transaction_of_the_first(connect: Connect) -> None:
    sessions = [await connect("client") for _ in range(50)]
    for session in sessions:
        await session.rows("SET lock_timeout = '10s'")
    await sessions[0].begin()
    await sessions[0].enqueue(queue="brand new", tenant="T")
    await asyncio.gather(*(s.enqueue(queue="brand new", tenant="T") for s in sessions[1:]))
    worker = await connect("worker")
    jobs = await worker.claim(await worker.register(), 100, lanes=[lane("brand new", 0)])
    assert len(jobs) == 49
    await sessions[0].commit()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_every_isolation_level_reads_todays_virtual_time(boss: Session, one: Session, level: str) -> None:
    await one.begin(level)
    await one.value("SELECT 1 FROM aioqueue.job LIMIT 1")
    await boss.publish(9_000_000)
    await boss.enqueue(tenant="T")
    job_id = await one.enqueue_one(tenant="T")
    await one.commit()
    assert await boss.value("SELECT vt FROM aioqueue.live WHERE job_id = %s", job_id) > 9_000_000


async def test_two_serializable_enqueuers_of_one_tenant_both_commit(one: Session, two: Session, boss: Session) -> None:
    for session in (one, two):
        await session.begin("SERIALIZABLE")
    for session in (one, two):
        await session.enqueue(tenant="T")
    for session in (one, two):
        await session.enqueue(tenant="T")
        await session.commit()
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 4


async def test_ten_thousand_mixed_jobs_keep_each_tenants_order(boss: Session, one: Session) -> None:
    jobs = [
        {"task": "t", "tenant": f"T{n % 7}", "queue": f"q{n % 3}", "id": str(new_job_id()), "payload": n} for n in range(10_000)
    ]
    await many(one, *jobs)
    wrong = await boss.value(
        "SELECT count(*) FROM (SELECT (j.payload::text)::int AS n, lag((j.payload::text)::int) OVER"
        " (PARTITION BY l.lane, l.tenant ORDER BY l.vt) AS before FROM aioqueue.live l JOIN aioqueue.job j ON j.id = l.job_id) x"
        " WHERE n < before"
    )
    assert wrong == 0
    assert await boss.value("SELECT count(DISTINCT (lane, tenant, vt)) FROM aioqueue.live") == 10_000


async def test_a_newcomer_is_next_whatever_the_others_have(boss: Session, one: Session) -> None:
    for tenant in range(10):
        await one.enqueue(300, tenant=f"big {tenant}")
    newcomer = await one.enqueue_one(tenant="small")
    position = await boss.value(
        "SELECT count(*) FROM aioqueue.live l, aioqueue.live me WHERE me.job_id = %s AND l.vt < me.vt", newcomer
    )
    assert position == 0
    worker = await one.register()
    first = await one.claim(worker, 11)
    assert newcomer in {job.job_id for job in first}
    assert len({job.tenant for job in first}) == 11, "one of each"


async def test_a_newcomer_stays_next_while_the_lane_moves_on(boss: Session, one: Session) -> None:
    await one.enqueue(200, tenant="big")
    worker = await one.register()
    claimed = await one.claim(worker, 50)
    await one.tick(worker, max(job.vt for job in claimed))
    newcomer = await one.enqueue_one(tenant="small")
    again = await one.enqueue_one(tenant="small")
    assert newcomer in {job.job_id for job in await one.claim(worker, 2)}
    assert again in {job.job_id for job in await one.claim(worker, 2)}


async def test_lanes_know_nothing_of_each_other(boss: Session, one: Session) -> None:
    await one.enqueue(5, tenant="T", queue="a")
    await one.enqueue(tenant="T", queue="b")
    await one.enqueue(tenant="T", queue="a", priority=1)
    assert await boss.rows("SELECT max(vt) FROM aioqueue.live GROUP BY lane ORDER BY 1") == [(1000,), (1000,), (5000,)]


async def test_nothing_is_written_but_the_jobs_own_rows(boss: Session, one: Session) -> None:
    """No lane, no counter, no sequence's row: nothing for others to wait for."""
    tables = "job", "live", "scheduled", "outcome", "attempt", "cancel", "worker", "task"
    await one.begin()
    await one.enqueue(3, queue="new", tenant="new")
    await one.enqueue(queue="new", tenant="new", delay=60)
    locks = await one.rows(
        "SELECT DISTINCT coalesce(parent.relname, c.relname) FROM pg_locks k JOIN pg_class c ON c.oid = k.relation"
        " LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class parent ON parent.oid = i.inhparent"
        " WHERE k.pid = pg_backend_pid() AND k.mode = 'RowExclusiveLock' AND c.relkind IN ('r', 'p')"
    )
    await one.commit()
    assert {name for (name,) in locks} == {"job", "live", "scheduled"} <= set(tables)
    assert await boss.value("SELECT count(*) FROM aioqueue.live WHERE lane <> %s", LANE) == 3
