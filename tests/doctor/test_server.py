"""Faults of the server and of the way to it: settings, notifications, clocks, a pooler."""

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue.doctor import clock, notifications
from aioqueue.finding import Severity
from tests.doctor.conftest import Examine, Execute, codes, connection
from tests.kit import until_true
from tests.postgres import Database

pytestmark = pytest.mark.anyio


async def test_no_idle_timeout_is_advice(look: Examine, boss: Execute, database: Database) -> None:
    await boss(f"ALTER DATABASE {database.name} RESET idle_in_transaction_session_timeout")
    report = await look()
    assert [(f.code, f.severity) for f in report.findings] == [("idle-in-transaction", Severity.ADVICE)]
    assert not report.wrong


async def test_a_listener_in_another_database_hears_nothing(
    look: Examine, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "PATIENCE", 0.2)

    async def elsewhere() -> AsyncConnection[Any]:
        return await AsyncConnection.connect(database.server.dsn("worker", "postgres"), autocommit=True)

    report = await look(listen=elsewhere)
    assert codes(report) == ["notify-lost"]
    assert report.facts["notify_seconds"] is None


async def test_a_listener_that_cannot_connect(look: Examine) -> None:
    async def nowhere() -> AsyncConnection[Any]:
        return await AsyncConnection.connect("postgresql://127.0.0.1:1/none")

    (finding,) = (await look(listen=nowhere)).findings
    assert (finding.code, "nobody can listen" in finding.what) == ("notify-lost", True)


async def test_commits_that_wait_for_each_other(look: Examine, boss: Execute, database: Database) -> None:
    """A commit with a NOTIFY that does not end, for want of a synchronous standby, holds up every other NOTIFY."""
    await boss("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    try:
        async with connection(database.dsn("owner")) as stuck, connection(database.dsn("superuser")) as watch:
            await stuck.execute("SET synchronous_commit = on")
            waits = f"SELECT FROM pg_stat_activity WHERE pid = {stuck.info.backend_pid} AND wait_event = 'SyncRep'"
            while True:  # until the server has read its configuration anew
                held = asyncio.create_task(stuck.execute("INSERT INTO shop.colours VALUES ('red'); NOTIFY anything"))
                await until_true(lambda held=held: held.done() or rows(watch, waits))  # type: ignore[misc]
                if not held.done():
                    break
            looking = asyncio.ensure_future(look())
            slow = (
                "SELECT FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE NOT granted AND locktype = 'object'"
                " AND clock_timestamp() - query_start > interval '0.6 s'"
            )
            await until_true(lambda: rows(watch, slow))
            held.cancel()
            with pytest.raises((asyncio.CancelledError, psycopg.Error)):
                await held
            assert codes(await looking) == ["notify-slow", "horizon-held"], "it has written, too"
    finally:
        await boss("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


async def rows(conn: AsyncConnection[Any], query: str) -> int:
    """How many rows a query gives."""
    return (await conn.execute(query.encode())).rowcount


async def test_a_queue_that_does_not_drain(
    look: Examine, shop: Execute, owner: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert codes(await look()) == []
    monkeypatch.setattr(notifications, "USED", 0.0)
    await shop("LISTEN anything", "BEGIN")
    await owner.execute("SELECT pg_notify('anything', repeat('x', 7000) || i) FROM generate_series(1, 40) i")
    assert "notify-queue-fills" in codes(await look())


@pytest.mark.parametrize(("seconds", "where"), [(10.0, "10.0 s ahead of"), (-10.0, "behind")])
async def test_a_clock_that_is_wrong(look: Examine, monkeypatch: pytest.MonkeyPatch, seconds: float, where: str) -> None:
    right = clock.now
    monkeypatch.setattr(clock, "now", lambda: right() + seconds)
    (finding,) = (await look()).findings
    assert (finding.code, where in finding.what) == ("clock-skew", True)
    monkeypatch.setattr(clock, "now", lambda: right() + seconds / 10)
    assert codes(await look()) == []


async def test_a_slow_answer_is_no_wrong_clock(look: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = clock.now
    asked = iter([right() - 30, right() + 30])
    monkeypatch.setattr(clock, "now", lambda: next(asked))
    assert codes(await look()) == []


async def test_a_pooler_without_a_way_past_it(look: Examine) -> None:
    report = await look(listen=None, pooler=True)
    assert [(f.code, f.severity) for f in report.findings] == [("pooler", Severity.ADVICE)]
    assert codes(await look(pooler=True)) == [], "with a listen_dsn all is well"
