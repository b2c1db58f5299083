"""enqueue_alike: jobs that differ in id and payload only, in one object; as enqueue_many of as many objects would write them."""

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest

from aioqueue.job import lane, new_job_ids
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def alike(session: Session, ids: list[UUID], payloads: list[Any] | None = None, **options: object) -> list[UUID]:
    given = {
        "task": "t",
        **options,
        "ids": [job_id.hex for job_id in ids],
        "payloads": payloads or [{"n": n} for n in range(len(ids))],
    }
    return [row[0] for row in await session.rows("SELECT aioqueue.enqueue_many(%s::jsonb)", json.dumps(given))]


FACTS = (
    "SELECT task, payload, tenant, queue, priority, max_attempts, state, key,"
    " CASE WHEN run_at > created_at THEN run_at - created_at END, CASE WHEN run_at <= created_at THEN run_at END"
    " FROM aioqueue.jobs ORDER BY id"
)
PLACES = "SELECT lane, vt, tenant, attempt, spared, worker FROM aioqueue.live ORDER BY vt"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tenant": "T", "queue": "q", "priority": -2, "max_attempts": 9, "key": "k"},
        {"delay": 90},
        {"run_at": "2001-01-01T00:00:00Z"},
    ],
)
async def test_they_are_what_as_many_objects_would_be(boss: Session, guest: Session, options: dict[str, Any]) -> None:
    await boss.rows("INSERT INTO aioqueue.task VALUES ('t', 'of-task', 1, 3, now())")
    await boss.rows("INSERT INTO aioqueue.tenant VALUES ('T', 4)")
    ids, found = new_job_ids(4), []
    for together in (True, False):
        await guest.begin()
        if together:
            assert await alike(guest, ids, **options) == ids
        else:
            each = [{"task": "t", "id": str(job_id), "payload": {"n": n}, **options} for n, job_id in enumerate(ids)]
            await guest.rows("SELECT aioqueue.enqueue_many(%s::jsonb)", json.dumps(each))
        await guest.commit()
        found.append((await boss.rows(FACTS), await boss.rows(PLACES)))
        await boss.rows("TRUNCATE aioqueue.job, aioqueue.live, aioqueue.scheduled")
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


async def test_an_id_that_is_there_with_the_same_job_is_success_and_adds_nothing(boss: Session, one: Session) -> None:
    ids = new_job_ids(5)
    await alike(one, ids[1:3], [{"n": 1}, {"n": 2}])
    assert await alike(one, ids) == ids
    assert await alike(one, ids) == ids
    assert await boss.rows("SELECT count(*), count(DISTINCT job_id), count(DISTINCT vt) FROM aioqueue.live") == [(5, 5, 5)]
    assert await boss.rows("SELECT count(*) FROM aioqueue.job") == [(5,)]


async def test_an_id_that_another_job_has_refuses_them_all(boss: Session, one: Session) -> None:
    ids = new_job_ids(3)
    await alike(one, ids[1:2], ["another"])
    with pytest.raises(psycopg.errors.UniqueViolation, match=f"job id {ids[1]} is taken by another job"):
        await alike(one, ids)
    assert await boss.rows("SELECT count(*) FROM aioqueue.live") == [(1,)]


async def test_options_are_checked(boss: Session, one: Session) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"priority": 7}, "job 1 of 2: priority: expected -2 to 2, got 7"),
        ({"delay": 1, "run_at": "2030-01-01Z"}, "expected one of them at most"),
    ]
    for options, expected in refused:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=expected):
            await alike(one, new_job_ids(2), **options)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="as many payloads as ids"):
        await alike(one, new_job_ids(2), [1])
    await boss.rows("INSERT INTO aioqueue.task VALUES ('t', 'q', 1, 3, now(), true)")
    with pytest.raises(psycopg.Error, match="task t runs for a tenant only") as homeless:
        await alike(one, new_job_ids(2))
    assert homeless.value.sqlstate == "AQ004"
    assert await boss.rows("SELECT count(*) FROM aioqueue.job") == [(0,)]


async def test_none_at_all_are_no_job(one: Session) -> None:
    assert await alike(one, [], []) == []


async def test_a_newcomer_is_next_to_a_tenant_with_many(boss: Session, one: Session) -> None:
    await alike(one, new_job_ids(200), tenant="big")
    await one.enqueue_one(tenant="small", queue="default", priority=0)
    rows = await boss.rows("SELECT tenant FROM aioqueue.live WHERE lane = %s ORDER BY vt LIMIT 3", lane("default", 0))
    assert ("small",) in rows
