"""Migrations: all or nothing, from any number of processes, into any schema; what is missing is said with its command."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from aioqueue import migrate
from aioqueue.errors import ConfigurationError, SchemaError
from aioqueue.job import new_job_id
from aioqueue.sql import Migration, functions, migrations, place, quote_schema
from aioqueue.store import Store
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.postgres import Database, Server

pytestmark = pytest.mark.anyio
ODD = 'My "Jobs'
ALL = tuple(f"{m.version:04d}_{m.name}" for m in migrations())
Create = Callable[[], Database]
SIGNATURES = Path(__file__).with_name("function_signatures.txt")
"""What each function takes and returns now."""
CHANGED = (
    "beat(bigint, double precision, integer)",
    "check_transaction(jsonb)",
    "check_transaction(text, text, text)",
    "claim(bigint, bigint[], bigint[], uuid[], integer[], integer)",
    "claim(bigint, bigint[], bigint[], uuid[], integer[], integer[], integer)",
    "confirm(bigint, bigint, bigint, uuid, integer, jsonb)",
    "confirm(bigint, bigint, bigint, uuid, integer, text, text, text)",
    "enqueue(text, jsonb, text, text, integer, interval, timestamptz, integer, uuid)",
    "enqueue_alike(jsonb)",
    "enqueue_alike(jsonb, uuid[], text)",
    "finish(bigint, bigint, bigint, uuid, integer, jsonb, jsonb)",
    "finish(bigint, bigint, bigint, uuid, integer, jsonb, jsonb, text[], boolean)",
    "finish(bigint, bigint, bigint, uuid, integer, text, text, text, jsonb)",
    "make_ranges(double precision, integer)",
    "next_tag(bigint, text)",
    "next_tag(bigint, text, bigint)",
    "park_tenant(text, integer)",
    "record(bigint, jsonb)",
    "register_worker(bigint, text, integer, text, text[], integer, double precision, jsonb)",
    "rescue(bigint, integer)",
    "rescue(bigint, integer, jsonb, jsonb)",
    "rescue_orphans(integer)",
    "return_job(aioqueue.live, text, text, text, text, double precision, boolean, text)",
    "scrub()",
    "settle_limits(boolean)",
    "step(text)",
    "sweep_parked(integer, bigint[])",
    "sweep_parked(integer, bigint[], boolean)",
    "tick(bigint, bigint[], bigint[], bigint[], uuid[], bigint[], timestamptz, timestamptz)",
    "unknown_claims(bigint, uuid[])",
    "unpark_freed(bigint[])",
    "unpark_key(bigint, integer, bigint, bigint, integer)",
)
"""What each took in some version before, of those that have changed since: their parameters, or only what they return."""


@asynccontextmanager
async def connected(database: Database, role: str = "owner") -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    conn = await psycopg.AsyncConnection.connect(database.dsn(role), autocommit=True)
    try:
        yield conn
    finally:
        await conn.close()


async def refusal(database: Database, schema: str, role: str = "owner") -> str:
    async with connected(database, role) as conn:
        with pytest.raises(SchemaError) as caught:
            await migrate.check(conn, schema=schema)
    return str(caught.value)


async def count(database: Database, schema: str) -> tuple[int, int]:
    """Functions and versions in the schema."""
    async with connected(database) as conn:
        cursor = await conn.execute(
            sql.SQL(
                "SELECT (SELECT count(*) FROM pg_proc WHERE pronamespace = to_regnamespace({})),"
                " (SELECT count(*) FROM {}.schema_version)"
            ).format(sql.Literal(quote_schema(schema)), sql.Identifier(schema))
        )
        found = await cursor.fetchone()
    assert found is not None
    return found[0], found[1]


async def test_an_empty_database_gets_everything_and_a_second_run_changes_nothing(fresh_database: Create) -> None:
    database = fresh_database()
    async with connected(database) as conn:
        before = await migrate.status(conn, schema="aioqueue")
        assert (before.version, before.serves, before.fits, before.pending) == (0, 0, False, ALL)
    assert (await migrate.migrate(database.dsn("owner"))).version == 0
    again = await migrate.migrate(database.dsn("owner"))
    assert (again.version, again.pending, again.fits) == (migrate.code_version(), (), True)
    assert await count(database, "aioqueue") == (len(functions()), len(migrations()))
    async with connected(database) as conn:
        await migrate.check(conn, schema="aioqueue")
        assert (await migrate.status(conn, schema="aioqueue")).fits


@pytest.mark.parametrize("level", ["read committed", "serializable"])
async def test_twenty_processes_at_once(fresh_database: Create, level: str) -> None:
    """Whatever isolation level the database gives its sessions by default."""
    database = fresh_database()
    async with connected(database) as conn:
        await conn.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = '{level}'".encode())
    befores = await asyncio.gather(*(migrate.migrate(database.dsn("owner")) for _ in range(20)))
    assert sorted(before.version for before in befores) == [0] + [migrate.code_version()] * 19
    assert await count(database, "aioqueue") == (len(functions()), len(migrations()))


async def test_what_earlier_versions_have_left_stands_in_nobody_s_way(fresh_database: Create) -> None:
    """A function of other parameters beside that of now makes calls ambiguous; what one returns cannot be changed in place."""
    database = fresh_database()
    await migrate.migrate(database.dsn("owner"))
    async with connected(database) as conn:
        await conn.execute("DELETE FROM aioqueue.schema_version WHERE version > 14")
        for old in CHANGED:
            await conn.execute(f"DROP FUNCTION IF EXISTS aioqueue.{old}".encode())
            await conn.execute(
                f"CREATE FUNCTION aioqueue.{old} RETURNS TABLE (earlier integer) LANGUAGE sql AS 'SELECT 1'".encode()
            )
    before = await migrate.migrate(database.dsn("owner"))
    assert (before.version, before.fits) == (14, False)
    assert await count(database, "aioqueue") == (len(functions()), len(migrations()))


async def test_a_function_that_takes_or_returns_something_else_is_known_to_have_changed(fresh_database: Create) -> None:
    """If this fails: drop the function as it was in the new migration, add it to CHANGED, then write the list anew."""
    database = fresh_database()
    await migrate.migrate(database.dsn("owner"))
    async with connected(database) as conn:
        cursor = await conn.execute(
            "SELECT p.oid::regprocedure || ' returns ' || pg_catalog.pg_get_function_result(p.oid) FROM pg_catalog.pg_proc p"
            " WHERE p.pronamespace = 'aioqueue'::regnamespace ORDER BY 1"
        )
        found = [line for (line,) in await cursor.fetchall()]
    assert sorted(found) == sorted(SIGNATURES.read_text("utf-8").splitlines())


async def test_a_migration_that_fails_leaves_nothing(fresh_database: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    database = fresh_database()
    text = {**functions(), "zz": "SELECT 1/0;"}
    monkeypatch.setattr(migrate, "functions", lambda: text)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await migrate.migrate(database.dsn("owner"))
    monkeypatch.undo()
    async with connected(database) as conn:
        cursor = await conn.execute("SELECT to_regnamespace('aioqueue')")
        assert await cursor.fetchone() == (None,)
    assert "no aioqueue schema" in await refusal(database, "aioqueue")


async def test_two_schemas_in_one_database_know_nothing_of_each_other(fresh_database: Create) -> None:
    database = fresh_database()
    for schema in ("aioqueue", ODD):
        await migrate.migrate(database.dsn("owner"), schema=schema)
        await migrate.grant(database.dsn("owner"), schema=schema, role="aioqueue_worker")
    async with connected(database, "worker") as conn:
        for schema, number in (("aioqueue", 1), (ODD, 2)):
            store = Store(schema)
            jobs = [NewJob(id=new_job_id(), task="t", payload="{}") for _ in range(number)]
            await enqueue_many(store, conn, jobs)
            cursor = await conn.execute(
                sql.SQL("SELECT count(*) FROM {}.jobs WHERE state = 'ready'").format(sql.Identifier(schema))
            )
            assert await cursor.fetchone() == (number,)


@pytest.mark.parametrize("schema", [ODD, "Jobs", "select", "a.b", "ünï", "aioqueue.", "x" * 63, "a b;--"])
async def test_a_name_that_needs_quotes_works_everywhere(fresh_database: Create, schema: str) -> None:
    database = fresh_database()
    await migrate.migrate(database.dsn("owner"), schema=schema)
    await migrate.grant(database.dsn("owner"), schema=schema, role="aioqueue_worker")
    await migrate.grant(database.dsn("owner"), schema=schema, role="aioqueue_client", kind="client")
    store = Store(schema)
    async with connected(database, "worker") as conn:
        await migrate.check(conn, schema=schema)
        await store.register_worker(
            conn, worker=5, host="h", pid=1, version="0", queues=[], concurrency=1, lease=60, tasks=[]
        )  # fmt: skip
        await store.tick(conn, worker=5, questions=[])
        assert await store.promote(conn, limit=1) == 0
    assert (await migrate.migrate(database.dsn("owner"), schema=schema)).fits


@pytest.mark.parametrize("schema", ["", "  ", "x" * 64, "ü" * 32, "a'b", "a$b", "a%b", "a\\b", "a\nb", "a\x00b"])
async def test_names_that_cannot_be_quoted_safely_are_refused(schema: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        migrate.script(schema=schema)
    with pytest.raises(ConfigurationError, match="schema"):
        await migrate.migrate("postgresql://nowhere.invalid/never", schema=schema)


@pytest.mark.parametrize("schema", ["aioqueue", ODD])
async def test_the_script_does_what_migrate_does(fresh_database: Create, schema: str) -> None:
    by_script, by_code = fresh_database(), fresh_database()
    async with connected(by_script) as conn:
        await conn.execute("BEGIN")
        await conn.execute(migrate.script(schema=schema).encode())
        await conn.execute("COMMIT")
    await migrate.migrate(by_code.dsn("owner"), schema=schema)
    facts = (
        "SELECT 'f', p.proname::text, md5(p.prosrc), p.proacl::text, p.proconfig::text"
        " FROM pg_proc p WHERE pronamespace = to_regnamespace({0})"
        " UNION ALL SELECT c.relkind::text, c.relname::text, c.reloptions::text, c.relacl::text, NULL"
        " FROM pg_class c WHERE relnamespace = to_regnamespace({0})"
        " ORDER BY 1, 2"
    )
    found = []
    for database in (by_script, by_code):
        async with connected(database) as conn:
            cursor = await conn.execute(sql.SQL(facts).format(sql.Literal(quote_schema(schema))))
            found.append(await cursor.fetchall())
            await migrate.check(conn, schema=schema)
    assert found[0] == found[1]
    assert len(found[0]) > 1_000


async def test_the_script_since_this_version_is_empty() -> None:
    assert migrate.script(since=migrate.code_version()) == ""


async def test_the_files_paste_into_psql_as_they_are() -> None:
    """They name the default schema, so putting that name in changes only its quotes."""
    for text in [m.text for m in migrations()] + list(functions().values()):
        assert place(text, "aioqueue").replace('"aioqueue".', "aioqueue.") == text


async def test_older_newer_and_missing_schemas_name_the_command(fresh_database: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    database = fresh_database()
    assert await refusal(database, "aioqueue") == (
        'no aioqueue schema "aioqueue" in this database: as its owner, run python -m aioqueue migrate'
    )
    assert "as its owner, run python -m aioqueue migrate --schema other" in await refusal(database, "other")
    await migrate.migrate(database.dsn("owner"))
    needed = migrate.code_version()
    monkeypatch.setattr(migrate, "code_version", lambda: needed + 1)
    assert f"is at version {needed}, this code needs {needed + 1}: as its owner, run python -m aioqueue migrate" in await refusal(
        database, "aioqueue"
    )
    monkeypatch.undo()
    async with connected(database) as conn:
        await conn.execute("INSERT INTO aioqueue.schema_version (version, serves, name) VALUES (99, 1, 'later')")
        await migrate.check(conn, schema="aioqueue")
        await conn.execute("UPDATE aioqueue.schema_version SET serves = 50 WHERE version = 99")
    assert "is at version 99, which serves code from schema version 50 on" in await refusal(database, "aioqueue")
    assert (await migrate.migrate(database.dsn("owner"))).pending == (), "a newer schema is left alone"


async def test_the_command_in_a_message_can_be_pasted_into_a_shell(fresh_database: Create) -> None:
    message = await refusal(fresh_database(), ODD)
    command = message.partition("as its owner, run ")[2]
    assert shlex.split(command)[-2:] == ["--schema", ODD]


async def test_a_role_without_rights_is_told_what_its_owner_can_do(fresh_database: Create) -> None:
    database = fresh_database()
    await migrate.migrate(database.dsn("owner"))
    assert "this role has no rights in it: have its owner run python -m aioqueue migrate --grants ROLE (" in await refusal(
        database, "aioqueue", "client"
    )
    await migrate.grant(database.dsn("owner"), role="aioqueue_client", kind="client")
    async with connected(database, "client") as conn:
        await migrate.check(conn, schema="aioqueue")


async def test_a_role_that_may_not_create_cannot_migrate(fresh_database: Create) -> None:
    database = fresh_database()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await migrate.migrate(database.dsn("client"))


async def test_an_empty_schema_made_by_an_administrator_is_used(fresh_database: Create) -> None:
    """Its owner needs no right to create schemas in the database."""
    database = fresh_database()
    async with connected(database, "superuser") as conn:
        await conn.execute("CREATE SCHEMA prepared AUTHORIZATION aioqueue_worker")
    await migrate.migrate(database.dsn("worker"), schema="prepared")
    async with connected(database, "worker") as conn:
        await migrate.check(conn, schema="prepared")


async def test_an_unknown_role_cannot_be_granted_anything(fresh_database: Create) -> None:
    database = fresh_database()
    await migrate.migrate(database.dsn("owner"))
    with pytest.raises(psycopg.errors.UndefinedObject):
        await migrate.grant(database.dsn("owner"), role="nobody at all")
    assert 'TO "nobody at all";' in migrate.grants(role="nobody at all")


async def test_functions_of_others_in_the_schema_keep_their_rights(fresh_database: Create) -> None:
    database = fresh_database()
    async with connected(database) as conn:
        await conn.execute("CREATE SCHEMA shared")
        await conn.execute("CREATE FUNCTION shared.theirs() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        await migrate.migrate(database.dsn("owner"), schema="shared")
        cursor = await conn.execute("SELECT has_function_privilege('aioqueue_client', 'shared.theirs()', 'EXECUTE')")
        assert await cursor.fetchone() == (True,)


async def test_a_later_migration_gives_new_functions_to_the_roles_that_hold_rights(
    fresh_database: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = fresh_database()
    dsn = database.dsn("owner")
    await migrate.migrate(dsn)
    await migrate.grant(dsn, role="aioqueue_worker", kind="worker")
    await migrate.grant(dsn, role="aioqueue_client", kind="client")
    async with connected(database) as conn:
        # As if these two came with the later version only.
        await conn.execute("REVOKE EXECUTE ON FUNCTION aioqueue.beat, aioqueue.job_status FROM aioqueue_worker, aioqueue_client")
    later = Migration(migrate.code_version() + 1, 1, "later", "-- serves: 1\nSELECT 1;")
    monkeypatch.setattr(migrate, "migrations", lambda: (*migrations(), later))
    assert (await migrate.migrate(dsn)).pending == (f"{later.version:04d}_later",)
    async with connected(database) as conn:
        cursor = await conn.execute(
            "SELECT r, f, has_function_privilege(r, ('aioqueue.' || f)::regproc, 'EXECUTE')"
            " FROM unnest(ARRAY['aioqueue_worker', 'aioqueue_client']) r, unnest(ARRAY['beat', 'job_status']) f"
            " ORDER BY r DESC, f"
        )
        assert await cursor.fetchall() == [
            ("aioqueue_worker", "beat", True),
            ("aioqueue_worker", "job_status", True),
            ("aioqueue_client", "beat", False),
            ("aioqueue_client", "job_status", True),
        ]


async def test_a_script_is_one_transaction(fresh_database: Create) -> None:
    database = fresh_database()
    script = migrate.script()
    assert script.startswith("BEGIN;") and script.endswith("COMMIT;")
    async with connected(database) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await conn.execute(script.removesuffix("COMMIT;").encode() + b"SELECT 1/0; COMMIT;")
        await conn.rollback()
        assert (await migrate.status(conn, schema="aioqueue")).version == 0
        await conn.execute(script.encode())
        assert (await migrate.status(conn, schema="aioqueue")).fits


async def test_a_database_that_cannot_store_every_text_is_refused(server: Server) -> None:
    async with await psycopg.AsyncConnection.connect(server.dsn("superuser", "postgres"), autocommit=True) as boss:
        await boss.execute("DROP DATABASE IF EXISTS latin")
        await boss.execute("CREATE DATABASE latin OWNER aioqueue_owner ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            with pytest.raises(SchemaError, match=r"LATIN1.*ENCODING 'UTF8'"):
                await migrate.migrate(server.dsn("owner", "latin"))
        finally:
            await boss.execute("DROP DATABASE latin WITH (FORCE)")


async def test_a_server_that_does_not_answer_is_not_waited_for_without_end(
    fresh_database: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = fresh_database().dsn("owner")
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        lock = "SELECT pg_advisory_xact_lock(hashtextextended('aioqueue migrate aioqueue', 0))"
        await other.execute(lock)
        with pytest.raises(psycopg.OperationalError, match=r"within 0\.3 s"):
            await migrate.migrate(dsn, timeout=0.3)
        monkeypatch.setattr(migrate, "_check_encoding", lambda conn: conn.execute("SELECT pg_sleep(60)"))
        monkeypatch.setattr(migrate, "ANSWER_SECONDS", 0.2)
        with pytest.raises(psycopg.OperationalError, match=r"within 0\.2 s"):
            await migrate.migrate(dsn)
    assert not (await _status(dsn)).version


async def _status(dsn: str) -> migrate.SchemaStatus:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        return await migrate.status(conn, schema="aioqueue")


def test_no_later_migration_serves_older_code() -> None:
    serves = [m.serves for m in migrations()]
    assert serves == sorted(serves)
    assert all(m.serves <= m.version for m in migrations())


LATER = Migration(migrate.code_version() + 1, 1, "later", "-- serves: 1\nALTER TABLE aioqueue.live ADD later integer;")
HOLDS = {
    "a reader": "SELECT FROM aioqueue.live",
    "a writer": "SELECT FROM aioqueue.live FOR UPDATE",
    "a prepared transaction": "LOCK aioqueue.live; PREPARE TRANSACTION 'forgotten'",
    "a migration": "SELECT pg_advisory_xact_lock(hashtextextended('aioqueue migrate ' || $${schema}$$, 0))",
}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that changes a table is pending, and its attempts are short."""
    monkeypatch.setattr(migrate, "migrations", lambda: (*migrations(), LATER))
    monkeypatch.setattr(migrate, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(migrate, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(migrate, "PAUSES", (0.01, 0.01))


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("by", HOLDS)
async def test_a_lock_that_somebody_holds_is_given_up_on_by_name_and_nothing_is_changed(
    own_database: Database, schema: str, by: str
) -> None:
    dsn = own_database.dsn("owner")
    async with connected(own_database) as watch:
        before = await migrate.status(watch, schema=schema)
        async with await psycopg.AsyncConnection.connect(dsn, application_name="the long report") as holder:
            for statement in HOLDS[by].replace("{schema}", schema).split(";"):
                await holder.execute(place(statement, schema).encode())
            with pytest.raises(migrate.SchemaLocked) as caught:
                await migrate.migrate(dsn, schema=schema)
            said, pid = re.sub(r"for \d+ s\)", "for 0 s)", str(caught.value)), holder.info.backend_pid
            session = f"session {pid} of aioqueue_owner (the long report, idle in transaction for 0 s)"
            again = f"nothing was changed; run it again when it has ended, or end it: SELECT pg_terminate_backend({pid})"
            assert said == {
                "a prepared transaction": "a prepared transaction holds live: nothing was changed; run it again when it has "
                "ended; pg_prepared_xacts names it",
                "a migration": f"{session} migrates this schema: {again}",
            }.get(by, f"{session} holds live: {again}")
            assert await migrate.status(watch, schema=schema) == before, "nothing half-done"
            if by == "a prepared transaction":
                await watch.execute("ROLLBACK PREPARED 'forgotten'")
        assert (await migrate.migrate(dsn, schema=schema)).pending == (f"{LATER.version:04d}_later",)
        assert (await migrate.status(watch, schema=schema)).fits


@pytest.mark.usefixtures("later")
async def test_a_lock_that_is_let_go_meanwhile_is_waited_for(
    own_database: Database, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = own_database.dsn("owner")
    async with await psycopg.AsyncConnection.connect(dsn) as holder:
        await holder.execute(place("SELECT FROM aioqueue.live", schema).encode())

        class LettingGo(tuple[float, ...]):
            def __iter__(self) -> Any:
                yield 0.0
                holder.pgconn.finish()
                yield 0.0

        monkeypatch.setattr(migrate, "PAUSES", LettingGo())
        assert (await migrate.migrate(dsn, schema=schema)).pending
