"""end_job: the live row goes and the outcome comes, together."""

import psycopg
import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio
END = "SELECT aioqueue.end_job(l, 'dead', 'why') FROM aioqueue.live l WHERE l.job_id = %s"


async def test_one_row_for_another(boss: Session, one: Session) -> None:
    job_id, other = await one.enqueue(2)
    job = (await one.claim(await one.register(), 1))[0]
    assert job.job_id == job_id
    assert await boss.value(END, job_id) == "dead"
    assert await boss.rows("SELECT job_id FROM aioqueue.live") == [(other,)]
    facts = "SELECT job_id, state, attempt, spared, message, result, started_at IS NOT NULL FROM aioqueue.outcome"
    assert await boss.rows(facts) == [
        (job_id, "dead", 1, 0, "why", None, True)
    ]  # fmt: skip


async def test_a_second_end_is_refused_by_the_outcomes_key(boss: Session, one: Session) -> None:
    """The second fence: even a live row that should not be there cannot end its job twice."""
    job_id = await one.enqueue_one()
    await boss.value(END, job_id)
    await boss.rows("INSERT INTO aioqueue.live (lane, vt, job_id, tenant) VALUES (1, 1, %s, '')", job_id)
    with pytest.raises(psycopg.errors.UniqueViolation):
        await boss.value(END, job_id)
