"""first_id: the lowest UUIDv7 of a moment."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from aioqueue.job import new_job_id
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_ids_of_a_moment_and_later_lie_above_it(one: Session, boss: Session) -> None:
    before = await boss.value("SELECT aioqueue.first_id(clock_timestamp())")
    job_id = new_job_id()
    assert before < job_id < await boss.value("SELECT aioqueue.first_id(clock_timestamp() + interval '1 s')")


async def test_it_counts_milliseconds_since_1970(boss: Session) -> None:
    assert await boss.value("SELECT aioqueue.first_id(%s)", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == UUID(int=1000 << 80)
    assert await boss.value("SELECT aioqueue.first_id(%s)", datetime(2026, 11, 30, tzinfo=UTC)) == UUID(int=1795996800000 << 80)
