"""id_times: jobs whose ids are of a time that no range was made for, and what DEFAULT's partitions take."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.doctor.conftest import examination
from tests.postgres import Database
from tests.sql.checks.conftest import Ask
from tests.sql.engine import Session
from tests.sql.ranges import DAY, drop_ranges, id_of

pytestmark = pytest.mark.anyio
WHO = ("worker", "owner")
SIZE = "SELECT sum(pg_total_relation_size(t))::bigint FROM unnest(%s::regclass[]) t"


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, whose ranges are dropped."""
    return own_database


async def size(superuser: Session) -> int:
    names = "SELECT ARRAY['aioqueue.job_default'::regclass, 'aioqueue.outcome_default', 'aioqueue.attempt_default']::text[]"
    return int(await superuser.value(SIZE, await superuser.value(names)))


async def jobs_of(session: Session, *ahead: timedelta) -> None:
    """Enqueue a job of each of these times from now."""
    for each in ahead:
        await session.enqueue(id=id_of(datetime.now(UTC) + each))


async def look(ask: Ask, cap: int = 10) -> tuple[int, float | None, int]:
    """What both roles are told; how far ahead is another moment's for each."""
    found = [(await ask("id_times", by=(role,), cap=cap))[0] for role in WHO]
    assert [(jobs, size) for jobs, _, size in found] == [(found[0][0], found[0][2])] * len(WHO)
    return found[-1]


async def test_those_behind_the_last_range(ask: Ask, boss_session: Session, superuser: Session) -> None:
    """Not those of a range's time, however far ahead, nor those of long ago, which stand in DEFAULT, too."""
    await drop_ranges(boss_session)
    assert await boss_session.value("SELECT aioqueue.make_ranges(%s, 3)", DAY) == 4
    await superuser.rows("CREATE TABLE public.job_default AS SELECT generate_series(1, 10)")
    await jobs_of(boss_session, timedelta(hours=12), timedelta(hours=60), -timedelta(days=3000))
    assert await look(ask) == (0, None, await size(superuser))
    await jobs_of(boss_session, timedelta(days=300), timedelta(days=100), timedelta(days=200))
    jobs, ahead, taken = await look(ask)
    assert (jobs, taken) == (3, await size(superuser))
    assert ahead == pytest.approx(300 * 86_400, abs=600)
    assert (await look(ask, cap=2))[0] == 2


async def test_without_ranges_a_minute_is_nothing(ask: Ask, boss_session: Session) -> None:
    await drop_ranges(boss_session)
    await jobs_of(boss_session, timedelta(0), timedelta(seconds=30))
    assert (await look(ask))[:2] == (0, None)
    await jobs_of(boss_session, timedelta(hours=1))
    jobs, ahead, _ = await look(ask)
    assert jobs == 1 and ahead == pytest.approx(3_600, abs=600)


async def test_a_client_may_not_ask(database: Database, schema: str) -> None:
    async with examination(database, schema, "client") as made:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await made.rows("id_times", cap=10)
