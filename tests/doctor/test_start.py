"""What a worker does about findings when it starts: it warns, or refuses, and what it says then."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from aioqueue import TenantSettings
from aioqueue.doctor import start as at_start
from aioqueue.errors import UnsafeDatabase
from aioqueue.events import RisksFound, WorkerStarted
from tests.doctor.conftest import Execute
from tests.kit import MakeApp, Seen

pytestmark = pytest.mark.anyio
STRICT = TenantSettings(strict_rls=True)
TASKS = """
import os
from aioqueue import AioQueue

app = AioQueue(schema=os.environ["AIOQUEUE_SCHEMA"])

@app.task(name="add")
async def add(a: int, b: int) -> int:
    return a + b
"""


@pytest.fixture
def policy(schema: str) -> tuple[str, ...]:
    """The commands that put the tenants' policy on the queue's own table, and take it off."""
    live = sql.Identifier(schema, "live").as_string(None)
    return (
        f"CREATE POLICY tenants_only ON {live} USING (tenant = current_setting('app.tenant', true))",
        f"ALTER TABLE {live} ENABLE ROW LEVEL SECURITY",
        f"DROP POLICY tenants_only ON {live}",
        f"ALTER TABLE {live} DISABLE ROW LEVEL SECURITY",
    )


async def test_a_worker_warns_once_with_the_fix(
    shop: Execute, make_app: MakeApp, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    await shop("GRANT TRUNCATE ON shop.orders TO aioqueue_worker")
    caplog.set_level(logging.WARNING, logger="aioqueue")
    async with make_app().worker():
        (event,) = seen.all(RisksFound)
    (finding,) = event.findings
    assert finding.code == "truncate-granted"
    (line,) = [record.message for record in caplog.records if "truncate-granted" in record.message]
    assert "REVOKE TRUNCATE ON shop.orders FROM aioqueue_worker;" in line


async def test_strict_refuses(shop: Execute, make_app: MakeApp, seen: Seen) -> None:
    await shop("GRANT TRUNCATE ON shop.orders TO aioqueue_worker")
    with pytest.raises(UnsafeDatabase, match=r"REVOKE TRUNCATE ON shop\.orders FROM aioqueue_worker;") as caught:
        async with make_app(tenants=STRICT).worker():
            pass
    assert [finding.code for finding in caught.value.findings] == ["truncate-granted"]
    assert not seen.all(WorkerStarted)


async def test_strict_starts_where_nothing_is_wrong(shop: Execute, make_app: MakeApp, seen: Seen) -> None:
    """Advice does not stop it."""
    await shop("CREATE VIEW shop.seen AS SELECT * FROM shop.orders", "GRANT SELECT ON shop.seen TO aioqueue_worker")
    app = make_app(tenants=STRICT)
    async with app, app.worker():
        assert await (await app.tasks["add"].enqueue(1, b=2)).result(timeout=60) == 3
    assert not seen.all(RisksFound)


async def test_the_role_that_jobs_take_on_counts(shop: Execute, boss: Execute, make_app: MakeApp, seen: Seen) -> None:
    await boss("CREATE ROLE clerk", "GRANT TRUNCATE ON shop.orders TO clerk", "GRANT clerk TO aioqueue_worker")
    try:
        async with make_app(tenants=TenantSettings(role="clerk")).worker():
            (event,) = seen.all(RisksFound)
        assert "role clerk may TRUNCATE" in event.findings[0].what
    finally:
        await boss("DROP OWNED BY clerk", "DROP ROLE clerk")


async def test_the_setting_of_the_app_is_looked_for(shop: Execute, make_app: MakeApp, seen: Seen) -> None:
    await shop("GRANT TRUNCATE ON shop.orders TO aioqueue_worker")
    async with make_app(tenants=TenantSettings(setting="app.customer", strict_rls=True)).worker():
        assert not seen.all(RisksFound)


async def test_a_policy_on_the_queue_stops_every_worker(
    shop: Execute, make_app: MakeApp, seen: Seen, policy: tuple[str, ...]
) -> None:
    create, enable, drop, disable = policy
    await shop(create, enable)
    try:
        with pytest.raises(UnsafeDatabase, match="policy tenants_only stands on the queue's table live"):
            async with make_app().worker():
                pass
    finally:
        await shop(drop, disable)
    async with make_app().worker():
        assert seen.all(WorkerStarted)


async def test_the_command_exits_with_3_and_names_policy_and_table(
    shop: Execute, worker_dsn: str, schema: str, policy: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    create, enable, drop, disable = policy
    await shop(create, enable)
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "aioqueue", "worker", "-A", "tasks:app"],
            cwd=tmp_path,
            env={**os.environ, "AIOQUEUE_DSN": worker_dsn, "AIOQUEUE_SCHEMA": schema},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        await shop(drop, disable)
    assert done.returncode == 3, done.stderr
    assert "policy tenants_only stands on the queue's table live" in done.stderr
    assert "DROP POLICY tenants_only ON" in done.stderr


@pytest.mark.parametrize("strict", [False, True])
async def test_checks_that_cannot_be_made(
    shop: Execute, make_app: MakeApp, seen: Seen, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """A catalogue that is locked, say: a warning, or strict, a refusal."""

    async def fails(*_: object) -> object:
        raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")

    monkeypatch.setattr(at_start, "examine_start", fails)
    if strict:
        with pytest.raises(UnsafeDatabase, match="not-checked"):
            async with make_app(tenants=STRICT).worker():
                pass
    else:
        async with make_app().worker():
            (event,) = seen.all(RisksFound)
        assert event.findings[0].code == "not-checked"
