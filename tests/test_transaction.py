"""A job's transactions: the tenant inside, nothing of it afterwards, both or neither, and what misbehaving tasks get.

The bench's pool has one connection that the jobs share, so that what one leaves behind, the next would find.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import AsyncTransaction, sql
from psycopg.pq.abc import PGresult
from psycopg.rows import dict_row
from psycopg.types.string import StrDumper

from aioqueue import AioQueue, JobContext, JobTransaction, LeaseLost, LimitSettings, Snooze
from aioqueue.attempt import Cause
from aioqueue.events import JobLost
from aioqueue.outcome import Failed, Reason, Released, Snoozed
from aioqueue.pool_connection import sever
from aioqueue.settings import LeaseSettings
from aioqueue.trip import Trip
from tests.kit import Bench, bench, passed, session, until
from tests.postgres import Database as ServerDatabase
from tests.shop import add_probe, assert_clean, notes, write
from tests.sql.engine import Session, changed

pytestmark = pytest.mark.anyio

Misbehave = Callable[[JobTransaction], Awaitable[object]]


# -- the tenant ----------------------------------------------------------------------------------------------------------


async def test_a_job_sees_and_writes_the_rows_of_its_tenant_only(at: Bench, shop: Session) -> None:
    seen: list[Any] = []

    async def work(tx: JobTransaction, body: str) -> None:
        await write(tx, body)
        seen.append(await tx.fetch_all("SELECT tenant, body FROM shop.note ORDER BY id"))

    at.tasks.task(name="work")(work)
    for tenant, body in (("a", "one"), ("b", "two"), ("a", "three")):
        assert await at.run("work", f'{{"body": "{body}"}}', tenant=tenant) is None
    assert seen == [[("a", "one")], [("b", "two")], [("a", "one"), ("a", "three")]]
    assert await notes(shop) == [("a", "one"), ("b", "two"), ("a", "three")]


async def test_a_job_of_no_tenant_has_an_empty_setting_and_sees_nobody_s_rows(at: Bench, shop: Session) -> None:
    await shop.rows("INSERT INTO shop.note (tenant, body) VALUES ('a', 'secret')")
    seen: list[Any] = []

    async def work(tx: JobTransaction) -> None:
        seen.append((tx.tenant, await tx.fetch_value("SELECT current_setting('app.tenant')")))
        seen.append(await tx.fetch_all("SELECT body FROM shop.note"))

    at.tasks.task(name="work")(work)
    assert await at.run("work") is None
    assert seen == [("", ""), []]


async def test_a_row_of_another_tenant_cannot_be_written(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        await tx.execute("INSERT INTO shop.note (tenant, body) VALUES ('b', 'planted')")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and "row-level security" in outcome.error.message
    assert await notes(shop) == []


async def test_the_tenant_is_set_before_user_code_and_only_for_the_transaction(at: Bench) -> None:
    async def work(ctx: JobContext) -> list[str]:
        inside = []
        async with ctx.transaction() as tx:
            inside.append(await tx.fetch_value("SELECT current_setting('app.tenant')"))
        async with at.database.runtime() as conn:
            row = await (await conn.execute("SELECT current_setting('app.tenant', true)")).fetchone()
            inside.append(row and row[0])
        return inside

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert outcome is not None
    assert getattr(outcome, "result", outcome) in ('["a",null]', '["a",""]')


# -- nothing is left for the next job ------------------------------------------------------------------------------------


async def fail(tx: JobTransaction) -> None:
    raise ValueError("no")


async def snooze(tx: JobTransaction) -> None:
    raise Snooze(60)


async def nothing(tx: JobTransaction) -> None:
    pass


async def bad_statement(tx: JobTransaction) -> None:
    await tx.execute("SELECT 1 / 0")


async def swallow(tx: JobTransaction) -> None:
    with contextlib.suppress(psycopg.Error):
        await tx.execute("SELECT 1 / 0")


def statement(*texts: LiteralString) -> Misbehave:
    async def run(tx: JobTransaction) -> None:
        for text in texts:
            await tx.execute(text)

    return run


async def set_factories(tx: JobTransaction) -> None:
    class Shout(StrDumper):
        def dump(self, obj: str) -> bytes:
            return obj.upper().encode()

    class Cursor(psycopg.AsyncCursor[Any]):
        pass

    conn: Any = tx.connection
    conn.row_factory = dict_row
    conn.cursor_factory = Cursor
    conn.adapters.register_dumper(str, Shout)
    conn.prepare_threshold = 0
    conn.add_notice_handler(lambda _: None)
    conn.add_notify_handler(lambda _: None)


async def leave_cursor(tx: JobTransaction) -> None:
    await tx.execute("DECLARE left_open CURSOR WITH HOLD FOR SELECT body FROM shop.note")


async def set_and_keep(tx: JobTransaction) -> None:
    await tx.execute("SET own.secret = 'a'")
    await tx.execute("SET TimeZone = 'Asia/Tokyo'")
    await tx.execute("SET default_transaction_isolation = 'serializable'")


async def shadow(tx: JobTransaction) -> None:
    for name in ("job", "live", "outcome", "attempt", "worker", "note"):
        await tx.execute(sql.SQL("CREATE TEMP TABLE {} (id integer)").format(sql.Identifier(name)))


async def deallocate(tx: JobTransaction) -> None:
    for _ in range(3):
        await tx.fetch_all("SELECT body FROM shop.note")
    await tx.execute("DEALLOCATE ALL")


async def error_in_savepoint(tx: JobTransaction) -> None:
    await tx.execute("SAVEPOINT one")
    await swallow(tx)
    await tx.execute("ROLLBACK TO SAVEPOINT one")


def _shadow_type(name: LiteralString) -> LiteralString:
    return "CREATE TEMP TABLE " + name + " (id integer)"


WELL_BEHAVED: dict[str, Misbehave] = {
    "nothing": nothing,
    "search_path": statement("SET search_path = shop, pg_temp"),
    "session settings": set_and_keep,
    "a tenant for the session, the same": statement("SET app.tenant = 'before'"),
    "a temporary table": statement("CREATE TEMP TABLE left_behind AS SELECT body FROM shop.note"),
    "temporary tables that shadow ours": shadow,
    "temporary tables that shadow types": statement(*map(_shadow_type, ("uuid", "text", "jsonb", "timestamptz", "int8", "bool"))),
    "a temporary table full of rows": statement(
        "CREATE TEMP TABLE rows ON COMMIT PRESERVE ROWS AS SELECT n, repeat('x', 100) FROM generate_series(1, 20000) n",
        "CREATE INDEX ON rows (n)",
    ),
    "a temporary view and a sequence": statement(
        "CREATE TEMP VIEW note AS SELECT 'a' AS tenant, 'planted' AS body",
        "CREATE TEMP SEQUENCE s",
        "SELECT nextval('pg_temp.s')",
    ),
    "LISTEN": statement("LISTEN left_behind"),
    "LISTEN and NOTIFY": statement("LISTEN left_behind", "NOTIFY left_behind, 'x'"),
    "session characteristics": statement("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY, ISOLATION LEVEL SERIALIZABLE"),
    "another encoding": statement("SET client_encoding = 'LATIN1'"),
    "another syntax of strings": statement("SET standard_conforming_strings = off", "SET DateStyle = 'SQL, DMY'"),
    "session authorization, the same": statement("SET SESSION AUTHORIZATION aioqueue_worker"),
    "an error in a savepoint of SQL": error_in_savepoint,
    "a savepoint left open": statement("SAVEPOINT one", "SAVEPOINT two"),
    "advisory locks": statement("SELECT pg_advisory_lock(1), pg_advisory_lock_shared(2)"),
    "a cursor with hold": leave_cursor,
    "PREPARE": statement("PREPARE left_behind AS SELECT body FROM shop.note"),
    "factories, adapters, handlers": set_factories,
    "DEALLOCATE ALL": deallocate,
    "a role, taken back": statement("SET ROLE aioqueue_worker", "RESET ROLE"),
    "a local time-out": statement("SET statement_timeout = '1h'", "SET lock_timeout = '1h'"),
}


@pytest.mark.parametrize("name", WELL_BEHAVED)
async def test_nothing_of_a_job_that_succeeds_is_left_for_the_next(at: Bench, shop: Session, name: str) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        await WELL_BEHAVED[name](tx)

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    pid = found["pid"]
    assert await at.run("work", tenant="before") is None
    assert await notes(shop) == [("before", "before")]
    await assert_clean(at, found)
    assert found["pid"] == pid, "the connection is kept"
    # The same again finds nothing in its way.
    assert await at.run("work", tenant="before") is None, at.outcomes


FAILING: dict[str, Misbehave] = {
    "an exception": fail,
    "Snooze": snooze,
    "a refused statement": bad_statement,
}


@pytest.mark.parametrize("left", [name for name in WELL_BEHAVED if not name.startswith(("a role", "a local", "search"))])
@pytest.mark.parametrize("name", FAILING)
async def test_nothing_of_a_job_that_fails_is_left_for_the_next(at: Bench, shop: Session, name: str, left: str) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        await WELL_BEHAVED[left](tx)
        await FAILING[name](tx)

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    pid = found["pid"]
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed | Snoozed), outcome
    assert await notes(shop) == []
    await assert_clean(at, found)
    assert found["pid"] == pid, "the connection is kept"


async def commit(tx: JobTransaction) -> None:
    await tx.execute("COMMIT")


async def commit_in_pipeline(tx: JobTransaction) -> None:
    async with tx.connection.pipeline():
        await tx.execute("COMMIT")
        await tx.execute("SELECT 1")


async def enter_nested(tx: JobTransaction) -> None:
    await AsyncTransaction(tx.connection).__aenter__()


async def open_pipeline(tx: JobTransaction) -> None:
    conn: Any = tx.connection
    await conn.pipeline().__aenter__()
    await conn.execute("SELECT 1")


async def other_connection_modes(tx: JobTransaction) -> None:
    await tx.execute("COMMIT")
    await tx.connection.set_autocommit(False)


async def unfinished_copy(tx: JobTransaction) -> None:
    copy: Any = tx.connection.cursor().copy("COPY shop.parent FROM STDIN")
    await copy.__aenter__()


VIOLATIONS: dict[str, tuple[Misbehave, str]] = {
    "COMMIT": (commit, "COMMIT or ROLLBACK"),
    "ROLLBACK": (statement("ROLLBACK"), "COMMIT or ROLLBACK"),
    "END": (statement("END"), "COMMIT or ROLLBACK"),
    "ABORT": (statement("ABORT"), "COMMIT or ROLLBACK"),
    "ROLLBACK AND CHAIN": (statement("ROLLBACK AND CHAIN"), "COMMIT or ROLLBACK"),
    "COMMIT in a pipeline": (commit_in_pipeline, "COMMIT or ROLLBACK"),
    "a tenant set in a savepoint that is kept": (
        statement("SAVEPOINT s", "SET LOCAL app.tenant = 'victim'", "RELEASE s"),
        "app.tenant",
    ),
    "a tenant set by a function": (
        statement("DO $$ BEGIN PERFORM set_config('app.tenant', 'victim', true); END $$"),
        "app.tenant",
    ),
    "COMMIT AND CHAIN": (statement("COMMIT AND CHAIN"), "COMMIT or ROLLBACK"),
    "COMMIT and BEGIN": (statement("COMMIT", "BEGIN"), "COMMIT or ROLLBACK"),
    "COMMIT; BEGIN": (statement("COMMIT; BEGIN"), "COMMIT or ROLLBACK"),
    "SET app.tenant": (statement("SET app.tenant = 'victim'"), "app.tenant"),
    "SET LOCAL app.tenant": (statement("SET LOCAL app.tenant = 'victim'"), "app.tenant"),
    "set_config for the session": (statement("SELECT set_config('app.tenant', 'victim', false)"), "app.tenant"),
    "RESET app.tenant": (statement("RESET app.tenant"), "app.tenant"),
    "RESET ALL": (statement("RESET ALL"), "COMMIT or ROLLBACK"),
    "SET ROLE": (statement("SET ROLE aioqueue_worker"), "role"),
    "row_security": (statement("SET row_security = off"), "row_security"),
    "an error swallowed": (swallow, "a statement failed"),
    "COMMIT and autocommit off": (other_connection_modes, "COMMIT or ROLLBACK"),
    "a nested transaction() not left": (enter_nested, "transaction()"),
    "a pipeline left open": (open_pipeline, "pipeline"),
    "a COPY left open": (unfinished_copy, "under way"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_task_that_breaks_its_transaction_fails_with_what_it_did_and_harms_nobody(
    at: Bench, shop: Session, name: str
) -> None:
    found = add_probe(at)
    misbehave, said = VIOLATIONS[name]

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        await misbehave(tx)

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION, outcome
    assert said in outcome.error.message
    # What the task committed itself is its own doing; everything else is rolled back.
    assert await notes(shop) == ([("before", "before")] if "COMMIT" in name or name == "END" else [])
    await assert_clean(at, found)


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_task_that_breaks_its_transaction_and_then_raises_harms_nobody(at: Bench, shop: Session, name: str) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        misbehave = VIOLATIONS[name][0]
        await misbehave(tx)
        raise ValueError("mine")

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed), outcome
    if VIOLATIONS[name][1] == "COMMIT or ROLLBACK":
        # What it wrote may be there for good: that is said, with the line that did it, or what it raised as the cause.
        assert outcome.reason is Reason.VIOLATION
        assert "COMMIT or ROLLBACK" in outcome.error.message
        seen_at_once = name not in ("COMMIT; BEGIN", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "RESET ALL")
        assert ("await misbehave(tx)" if seen_at_once else "mine") in (outcome.error.traceback or "")
    else:
        assert outcome.error.message == "mine"
    await assert_clean(at, found)


async def defer(tx: JobTransaction) -> None:
    await tx.execute("INSERT INTO shop.child VALUES (404)")


async def defer_and_set(tx: JobTransaction) -> None:
    await tx.execute("SET CONSTRAINTS ALL DEFERRED")
    await defer(tx)


REFUSED_AT_THE_END: dict[str, tuple[Misbehave, str]] = {
    "a deferred constraint": (defer, "violates foreign key"),
    "a deferred constraint, SET CONSTRAINTS": (defer_and_set, "violates foreign key"),
    "READ ONLY": (statement("SET TRANSACTION READ ONLY"), "read-only"),
    "DISCARD ALL": (statement("DISCARD ALL"), "DISCARD ALL"),
    "VACUUM": (statement("VACUUM shop.parent"), "VACUUM"),
}


@pytest.mark.parametrize("name", REFUSED_AT_THE_END)
async def test_what_the_server_refuses_fails_the_attempt_with_its_reason(at: Bench, shop: Session, name: str) -> None:
    found = add_probe(at)
    misbehave, said = REFUSED_AT_THE_END[name]

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        await misbehave(tx)

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed) and outcome.delay is not None, outcome
    assert said in outcome.error.message
    assert await notes(shop) == []
    await assert_clean(at, found)


async def test_a_transaction_that_is_prepared_is_a_violation(at: Bench, shop: Session) -> None:
    """It is out of aioqueue's hands then; the doctor shows those that are left."""
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        await tx.execute("PREPARE TRANSACTION 'left behind'")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="before")
    left = await shop.rows("SELECT gid FROM pg_prepared_xacts")
    for (gid,) in left:
        await shop.conn.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
    assert isinstance(outcome, Failed), outcome
    said = "PREPARE TRANSACTION" if left else "prepared transactions are disabled"
    assert said in outcome.error.message and (outcome.reason is Reason.VIOLATION) == bool(left)
    await assert_clean(at, found)


async def test_commit_and_rollback_of_the_connection_are_refused_in_the_task_s_own_stack(at: Bench) -> None:
    refused: list[str] = []

    async def work(tx: JobTransaction) -> None:
        for call in (tx.connection.commit, tx.connection.rollback, lambda: tx.connection.set_autocommit(False)):
            with pytest.raises(psycopg.ProgrammingError) as caught:
                await call()
            refused.append(str(caught.value))

    at.tasks.task(name="work")(work)
    assert await at.run("work") is None
    assert len(refused) == 3


async def test_a_savepoint_lets_a_task_go_on_after_an_error(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        with contextlib.suppress(psycopg.Error):
            async with tx.connection.transaction():
                await write(tx, "inner")
                await tx.execute("SELECT 1 / 0")
        await write(tx, "outer")

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None
    assert await notes(shop) == [("a", "outer")]


@pytest.mark.parametrize("waits", ["in a query", "in the loop"])
async def test_a_time_out_rolls_back_and_keeps_the_connection(at: Bench, shop: Session, waits: str) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "before")
        await set_factories(tx)
        if waits == "in a query":
            await tx.connection.execute("SELECT pg_sleep(1000)")
        await asyncio.Event().wait()

    at.tasks.task(name="work", timeout=0.2)(work)
    await assert_clean(at, found)
    pid = found["pid"]
    for _ in range(5):
        outcome = await at.run("work", tenant="before")
        assert isinstance(outcome, Failed) and outcome.reason is Reason.TIME_LIMIT, outcome
        assert outcome.error.type.endswith("TimeLimitExceeded") and outcome.delay is not None
        await assert_clean(at, found)
        assert found["pid"] == pid
    assert await notes(shop) == []


async def test_a_lock_that_is_waited_for_beyond_the_time_limit_is_a_time_out(at: Bench, shop: Session, owner_dsn: str) -> None:
    async def work(tx: JobTransaction) -> None:
        await tx.execute("LOCK TABLE shop.parent")

    at.tasks.task(name="work", timeout=0.3)(work)
    async with session(owner_dsn, at.store.schema) as other, other.conn.transaction():
        await other.rows("LOCK TABLE shop.parent")
        outcome = await at.run("work")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.TIME_LIMIT, outcome


async def test_a_time_out_in_a_short_transaction_rolls_back_and_keeps_the_connection(at: Bench, shop: Session) -> None:
    found = add_probe(at)

    async def work(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await write(tx, "before")
            await tx.execute("SELECT pg_sleep(1000)")

    at.tasks.task(name="work", timeout=0.3)(work)
    await assert_clean(at, found)
    pid = found["pid"]
    outcome = await at.run("work", tenant="before")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.TIME_LIMIT, outcome
    assert await notes(shop) == []
    await assert_clean(at, found)
    assert found["pid"] == pid


async def test_300_jobs_that_succeed_fail_or_are_cancelled_use_one_connection(at: Bench, shop: Session) -> None:
    pids: set[int] = set()
    inside = asyncio.Event()

    async def work(tx: JobTransaction, n: int) -> int:
        pids.add(tx.connection.info.backend_pid)
        assert await tx.fetch_all("SELECT body FROM shop.note") == []
        match n % 4:
            case 0:
                raise ValueError("no")
            case 1:
                await tx.execute("SELECT 1 / 0")
            case 2:
                inside.set()
                if n % 8 == 2:
                    await tx.execute("SELECT pg_sleep(1000)")
                await asyncio.Event().wait()
        return n

    at.tasks.task(name="work")(work)
    for n in range(300):
        inside.clear()
        job = await at.start("work", f'{{"n": {n}}}', tenant=f"t{n % 3}")
        if n % 4 == 2:
            await passed(inside)
            if n % 8 == 2:
                # A cancellation that reaches the server before the query does is lost, and psycopg closes the connection.
                await until(shop, "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s", *pids)
            at.stop(job, Cause.INTERRUPTED)
        await at.end()
        outcome = at.outcomes.get(job.job_id)
        assert isinstance(outcome, (Failed, Failed, Released, type(None))[n % 4]), outcome
    assert len(pids) == 1


async def test_prepared_statements_live_on_from_job_to_job(at: Bench) -> None:
    prepared: list[int] = []

    async def work(tx: JobTransaction) -> None:
        prepared.append(await tx.fetch_value("SELECT count(*) FROM pg_prepared_statements"))

    at.tasks.task(name="work")(work)
    for _ in range(6):
        assert await at.run("work") is None
    assert prepared[-1] >= prepared[2] > 0


async def test_statements_that_a_job_deallocates_unseen_are_prepared_anew(at: Bench) -> None:
    """psycopg believes that they are there: a job that took its own last statement away is told, the next one never meets it."""

    async def work(tx: JobTransaction, most: int) -> None:
        await tx.fetch_value("SELECT 1")
        await tx.execute(
            "DO $$ DECLARE one text; BEGIN FOR one IN SELECT name FROM pg_prepared_statements WHERE NOT from_sql"
            " ORDER BY prepare_time LIMIT current_setting('own.most')::int LOOP EXECUTE 'DEALLOCATE ' || one; END LOOP; END $$"
            if (await tx.fetch_value("SELECT set_config('own.most', %s, true)", [str(most)])) != "0"
            else "SELECT 1"
        )

    at.tasks.task(name="work")(work)
    for most in (0, 0, 100, 0, 0, 1, 0, 0):
        outcome = await at.run("work", f'{{"most": {most}}}')
        if most < 100:
            assert outcome is None, at.outcomes
        else:
            assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION
            assert "it deallocated what the connection had prepared" in outcome.error.message


@pytest.mark.parametrize("statement", ["SET CONSTRAINTS ALL IMMEDIATE", "%finish(%", "COMMIT", "%scrub(%", "BEGIN"])
async def test_one_of_our_own_statements_is_deallocated_unseen(at: Bench, shop: Session, statement: str) -> None:
    """Before COMMIT: the job has broken its transaction, and nothing of it is committed. After it: the connection goes."""
    after = statement in ("%scrub(%", "BEGIN")

    async def work(tx: JobTransaction, gone: str) -> None:
        await write(tx, "one")
        await tx.execute("SELECT set_config('own.gone', %s, true)", [gone])
        await tx.execute(
            "DO $$ DECLARE one text; BEGIN FOR one IN SELECT name FROM pg_prepared_statements"
            " WHERE statement LIKE current_setting('own.gone') LOOP EXECUTE 'DEALLOCATE ' || one; END LOOP; END $$"
        )

    at.tasks.task(name="work")(work)
    for gone in ("", "", statement, "", ""):
        outcome = await at.run("work", json.dumps({"gone": gone}), tenant="a")
        if not gone or after:
            assert outcome is None, at.outcomes
        else:
            assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION
            assert "it deallocated what the connection had prepared" in outcome.error.message
    assert len(at.settled_jobs) == 4 + after
    assert await notes(shop) == [("a", "one")] * (4 + after)


async def test_the_connection_is_out_of_reach_once_the_transaction_has_ended(at: Bench) -> None:
    kept: list[JobTransaction] = []

    async def work(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            kept.append(tx)
        with pytest.raises(RuntimeError, match="has ended"):
            tx.connection
        with pytest.raises(ValueError):
            async with ctx.transaction() as tx:
                kept.append(tx)
                raise ValueError
        with pytest.raises(RuntimeError, match="has ended"):
            await tx.execute("SELECT 1")

    async def own(tx: JobTransaction) -> None:
        kept.append(tx)

    at.tasks.task(name="work")(work)
    at.tasks.task(name="own")(own)
    outcome = await at.run("work")
    assert getattr(outcome, "result", outcome) == "null"
    assert await at.run("own") is None
    assert len(kept) == 3
    for tx in kept:
        with pytest.raises(RuntimeError, match="has ended"):
            tx.connection


# -- both or neither -----------------------------------------------------------------------------------------------------


async def test_success_and_writes_commit_together(at: Bench, shop: Session) -> None:
    states: list[Any] = []

    async def work(tx: JobTransaction) -> int:
        await write(tx, "one")
        states.append((await shop.state(tx.job_id), await notes(shop)))
        return 7

    at.tasks.task(name="work")(work)
    assert await at.run("work", tenant="a") is None
    (job,) = at.settled_jobs
    assert states == [("running", [])]
    assert await notes(shop) == [("a", "one")]
    assert await shop.rows("SELECT state, result FROM aioqueue.outcome WHERE job_id = %s", job.job_id) == [("succeeded", 7)]


async def test_a_deferred_constraint_that_fails_keeps_the_connection(at: Bench, shop: Session) -> None:
    """It fails before COMMIT, where nothing is in doubt and nothing has to be read back."""
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "one")
        await defer(tx)

    at.tasks.task(name="work")(work)
    await assert_clean(at, found)
    pid = found["pid"]
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and "ForeignKeyViolation" in outcome.error.type
    assert await notes(shop) == []
    await assert_clean(at, found)
    assert found["pid"] == pid


async def test_an_error_of_a_deferred_trigger_is_the_triggers(at: Bench, shop: Session) -> None:
    """Not taken for a result that cannot be stored, nor for a role that may not end the transaction."""
    await shop.conn.execute(
        "CREATE FUNCTION shop.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION USING ERRCODE = current_setting('shop.code'), MESSAGE = 'refused'; END $$;"
        " CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON shop.parent DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION shop.refuse()"
    )

    async def work(tx: JobTransaction, code: str) -> None:
        await tx.execute("SELECT set_config('shop.code', %s, true)", [code])
        await tx.execute("INSERT INTO shop.parent VALUES (1)")

    at.tasks.task(name="work")(work)
    for code in ("22023", "42501", "P0001"):
        outcome = await at.run("work", f'{{"code": "{code}"}}')
        assert isinstance(outcome, Failed) and outcome.reason is Reason.ERROR, outcome
        assert outcome.error.message.startswith("refused")


async def test_a_late_run_s_transaction_rolls_back(at: Bench, shop: Session) -> None:
    """Its worker was declared dead and the job was taken over in the middle of its transaction."""

    async def work(tx: JobTransaction) -> None:
        await write(tx, "late")
        await take_over(at)

    at.tasks.task(name="work")(work)
    job = await at.start("work", tenant="a")
    await at.end()
    assert job.job_id not in at.outcomes and not at.settled_jobs
    assert at.seen.all(JobLost, job_id=job.job_id)
    assert await notes(shop) == []
    assert await at.state(job) == "ready"


async def take_over(at: Bench) -> None:
    """Let the bench's worker be declared dead and its jobs be rescued."""
    await at.engine.end_lease(at.worker)
    assert await at.engine.rescue() == (at.worker, 1)


async def test_a_zombie_s_short_transaction_rolls_back_with_lease_lost(at: Bench, shop: Session) -> None:
    raised: list[BaseException] = []

    async def work(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await write(tx, "in time")
        await take_over(at)
        try:
            async with ctx.transaction() as tx:
                await write(tx, "late")
        except LeaseLost as error:
            raised.append(error)
            raise

    at.tasks.task(name="work")(work)
    await at.run("work", tenant="a")
    assert len(raised) == 1
    assert await notes(shop) == [("a", "in time")]


async def test_a_short_transaction_rolls_back_with_an_exception_and_is_clean_afterwards(at: Bench, shop: Session) -> None:
    found = add_probe(at)

    async def work(ctx: JobContext) -> None:
        with pytest.raises(ZeroDivisionError):
            async with ctx.transaction() as tx:
                await write(tx, "one")
                await set_and_keep(tx)
                raise ZeroDivisionError
        async with ctx.transaction() as tx:
            await write(tx, "two")
            await set_factories(tx)

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert getattr(outcome, "result", outcome) == "null"
    assert await notes(shop) == [("a", "two")]
    await assert_clean(at, found)


async def test_a_short_transaction_that_was_broken_is_a_violation(at: Bench, shop: Session) -> None:
    async def work(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await write(tx, "one")
            await tx.execute("SET app.tenant = 'victim'")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.reason is Reason.VIOLATION
    assert "app.tenant" in outcome.error.message
    assert await notes(shop) == []


async def test_a_hint_follows_a_commit_that_enqueued_and_no_other(at: Bench) -> None:
    app = at.tasks
    assert isinstance(app, AioQueue)

    @app.task(name="child")
    async def child() -> None:
        pass

    @app.task(name="parent")
    async def parent(tx: JobTransaction, fails: bool, enqueues: bool) -> None:
        if enqueues:
            await child.enqueue()
        if fails:
            raise ValueError

    for fails in ("true", "false"):
        for enqueues in ("true", "false"):
            await at.run("parent", f'{{"fails": {fails}, "enqueues": {enqueues}}}')
            await at.engine.rows("DELETE FROM aioqueue.live WHERE worker IS NULL")
    assert at.hints == ["ready"]


@pytest.mark.parametrize("short", [False, True], ids=["own transaction", "short transaction"])
async def test_hints_follow_a_commit_that_cancelled(shop: Session, worker_dsn: str, short: bool) -> None:
    """To the worker that runs the job, and to those who wait for its end."""
    app = AioQueue(worker_dsn, schema=shop.store.schema)

    @app.task(name="child")
    async def child() -> None:
        pass

    async def cancel(job_id: str) -> None:
        await app.job(job_id).cancel()

    @app.task(name="own")
    async def own(tx: JobTransaction, job_id: str) -> None:
        await cancel(job_id)

    @app.task(name="short")
    async def in_short(ctx: JobContext, job_id: str) -> None:
        async with ctx.transaction():
            await cancel(job_id)

    async with bench(worker_dsn, shop, app) as at, app:
        job = await child.options(delay=3600).enqueue()
        outcome = await at.run("short" if short else "own", f'{{"job_id": "{job.id}"}}')
        assert not isinstance(outcome, Failed), outcome
        assert sorted(at.hints) == ["done", "ready"]


# -- connections that die ------------------------------------------------------------------------------------------------


async def kill(shop: Session, pid: int) -> None:
    """End a session and wait until the server has let go of it."""
    await shop.rows("SELECT pg_terminate_backend(%s)", pid)
    await until(shop, "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", pid)


async def test_a_connection_that_died_in_the_pool_is_replaced_before_user_code(at: Bench, shop: Session) -> None:
    found = add_probe(at)
    await assert_clean(at, found)
    for _ in range(3):
        for (pid,) in await shop.rows("SELECT pid FROM pg_stat_activity WHERE application_name = 'aioqueue'"):
            await kill(shop, pid)
        job = await at.start("probe", tenant="next")
        await at.end()
        assert job.job_id not in at.outcomes
        assert (job.attempt, await at.state(job)) == (1, "succeeded")


async def test_a_server_that_can_only_read_is_not_held_against_the_job(
    at: Bench, shop: Session, database: ServerDatabase
) -> None:
    """A demoted primary: user code does not begin there, and the connection is not kept."""
    found = add_probe(at)
    await assert_clean(at, found)
    name = sql.Identifier(database.name)
    async with await psycopg.AsyncConnection.connect(database.dsn("superuser"), autocommit=True) as boss:
        await boss.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
        try:
            for (pid,) in await shop.rows("SELECT pid FROM pg_stat_activity WHERE application_name = 'aioqueue'"):
                await kill(shop, pid)
            outcome = await at.run("probe", tenant="next")
        finally:
            await boss.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    assert isinstance(outcome, Released) and outcome.reason is Reason.NO_CONNECTION, outcome
    assert "only read" in outcome.message
    await assert_clean(at, found)


async def test_a_server_process_that_dies_in_user_code_fails_the_attempt(at: Bench, shop: Session) -> None:
    found = add_probe(at)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "one")
        await kill(shop, tx.connection.info.backend_pid)
        await tx.execute("SELECT 1")

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.delay is not None
    assert await notes(shop) == []
    await assert_clean(at, found)


async def test_a_server_process_that_dies_after_user_code_and_before_commit_fails_the_attempt(at: Bench, shop: Session) -> None:
    async def work(tx: JobTransaction) -> None:
        await write(tx, "one")
        await kill(shop, tx.connection.info.backend_pid)

    at.tasks.task(name="work")(work)
    outcome = await at.run("work", tenant="a")
    assert isinstance(outcome, Failed) and outcome.delay is not None, outcome
    assert await notes(shop) == []


SLOW_COMMIT = """
    CREATE FUNCTION shop.wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON shop.note DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION shop.wait_at_commit();
"""


async def test_a_server_process_that_dies_in_commit_is_read_back_as_failed(at: Bench, shop: Session, owner_dsn: str) -> None:
    pids: list[int] = []

    async def work(tx: JobTransaction) -> None:
        pids.append(tx.connection.info.backend_pid)
        await write(tx, "one")

    at.tasks.task(name="work")(work)
    await shop.conn.execute(SLOW_COMMIT)
    async with session(owner_dsn, at.store.schema) as other:
        await other.rows("SELECT pg_advisory_lock(4711)")
        job = await at.start("work", tenant="a")
        await until(shop, "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted)")
        await kill(shop, pids[0])
        await at.end()
    outcome = at.outcomes[job.job_id]
    assert isinstance(outcome, Failed) and outcome.delay is not None
    assert await notes(shop) == []
    assert await at.state(job) == "running"


async def test_a_commit_that_cannot_be_read_back_is_left_to_the_recorder(
    shop: Session, worker_dsn: str, owner_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage longer than the lease: nobody took the job over, so the worker that comes back must not have forgotten it."""
    pids: list[int] = []

    async def work(tx: JobTransaction) -> None:
        pids.append(tx.connection.info.backend_pid)
        await write(tx, "one")

    async def no_answer(*_: object) -> str:
        raise psycopg.OperationalError("the server is away")

    await shop.conn.execute(SLOW_COMMIT)
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), lease=LeaseSettings(lease=0.5)) as at:
        at.tasks.task(name="work")(work)
        async with session(owner_dsn, at.store.schema) as other:
            await other.rows("SELECT pg_advisory_lock(4711)")
            job = await at.start("work", tenant="a")
            await until(shop, "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted)")
            monkeypatch.setattr(at.store, "read_back", no_answer)
            await kill(shop, pids[0])
            await at.end()
        assert isinstance(at.outcomes.get(job.job_id), Failed)
        assert not at.seen.all(JobLost)
        assert await at.state(job) == "running"


async def test_a_commit_whose_answer_is_lost_is_read_back_as_success(
    at: Bench, shop: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has committed; then the connection dies before the answer is read."""
    run = Trip.run

    async def lose_the_answer(trip: Trip, seconds: float) -> list[PGresult]:
        conn = trip._conn
        if shot and any(text == b"COMMIT" for text, *_ in trip._calls):
            shot.pop()
            # Everything is sent; it is committed while nobody reads the answer, and then the socket is gone.
            conn.pgconn.enter_pipeline_mode()
            trip._send_all(conn.pgconn)
            conn.pgconn.flush()
            await until(shop, "SELECT EXISTS (SELECT FROM shop.note)")
            sever(conn)
        return await run(trip, seconds)

    async def work(tx: JobTransaction) -> None:
        await write(tx, "one")

    at.tasks.task(name="work")(work)
    shot = [1]
    monkeypatch.setattr(Trip, "run", lose_the_answer)
    assert await at.run("work", tenant="a") is None
    assert not shot
    (job,) = at.settled_jobs
    assert await at.state(job) == "succeeded"
    assert await notes(shop) == [("a", "one")]


async def test_a_tail_that_is_refused_changes_no_outcome(at: Bench, shop: Session) -> None:
    found = add_probe(at)

    async def own(tx: JobTransaction) -> None:
        await write(tx, "own")

    at.tasks.task(name="own")(own)
    async with changed_scrub(shop):
        assert await at.run("own", tenant="a") is None
        assert await at.state(at.settled_jobs[-1]) == "succeeded"

        async def short(ctx: JobContext) -> None:
            async with ctx.transaction() as tx:
                await write(tx, "short")

        at.tasks.task(name="short")(short)
        outcome = await at.run("short", tenant="a")
        assert getattr(outcome, "result", outcome) == "null"
    assert await notes(shop) == [("a", "own"), ("a", "short")]
    await assert_clean(at, found)


@contextlib.asynccontextmanager
async def changed_scrub(shop: Session) -> AsyncIterator[None]:
    await shop.conn.execute("SET ROLE aioqueue_owner")
    try:
        async with changed(shop, "scrub", ("RESET ALL;", "RAISE 'refused for the test';")):
            yield
    finally:
        await shop.conn.execute("RESET ROLE")


async def test_a_rollback_that_hangs_ends_with_the_connection(shop: Session, worker_dsn: str) -> None:
    """The rollback limit closes the socket; the job's outcome is the one of its user code."""
    async with bench(worker_dsn, shop, AioQueue(schema=shop.store.schema), limits=LimitSettings(rollback=0.2)) as at:
        pids: list[int] = []

        async def work(tx: JobTransaction) -> None:
            pid = tx.connection.info.backend_pid
            pids.append(pid)
            os.kill(pid, signal.SIGSTOP)
            raise ValueError("mine")

        at.tasks.task(name="work")(work)
        try:
            outcome = await at.run("work", tenant="a")
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert isinstance(outcome, Failed) and outcome.error.message == "mine"
        assert await notes(shop) == []
