"""horizon-held: exactly those that keep VACUUM from a dead row, held against VACUUM itself; who, since when, how far back."""

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import AsyncConnection, pq

from aioqueue.doctor import horizon
from aioqueue.finding import Finding, Severity
from tests.doctor.conftest import Examine, Execute, codes, connection
from tests.kit import session, until, until_true
from tests.postgres import Database

pytestmark = pytest.mark.anyio
Held = Callable[[], Awaitable[bool]]

STATES = {
    "idle": [],
    "begin alone": ["BEGIN"],
    "reader gone idle": ["BEGIN", "SELECT * FROM shop.rubbish"],
    "written": ["BEGIN", "INSERT INTO shop.colours VALUES ('red')"],
    "row locked": ["BEGIN", "SELECT * FROM shop.colours FOR UPDATE"],
    "open cursor": ["BEGIN", "DECLARE c CURSOR FOR SELECT * FROM shop.rubbish", "FETCH 1 FROM c"],
    "repeatable read": ["BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT * FROM shop.rubbish"],
    "serializable": ["BEGIN ISOLATION LEVEL SERIALIZABLE", "SELECT * FROM shop.rubbish"],
    "a statement in flight": ["SELECT pg_sleep(600)"],
}
HARMFUL = {"written", "row locked", "open cursor", "repeatable read", "serializable", "a statement in flight"}


@pytest.fixture
async def vacuum(shop: Execute, database: Database) -> AsyncIterator[Held]:
    """A function that makes a dead row and vacuums its table; whether the row could not be removed."""
    await shop("CREATE TABLE shop.rubbish (i int) WITH (autovacuum_enabled = false)", "INSERT INTO shop.colours VALUES ('blue')")
    said: list[str] = []
    async with connection(database.dsn("owner")) as conn:
        conn.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))

        async def held() -> bool:
            said.clear()
            await conn.execute("INSERT INTO shop.rubbish VALUES (1)")
            await conn.execute("DELETE FROM shop.rubbish")
            await conn.execute("VACUUM (VERBOSE) shop.rubbish")
            (left,) = re.findall(r"(\d+) are dead but not yet removable", "\n".join(said))
            return int(left) > 0

        yield held


async def until_found(look: Examine, role: str) -> Finding:
    """Look until there is a finding: a statement counts once it has run for a moment."""

    async def findings() -> tuple[Finding, ...]:
        return (await look(role)).findings

    (finding,) = await until_true(findings)
    assert isinstance(finding, Finding)
    return finding


async def until_free(vacuum: Held) -> None:
    """Look until nothing is held: autovacuum, which comes when it likes, holds the horizon while it analyses a table."""

    async def free() -> bool:
        return not await vacuum()

    await until_true(free)


@pytest.mark.parametrize("state", STATES)
async def test_exactly_the_harmful_states_are_listed(look: Examine, vacuum: Held, database: Database, state: str) -> None:
    async with connection(database.dsn("owner")) as conn:
        running: asyncio.Task[object] | None = None
        for statement in STATES[state]:
            running = asyncio.create_task(conn.execute(statement.encode()))
            if state != "a statement in flight":
                await running
        if state in HARMFUL:
            for role in ("superuser", "worker"):
                finding = await until_found(look, role)
                assert (finding.code, finding.severity) == ("horizon-held", Severity.ADVICE), "it has only begun"
                assert f"session {conn.info.backend_pid} of role aioqueue_owner" in finding.what
                assert "transactions back" in finding.what
                assert str(conn.info.backend_pid) in finding.fix
            assert (await look("worker")).unseen, "what it does, and since when, takes pg_read_all_stats"
        else:
            assert codes(await look("superuser")) == codes(await look("worker")) == []
        if state in HARMFUL:
            assert await vacuum()
        else:
            await until_free(vacuum)
        if running is not None and not running.done():
            running.cancel()
            with pytest.raises((asyncio.CancelledError, psycopg.errors.QueryCanceled)):
                await running


async def test_another_database_holds_nothing_here(look: Examine, vacuum: Held, database: Database) -> None:
    async with connection(database.server.dsn("superuser", "postgres")) as conn:
        await conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await conn.execute("SELECT pg_current_xact_id()")
        assert codes(await look("superuser")) == []
        await until_free(vacuum)


async def test_a_vacuum_holds_nothing(look: Examine, vacuum: Held, database: Database, shop: Execute) -> None:
    await shop("INSERT INTO shop.rubbish SELECT generate_series(1, 20000)")
    async with connection(database.dsn("owner")) as conn:
        await conn.execute("SET vacuum_cost_delay = '100ms'")
        await conn.execute("SET vacuum_cost_limit = 1")
        running = asyncio.create_task(conn.execute("VACUUM shop.rubbish"))
        query = "SELECT count(backend_xmin) FROM pg_stat_progress_vacuum JOIN pg_stat_activity USING (pid) WHERE pid = %s"
        async with session(database.dsn("superuser"), "none") as watch:
            await until(watch, query, conn.info.backend_pid)
        assert not running.done()
        for role in ("superuser", "worker"):
            assert codes(await look(role)) == []
        running.cancel()
        with pytest.raises((asyncio.CancelledError, psycopg.errors.QueryCanceled)):
            await running


async def test_after_a_minute_it_is_a_warning(
    look: Examine, shop: Execute, boss: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop(*STATES["written"])
    (finding,) = (await look("superuser")).findings
    assert (finding.severity, "idle in transaction for" in finding.what) == (Severity.ADVICE, True)
    monkeypatch.setattr(horizon, "LONG_SECONDS", 0.0)
    report = await look("superuser")
    assert (report.findings[0].severity, report.wrong) == (Severity.WARNING, True)
    assert not (await look("worker")).wrong, "it cannot see since when"
    monkeypatch.setattr(horizon, "FAR_BACK", 3)
    await boss(*["SELECT pg_current_xact_id()"] * 4)
    assert (await look("worker")).wrong, "but how far back"
    await shop("ROLLBACK")
    assert codes(await look()) == []


async def test_a_prepared_transaction(look: Examine, shop: Execute, vacuum: Held) -> None:
    await shop("BEGIN", "INSERT INTO shop.colours VALUES ('red')", "PREPARE TRANSACTION 'it''s left'")
    for role in ("worker", "superuser"):
        (finding,) = (await look(role)).findings
        assert finding.code == "horizon-held"
        assert 'prepared transaction "it\'s left" of role aioqueue_owner' in finding.what
    assert await vacuum()
    await shop(finding.fix.partition(";")[0])
    assert codes(await look()) == []


@contextmanager
def standby(dsn: str, *, slot: str | None, xmin: int) -> Iterator[None]:
    """What a standby with hot_standby_feedback is to its primary: a replication connection that says what it reads."""
    conn = pq.PGconn.connect(f"{dsn}{'&' if '?' in dsn else '?'}replication=true&application_name=mirror".encode())
    try:
        assert conn.status == pq.ConnStatus.OK, conn.get_error_message()
        start = conn.exec_(b"IDENTIFY_SYSTEM").get_value(0, 2)
        assert start is not None
        name = f'SLOT "{slot}" ' if slot else ""
        result = conn.exec_(f"START_REPLICATION {name}PHYSICAL ".encode() + start)
        assert result.status == pq.ExecStatus.COPY_BOTH, result.get_error_message()
        conn.put_copy_data(b"h" + struct.pack("!qIIII", 0, xmin, 0, 0, 0))
        conn.flush()
        yield
    finally:
        conn.finish()


@pytest.mark.parametrize("slot", [None, "mirror"])
async def test_a_standby_that_says_what_it_reads(
    look: Examine, boss: Execute, vacuum: Held, owner: AsyncConnection, database: Database, slot: str | None
) -> None:
    row = await (await owner.execute("SELECT pg_current_xact_id()::text::int")).fetchone()
    assert row is not None
    await boss("SELECT pg_current_xact_id()")
    if slot:
        await boss(f"SELECT pg_create_physical_replication_slot('{slot}', true)")
    try:
        with standby(database.dsn("superuser"), slot=slot, xmin=row[0]):
            for role in ("worker", "superuser"):
                finding = await until_found(look, role)
                assert (finding.code, finding.severity) == ("horizon-held", Severity.ADVICE)
                assert ("physical replication slot mirror, active" if slot else "by hot_standby_feedback") in finding.what
                assert "hot_standby_feedback" in finding.fix
            assert await vacuum()
        if slot:
            # Its standby is gone, and what it said last holds for ever.
            async def inactive() -> Finding | None:
                (found,) = (await look()).findings
                return found if "inactive" in found.what else None

            finding = await until_true(inactive)
            assert finding.severity == Severity.WARNING
            await boss(finding.fix.partition(";")[0])
            slot = None
    finally:
        if slot:
            await boss(f"SELECT pg_drop_replication_slot('{slot}')")

    async def clean() -> bool:
        return not codes(await look())

    await until_true(clean)
