"""The faces a task is given: facts that cannot be changed, and short ways to run a statement."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from psycopg import AsyncConnection

from aioqueue import JobContext, JobTransaction
from aioqueue.claimed import Claimed
from aioqueue.context import CurrentTenant
from aioqueue.job import new_job_id

pytestmark = pytest.mark.anyio

JOB = Claimed(
    worker=1, job_id=new_job_id(), lane=2, vt=3, attempt=4, spared=1, tenant="t", task="work", queue="q", priority=-1,
    max_attempts=5, payload="{}", created=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip
FACTS = ("job_id", "task", "queue", "priority", "tenant", "attempt", "spared", "max_attempts", "created_at")


def no_transaction(*_: object) -> Any:
    raise AssertionError("not opened")


class Tenantless:
    """A transaction in which no block is opened."""

    tenant = CurrentTenant.of("t", no_transaction)


@pytest.fixture
async def tx(worker_conn: AsyncConnection[Any]) -> AsyncIterator[JobTransaction]:
    yield JobTransaction(JOB, worker_conn, Tenantless())


async def test_the_facts_are_the_claims_and_read_only(tx: JobTransaction) -> None:
    for face in (JobContext(JOB, no_transaction, lambda: False), tx):
        for fact in FACTS:
            assert getattr(face, fact) == getattr(JOB, fact)
            with pytest.raises(AttributeError):
                setattr(face, fact, None)
        with pytest.raises(AttributeError):
            face.scratch = 1  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]


def test_should_stop_is_asked_each_time() -> None:
    answers = [True, False]
    context = JobContext(JOB, no_transaction, answers.pop)
    assert [context.should_stop, context.should_stop] == [False, True]


async def test_rows_a_row_and_a_value_are_fetched_with_one_call(tx: JobTransaction) -> None:
    assert await tx.fetch_all("SELECT n, n * n FROM generate_series(1, %s) n", [2]) == [(1, 1), (2, 4)]
    assert await tx.fetch_one("SELECT 1, %(x)s::text", {"x": "y"}) == (1, "y")
    assert await tx.fetch_value("SELECT 7") == 7
    assert await tx.fetch_all("SELECT 1 WHERE false") == []
    assert await tx.fetch_one("SELECT 1 WHERE false") is None
    assert await tx.fetch_value("SELECT 1 WHERE false") is None
    assert await tx.fetch_value("SELECT NULL") is None
    assert (await tx.execute("SELECT 1")).rowcount == 1


async def test_a_detached_transaction_says_why_it_is_of_no_use(tx: JobTransaction) -> None:
    tx.detach()
    for call in (lambda: tx.execute("SELECT 1"), lambda: tx.fetch_all("SELECT 1"), lambda: tx.fetch_value("SELECT 1")):
        with pytest.raises(RuntimeError, match=f"{JOB.job_id} has ended"):
            await call()
