"""Ranges of id time for the tests of retention: made in the past, filled with jobs of that time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from aioqueue.job import new_job_id
from tests.sql.engine import Session, changed, entry

DAY = 86_400.0
THEN = datetime(2026, 3, 1, tzinfo=UTC)
"""The day of the tests' first range."""


def id_of(moment: datetime) -> UUID:
    """A job id that was made at that moment."""
    millis = int(moment.timestamp() * 1000)
    return UUID(int=(new_job_id().int & (1 << 80) - 1) | millis << 80)


async def drop_ranges(boss: Session) -> None:
    """Leave only DEFAULT, as before the first range was made; as the schema's owner."""
    for (suffix,) in await boss.rows("DELETE FROM aioqueue.id_range RETURNING suffix"):
        for table in ("job", "outcome", "attempt"):
            await boss.rows(f"DROP TABLE aioqueue.{table}{suffix}")


@asynccontextmanager
async def as_if_then(boss: Session) -> AsyncIterator[None]:
    """Let make_ranges believe that it is THEN."""
    async with changed(boss, "make_ranges", ("clock_timestamp()", f"'{THEN.isoformat()}'::timestamptz")):
        yield


async def make_old_ranges(boss: Session, ahead: int = 0) -> None:
    """Make ranges of a day each, as if it were THEN."""
    async with as_if_then(boss):
        assert await boss.value("SELECT aioqueue.make_ranges(%s, %s)", DAY, ahead) == ahead + 1


async def enqueue_then(session: Session, number: int, day: int = 0, **options: Any) -> list[UUID]:
    """Enqueue jobs whose ids are of that day."""
    ids = [id_of(THEN + timedelta(days=day, minutes=i)) for i in range(number)]
    for job_id in ids:
        await session.enqueue(id=job_id, **options)
    return ids


async def run(session: Session, boss: Session, reason: str = "succeeded", *, ended: datetime, number: int = 100) -> list[UUID]:
    """Claim and record what is ready, with that outcome, as if it had ended at that moment."""
    worker = await session.register()
    jobs = await session.claim(worker, number)
    await session.record(worker, *(entry(job, reason, **({} if reason == "succeeded" else {"m": "it failed"})) for job in jobs))
    ids = [job.job_id for job in jobs]
    await boss.rows("UPDATE aioqueue.outcome SET finished_at = %s WHERE job_id = ANY (%s)", ended, ids)
    return ids


async def partition_of(boss: Session, table: str, job_id: UUID) -> str | None:
    """The name of the partition that holds the job's row."""
    key = "id" if table == "job" else "job_id"
    found: str | None = await boss.value(
        f"SELECT c.relname FROM aioqueue.{table} x JOIN pg_class c ON c.oid = x.tableoid WHERE x.{key} = %s", job_id
    )
    return found
