"""A short run of benchmarks/misbehaviours.py: nothing runs under a foreign or missing tenant; and a broken build is found out."""

from collections.abc import Callable

import pytest

from aioqueue.job_connection import JobConnection
from aioqueue.pool_connection import PoolConnection
from benchmarks.misbehaviours import Report, run
from tests.kit import session
from tests.postgres import Database
from tests.sql.engine import changed

pytestmark = pytest.mark.anyio

SEED = 4


async def short_run(database: Database, schema: str, handlers: int = 150) -> Report:
    superuser = database.dsn("superuser")
    try:
        return await run(database.dsn("worker"), superuser, schema, handlers=handlers, seed=SEED)
    finally:
        async with session(superuser, schema) as boss:
            await boss.rows("DROP SCHEMA IF EXISTS shop, audit CASCADE")


async def test_no_statement_runs_under_a_foreign_or_missing_tenant(database: Database, schema: str) -> None:
    report = await short_run(database, schema)
    assert not report.wrongs, report
    assert report.statements > 300 and report.states["transaction violation"] > 20, report


async def test_a_reference_that_outlives_its_job_is_found_out(
    database: Database, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if user code had the pool's connection itself."""
    init = JobConnection.__init__

    def same_lock(self: JobConnection, pooled: PoolConnection, check: Callable[[], None]) -> None:
        init(self, pooled, check)
        self.lock, self._pool = pooled.lock, None  # the second: or its end would be warned of

    monkeypatch.setattr(JobConnection, "__init__", same_lock)
    monkeypatch.setattr(JobConnection, "kill", lambda self: None)
    assert any("under another tenant" in wrong for wrong in (await short_run(database, schema)).wrongs)


@pytest.mark.parametrize(
    ("function", "sabotage"),
    [
        ("check_transaction", ("IF changed IS NULL THEN", "IF true THEN")),
        ("scrub", ("    RESET ALL;\n", "    RETURN 1000;\n")),
    ],
)
async def test_a_check_or_a_cleaning_that_is_missing_is_found_out(
    database: Database, schema: str, function: str, sabotage: tuple[str, str]
) -> None:
    async with session(database.dsn("owner"), schema) as owner, changed(owner, function, sabotage):
        assert (await short_run(database, schema)).wrongs
