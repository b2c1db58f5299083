"""Log records carry the job that they were emitted in, whoever emits them: user code, libraries, its threads and tasks."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import pytest

from aioqueue import JobContext, JobFacts, JobLogFilter, JobTransaction, current_job
from tests.kit import Bench

pytestmark = pytest.mark.anyio


class Records(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def handler() -> Iterator[Records]:
    """A handler of the root logger, with the filter."""
    made = Records()
    made.addFilter(JobLogFilter())
    root = logging.getLogger()
    root.addHandler(made)
    yield made
    root.removeHandler(made)


def facts(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name) for name in ("job_id", "task", "attempt", "tenant", "queue", "worker", "job"))


async def test_every_record_of_a_job_carries_it(at: Bench, handler: Records) -> None:
    logger = logging.getLogger("some.library")

    async def own(tx: JobTransaction) -> None:
        logger.warning("own")
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(logger.warning, "thread"))
        async with tx.tenant("b"):
            logger.warning("nested")

    async def holds_nothing(ctx: JobContext) -> None:
        async with ctx.transaction():
            logger.warning("short")
        logger.warning("after")

    def in_thread() -> None:
        logger.warning("def")

    for task in (own, holds_nothing, in_thread):
        at.tasks.task(name=task.__name__)(task)
        job = await at.start(task.__name__, tenant="a")
        await at.end()
        assert handler.records
        for record in handler.records:
            tenant = "b" if record.getMessage() == "nested" else "a"
            text = f" [{job.task} {job.job_id}, attempt 1, tenant {tenant}]"
            assert facts(record) == (str(job.job_id), job.task, 1, tenant, "default", job.worker, text), record.getMessage()
        handler.records.clear()
    logger.warning("outside")
    assert facts(handler.records[0]) == (*(None,) * 6, "")


async def test_a_job_of_no_tenant_says_so(at: Bench, handler: Records) -> None:
    async def work(tx: JobTransaction) -> None:
        logging.getLogger("user").warning("hello")

    at.tasks.task(name="work")(work)
    assert await at.run("work") is None
    (record,) = handler.records
    assert facts(record)[3] is None
    assert facts(record)[6] == f" [work {facts(record)[0]}, attempt 1]"


async def test_what_user_code_gives_a_record_itself_stays(at: Bench, handler: Records) -> None:
    async def work(tx: JobTransaction) -> None:
        logging.getLogger("user").warning("hello", extra={"tenant": "mine", "job_id": 7})

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None, at.outcomes
    (record,) = handler.records
    assert facts(record)[:4] == (7, "work", 1, "mine")


async def test_current_job_is_the_job_that_runs_here(at: Bench) -> None:
    seen: list[JobFacts | None] = []

    async def work(ctx: JobContext) -> None:
        assert current_job() is ctx
        with contextlib.suppress(ZeroDivisionError):
            async with ctx.transaction() as tx:
                assert current_job() is tx
                raise ZeroDivisionError
        assert current_job() is ctx
        seen.append(await asyncio.to_thread(current_job))

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert getattr(outcome, "result", outcome) == "null"
    assert seen[0] is not None and (seen[0].tenant, seen[0].attempt) == ("a", 1)
    assert current_job() is None
