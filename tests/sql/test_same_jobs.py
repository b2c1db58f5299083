"""same_jobs: whether ids that were there already name the same jobs; see also test_enqueue_many.py."""

from uuid import UUID, uuid4

import psycopg
import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def compare(boss: Session, ids: list[UUID], payloads: list[str], tasks: list[str], tenants: list[str | None]) -> None:
    jobs = "[" + ",".join(f'{{"payload": {payload}}}' for payload in payloads) + "]"
    await boss.rows("SELECT aioqueue.same_jobs(%s::text::jsonb, %s::uuid[], %s::text[], %s::text[])", jobs, ids, tasks, tenants)


async def test_the_same_and_each_difference(boss: Session, one: Session) -> None:
    ids = await one.enqueue(2, task="t", payload='{"a": 1}', tenant="T")
    ids += await one.enqueue(1, task="t", payload='{"b": 2}')
    payloads, tasks, tenants = ['{"a": 1.0}', '{"a":1}', '{"b": 2}'], ["t"] * 3, ["T", "T", None]
    await compare(boss, ids, payloads, tasks, tenants)
    for n in range(3):
        for changed in (
            ([*ids[:n], uuid4(), *ids[n + 1 :]], payloads, tasks, tenants),
            (ids, [*payloads[:n], "{}", *payloads[n + 1 :]], tasks, tenants),
            (ids, payloads, [*tasks[:n], "u", *tasks[n + 1 :]], tenants),
            (ids, payloads, tasks, [*tenants[:n], "U", *tenants[n + 1 :]]),
        ):
            with pytest.raises(psycopg.errors.UniqueViolation, match=f"job id {changed[0][n]} is taken by another job"):
                await compare(boss, *changed)


async def test_under_repeatable_read_a_job_that_cannot_be_seen_is_not_the_same(one: Session, two: Session) -> None:
    await two.begin("REPEATABLE READ")
    await two.value("SELECT 1 FROM aioqueue.job LIMIT 1")
    job_id = await one.enqueue_one()
    with pytest.raises(psycopg.DatabaseError) as caught:
        await two.enqueue(id=job_id)
    assert caught.value.sqlstate in ("23505", "40001")
    await two.rollback()
