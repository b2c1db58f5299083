"""enqueue_alike: jobs that differ in id and payload only; as enqueue_many writes as many objects. XID first: test_tick.py."""

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest

from aioqueue.job import lane, new_job_ids
from tests.sql.conftest import Connect
from tests.sql.engine import Session, blocked, changed

pytestmark = pytest.mark.anyio
CALL = "SELECT aioqueue.enqueue_alike(%s::uuid[], %s, %s"
TYPES = {"priority": "int", "delay": "interval", "run_at": "timestamptz", "max_attempts": "int", "total": "int"}
"""Those of the options that are not text."""
SIZES = pytest.mark.parametrize("number", [4, 150])
"""From 100 on they are written in a subtransaction."""


async def alike(session: Session, ids: list[UUID], payloads: list[Any] | None = None, **options: object) -> str:
    """Enqueue jobs with the payloads {"n": 0}, {"n": 1}, …, or those given; the XID."""
    lines = [json.dumps(payload) for payload in payloads or [{"n": n} for n in range(len(ids))]]
    given = {"task": "t", **options}
    task = given.pop("task")
    named = "".join(f", p_{name} => %s::text::{TYPES.get(name, 'text')}" for name in given)
    return str(await session.value(f"{CALL}{named})", ids, "\n".join(lines), task, *given.values()))


async def as_one_object(session: Session, ids: list[UUID], payloads: list[Any] | None = None, **options: object) -> list[UUID]:
    """Do the same as code before schema 13 does."""
    payloads = payloads or [{"n": n} for n in range(len(ids))]
    given = {"task": "t", **options, "ids": [job_id.hex for job_id in ids], "payloads": payloads}
    return [row[0] for row in await session.rows("SELECT aioqueue.enqueue_many(%s::jsonb)", json.dumps(given))]


FACTS = (
    "SELECT task, payload, tenant, queue, priority, max_attempts, state, key,"
    " CASE WHEN run_at > created_at THEN run_at - created_at END, CASE WHEN run_at <= created_at THEN run_at END"
    " FROM aioqueue.jobs ORDER BY id"
)
PLACES = "SELECT lane, vt, tenant, attempt, spared, worker FROM aioqueue.live ORDER BY vt"


@SIZES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tenant": "T", "queue": "q", "priority": -2, "max_attempts": 9, "key": "k"},
        {"delay": 90},
        {"run_at": "2001-01-01T00:00:00Z"},
    ],
)
async def test_they_are_what_as_many_objects_would_be(
    boss: Session, guest: Session, options: dict[str, Any], number: int
) -> None:
    await boss.rows("INSERT INTO aioqueue.task VALUES ('t', 'of-task', 1, 3, now())")
    await boss.rows("INSERT INTO aioqueue.tenant VALUES ('T', 4)")
    ids, found = new_job_ids(number), []
    for how in ("lines", "one object", "objects"):
        await guest.begin()
        if how == "lines":
            assert await alike(guest, ids, **options) == await guest.value("SELECT pg_current_xact_id_if_assigned()::text")
        elif how == "one object":
            assert await as_one_object(guest, ids, **options) == ids
        else:
            each = [{"task": "t", "id": str(job_id), "payload": {"n": n}, **options} for n, job_id in enumerate(ids)]
            await guest.rows("SELECT aioqueue.enqueue_many(%s::jsonb)", json.dumps(each))
        await guest.commit()
        found.append((await boss.rows(FACTS), await boss.rows(PLACES)))
        await boss.rows("TRUNCATE aioqueue.job, aioqueue.live, aioqueue.scheduled")
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == number


@SIZES
async def test_an_id_that_is_there_with_the_same_job_is_success_and_adds_nothing(
    boss: Session, one: Session, number: int
) -> None:
    ids = new_job_ids(number)
    await alike(one, ids[1:3], [{"n": 1}, {"n": 2}])
    for _ in range(2):
        await alike(one, ids)
    found = await boss.rows("SELECT count(*), count(DISTINCT job_id), count(DISTINCT vt) FROM aioqueue.live")
    assert found == [(number, number, number)]
    assert await boss.rows("SELECT count(*) FROM aioqueue.job") == [(number,)]


@SIZES
async def test_an_id_that_another_job_has_refuses_them_all(boss: Session, one: Session, number: int) -> None:
    ids = new_job_ids(number)
    await alike(one, ids[1:2], ["another"])
    with pytest.raises(psycopg.errors.UniqueViolation, match=f"job id {ids[1]} is taken by another job"):
        await alike(one, ids)
    for other in ({"task": "u"}, {"tenant": "U"}):
        with pytest.raises(psycopg.errors.UniqueViolation, match=f"job id {ids[1]} is taken by another job"):
            await alike(one, ids[1:2], ["another"], **other)
    assert await boss.rows("SELECT count(*) FROM aioqueue.live") == [(1,)]


@SIZES
async def test_one_id_twice_is_one_job(boss: Session, one: Session, number: int) -> None:
    ids = new_job_ids(number)
    await alike(one, [*ids, ids[1]], [0] * (number + 1))
    assert await boss.rows("SELECT count(*), count(DISTINCT job_id) FROM aioqueue.live") == [(number, number)]


@SIZES
async def test_the_same_ids_at_once_wait_and_are_one_job_each(boss: Session, one: Session, two: Session, number: int) -> None:
    ids = new_job_ids(number)
    await one.begin()
    await alike(one, ids)
    async with blocked(boss, two, alike(two, ids), by=one):
        await one.commit()
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == number


async def test_options_are_checked(boss: Session, one: Session) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"priority": 7}, "job 1 of 2: priority: expected -2 to 2, got 7"),
        ({"task": ""}, "job 1 of 2: task: expected a name of 1 to 200 characters, got ''"),
        ({"task": None}, "job 1 of 2: task: expected a name of 1 to 200 characters, got NULL"),
        ({"tenant": ""}, "job 1 of 2: tenant: expected a name"),
        ({"queue": "q" * 201}, "job 1 of 2: queue: expected a name"),
        ({"key": " "}, "job 1 of 2: key: expected a name"),
        ({"max_attempts": 0}, "job 1 of 2: max_attempts: expected 1 to 10000, got 0"),
        ({"run_at": "infinity"}, "job 1 of 2: run_at, delay: expected a time"),
        ({"delay": 1, "run_at": "2030-01-01Z"}, "expected one of them at most"),
    ]
    for options, expected in refused:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=expected):
            await alike(one, new_job_ids(2), **options)
    await boss.rows("INSERT INTO aioqueue.task VALUES ('t', 'q', 1, 3, now(), true)")
    with pytest.raises(psycopg.Error, match="task t runs for a tenant only") as homeless:
        await alike(one, new_job_ids(2), queue="q", priority=0, max_attempts=1)
    assert homeless.value.sqlstate == "AQ004"
    assert await boss.rows("SELECT count(*) FROM aioqueue.job") == [(0,)]


@pytest.mark.parametrize("lines", ["1", "1\n2\n3", '{"a":\n1}', "1\n", ""])
async def test_lines_that_are_not_one_payload_for_each_id_are_refused(boss: Session, one: Session, lines: str) -> None:
    with pytest.raises(psycopg.Error, match=r"null value in column|invalid input syntax for type json"):
        await one.value(f"{CALL})", new_job_ids(2), lines, "t")
    assert await boss.rows("SELECT count(*) FROM aioqueue.job") == [(0,)]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="as many payloads as ids"):
        await as_one_object(one, new_job_ids(2), [1])


async def test_a_payload_is_what_it_was(boss: Session, one: Session) -> None:
    odd: list[Any] = [
        {"quote'\"": "back\\slash $1 %s {}\n\t", "emoji": "🐘", "null": None},
        [[[]]],
        "text,\r\u2028",
        1.5,
        None,
    ]
    await alike(one, new_job_ids(len(odd)), odd)
    assert [row[0] for row in await boss.rows("SELECT payload FROM aioqueue.job ORDER BY id")] == odd


async def test_positions_do_not_run_away_with_what_the_first_part_says(boss: Session, one: Session, two: Session) -> None:
    for session in (one, two):
        await session.begin()
        await alike(session, new_job_ids(2), tenant="T", total=2**31 - 1)
    for session in (one, two):
        await session.commit()
    found = [row[0] for row in await boss.rows("SELECT vt FROM aioqueue.live ORDER BY vt")]
    assert found == [1_000, 2_000, 129_000, 130_000], "room for 64 parts of that size"


async def test_none_at_all_are_no_job(one: Session) -> None:
    assert await alike(one, [], []) == await one.value("SELECT (pg_current_xact_id()::text::bigint - 1)::text")
    assert await as_one_object(one, [], []) == []


async def test_a_newcomer_is_next_to_a_tenant_with_many(boss: Session, one: Session) -> None:
    await alike(one, new_job_ids(200), tenant="big")
    await one.enqueue_one(tenant="small", queue="default", priority=0)
    rows = await boss.rows("SELECT tenant FROM aioqueue.live WHERE lane = %s ORDER BY vt LIMIT 3", lane("default", 0))
    assert ("small",) in rows


PLACE = "SELECT vt FROM aioqueue.live ORDER BY vt"


async def test_a_lone_job_goes_where_next_tag_would_put_it(boss: Session, one: Session, two: Session) -> None:
    await boss.rows("INSERT INTO aioqueue.tenant VALUES ('T', 4)")
    await two.begin()
    await alike(two, new_job_ids(1), tenant="T")
    await alike(one, new_job_ids(1), tenant="T")
    await two.commit()
    for _ in range(2):
        await alike(one, new_job_ids(1), tenant="T")
    await alike(one, new_job_ids(1))
    assert [vt for (vt,) in await boss.rows(PLACE)] == [250, 500, 750, 1_000, 1_000]
    await boss.publish(10_000)
    await alike(one, new_job_ids(1), tenant="T")
    assert [vt for (vt,) in await boss.rows(PLACE)][-1] == 10_250


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_lone_jobs_of_open_transactions_do_not_tie(boss: Session, connect: Connect, level: str) -> None:
    async def ten() -> list[int]:
        sessions = [await connect("client") for _ in range(10)]
        for session in sessions:
            await session.begin(level)
            await alike(session, new_job_ids(1), tenant="T")
        for session in sessions:
            await session.commit()
        found = [vt for (vt,) in await boss.rows(PLACE)]
        await boss.rows("TRUNCATE aioqueue.live")
        return found

    lock = "pg_try_advisory_xact_lock(hashtextextended(p_tenant, lane_))"
    if level != "SERIALIZABLE":
        async with changed(boss, "enqueue_alike", (lock, "true")):
            assert await ten() == [1_000] * 10, "sabotaged: they tie"
    assert await ten() == [1_000 * n for n in range(1, 11)]


async def test_lone_jobs_of_serializable_transactions_do_not_fail_each_other(boss: Session, one: Session, two: Session) -> None:
    async def scenario() -> None:
        for session in (one, two):
            await session.begin("SERIALIZABLE")
            await session.rows("SELECT 1")
        for session in (one, two):
            await alike(session, new_job_ids(1), tenant="T")
            await session.commit()

    async with changed(boss, "enqueue_alike", (" AND current_setting('transaction_isolation') <> 'serializable'", "")):
        with pytest.raises(psycopg.errors.SerializationFailure):
            await scenario()
        await two.rollback()
    await scenario()


async def test_lone_jobs_of_one_transaction_take_a_bounded_number_of_locks(one: Session) -> None:
    await one.begin()
    for n in range(100):
        await alike(one, new_job_ids(1), tenant=f"T{n}")
    locks = await one.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
    await one.rollback()
    assert 0 < locks <= 65, "64, and that of the first"


@pytest.mark.parametrize("number", [1, 2])
async def test_odd_names_are_allowed_all_the_same(boss: Session, one: Session, number: int) -> None:
    """What the quick look does not know for good, job_refusal does."""
    odd: list[dict[str, Any]] = [
        {"task": " t"}, {"queue": "ü" * 200}, {"key": "!"}, {"tenant": "\tT"}, {"delay": 1}, {"task": "t" * 200},
    ]  # fmt: skip
    for options in odd:
        await alike(one, new_job_ids(number), **options)
    assert await boss.rows("SELECT count(*) FROM aioqueue.job") == [(6 * number,)]
    blanks: list[dict[str, Any]] = [{"tenant": "-", "key": " "}, {"tenant": " ", "queue": "-"}]
    for blank in blanks:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="expected a name"):
            await alike(one, new_job_ids(number), **blank)


async def test_open_batches_leave_each_other_room_and_no_more(boss: Session, one: Session, two: Session) -> None:
    for session in (one, two):
        await session.begin()
        await alike(session, new_job_ids(4), tenant="T")
    for session in (one, two):
        await session.commit()
    assert [vt for (vt,) in await boss.rows(PLACE)] == [1_000 * n for n in range(1, 9)]
