"""vacuum: of each of the queue's tables whether it is vacuumed, how many dead and living rows it has, and since when."""

from typing import Any

import pytest

from aioqueue.sql import tables
from tests.doctor.conftest import Execute
from tests.postgres import Database
from tests.sql.checks.conftest import Ask
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, whose statistics nobody else reports to."""
    return own_database


async def told(ask: Ask, superuser: Session) -> dict[str, tuple[Any, ...]]:
    """By the table's name: dead, living, whether it was vacuumed, off, server; for each role alike but for the moment."""
    found = []
    for role in ("worker", "owner", "client"):
        rows = await ask("vacuum", by=(role,))
        assert all(seconds is None or seconds >= 0 for _, _, _, seconds, _, _ in rows)
        found.append({name: (dead, living, seconds is not None, off, on) for name, dead, living, seconds, off, on in rows})
    assert found[0] == found[1] == found[2]
    name = "SELECT relname::text FROM pg_class WHERE oid = %s::regclass"
    return {await superuser.value(name, table): row for table, row in found[0].items()}


async def test_the_queue_s_own_tables_and_no_others(ask: Ask, superuser: Session) -> None:
    """Partitions, and not what has them; not a table of the user's in the queue's schema, nor one called as the queue's."""
    await superuser.rows("CREATE TABLE aioqueue.mine (i int)")
    await superuser.rows("CREATE TABLE public.job (i int)")
    parted = {"job", "outcome", "attempt"}
    ranges = [suffix for (suffix,) in await superuser.rows("SELECT suffix FROM aioqueue.id_range")]
    parts = {f"{table}{suffix}" for table in parted for suffix in (*ranges, "_default")}
    assert ranges
    assert (await told(ask, superuser)).keys() == tables() - parted | parts


async def test_what_was_done_to_a_table(ask: Ask, superuser: Session) -> None:
    quiet = "autovacuum_vacuum_threshold = 1000000, autovacuum_analyze_threshold = 1000000"
    for statement in (
        f"ALTER TABLE aioqueue.cancel SET ({quiet}, autovacuum_enabled = on)",
        "ALTER TABLE aioqueue.live SET (autovacuum_enabled = off)",
        "INSERT INTO aioqueue.cancel SELECT gen_random_uuid(), 1, now() FROM generate_series(1, 5)",
        "DELETE FROM aioqueue.cancel WHERE ctid < '(0,4)'",
        "SELECT pg_stat_force_next_flush()",
    ):
        await superuser.rows(statement)
    found = await told(ask, superuser)
    assert found["cancel"] == (3, 2, False, False, True)
    assert found["live"] == (0, 0, False, True, True)
    await superuser.rows("VACUUM aioqueue.cancel")
    await superuser.rows("SELECT pg_stat_force_next_flush()")
    assert (await told(ask, superuser))["cancel"] == (0, 2, True, False, True)


async def test_a_server_that_does_not_count(ask: Ask, boss: Execute, database: Database, superuser: Session) -> None:
    await boss(f"ALTER DATABASE {database.name} SET track_counts = off")
    assert {row[4] for row in (await told(ask, superuser)).values()} == {False}
