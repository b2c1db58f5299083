"""queue_policies: what stands on the queue's own tables and their partitions, and row-level security without a policy."""

import pytest

from tests.postgres import Database
from tests.sql.checks.conftest import Ask
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    """One of the test's own, for what is done to the queue's tables."""
    return own_database


async def test_policies_and_what_is_on(ask: Ask, superuser: Session) -> None:
    assert await ask("queue_policies") == []
    a_range = "outcome" + await superuser.value("SELECT min(suffix) FROM aioqueue.id_range")
    for statement in (
        "CREATE POLICY tenants_only ON aioqueue.job USING (true)",
        'CREATE POLICY "Odd ""one" ON aioqueue.job USING (true)',
        f"CREATE POLICY on_a_part ON aioqueue.{a_range} USING (true)",
        f"ALTER TABLE aioqueue.{a_range} ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE aioqueue.live ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    ):
        await superuser.rows(statement)
    job, live, part = [await superuser.value(f"SELECT 'aioqueue.{name}'::regclass::text") for name in ("job", "live", a_range)]
    assert await ask("queue_policies") == [
        ("job", job, 'Odd "one', '"Odd ""one"', False, False),
        ("job", job, "tenants_only", "tenants_only", False, False),
        ("live", live, None, None, True, True),
        (a_range, part, "on_a_part", "on_a_part", True, False),
    ]


async def test_what_is_not_the_queue_s(ask: Ask, superuser: Session) -> None:
    """A table of the user's in the queue's schema, and one that is called as one of the queue's; FORCE alone does nothing."""
    for table in ("aioqueue.mine", "public.job"):
        await superuser.rows(f"CREATE TABLE {table} (tenant text)")
        await superuser.rows(f"CREATE POLICY own ON {table} USING (true)")
        await superuser.rows(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    await superuser.rows("ALTER TABLE aioqueue.live FORCE ROW LEVEL SECURITY")
    assert await ask("queue_policies") == []
