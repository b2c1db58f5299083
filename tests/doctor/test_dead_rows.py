"""Dead rows, by the server's statistics: in a database of the test's own, since other sessions report theirs when they like."""

import pytest
from psycopg import sql

from aioqueue.doctor import vacuum
from tests.doctor.conftest import Examine, Execute, codes
from tests.postgres import Database

pytestmark = pytest.mark.anyio


@pytest.fixture
def database(own_database: Database) -> Database:
    return own_database


async def test_dead_rows_that_nobody_removes(look: Examine, shop: Execute, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "MANY", 500)
    table = sql.Identifier(schema, "cancel").as_string(None)
    await shop(
        f"ALTER TABLE {table} SET (autovacuum_vacuum_threshold = 1000000, autovacuum_analyze_threshold = 1000000)",
        f"INSERT INTO {table} SELECT gen_random_uuid(), 1, now() FROM generate_series(1, 501)",
        f"DELETE FROM {table}",
        "SELECT pg_stat_force_next_flush()",
    )
    report = await look()
    (finding,) = report.findings
    assert finding.code == "dead-rows"
    assert "501 dead rows and 0 living" in finding.what and "vacuumed" in finding.what
    assert [each["dead"] for name, each in report.facts["dead_rows"].items() if name.endswith(".cancel")] == [501]
    await shop(f"VACUUM {table}", "SELECT pg_stat_force_next_flush()")
    assert codes(await look()) == []
