"""Who may do what, and that nothing a caller brings along changes what a function does."""

import json

import psycopg
import pytest

from aioqueue.rights import CLIENT_FUNCTIONS, WORKER_FUNCTIONS
from aioqueue.sql import functions
from tests.sql.conftest import Connect
from tests.sql.engine import Session, entry, progress

pytestmark = pytest.mark.anyio
SCHEMA = "trim(trailing '.' from 'aioqueue.')::regnamespace"
WRITES = ("INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")


async def test_neither_role_may_write_any_table_or_sequence(boss: Session) -> None:
    rights = await boss.rows(
        f"SELECT relname, r, p FROM pg_class, unnest(ARRAY['aioqueue_worker', 'aioqueue_client', 'public']) r,"
        f" unnest(ARRAY{list(WRITES)}) p WHERE relnamespace = {SCHEMA} AND relkind IN ('r', 'p', 'v')"
        " AND CASE WHEN r = 'public' THEN EXISTS (SELECT 1 FROM aclexplode(relacl) a WHERE a.grantee = 0)"
        " ELSE has_table_privilege(r, oid, p) END"
    )
    assert rights == []
    sequences = await boss.rows(
        f"SELECT relname FROM pg_class, unnest(ARRAY['aioqueue_worker', 'aioqueue_client']) r WHERE relnamespace = {SCHEMA}"
        " AND relkind = 'S' AND has_sequence_privilege(r, oid, 'USAGE, SELECT, UPDATE')"
    )
    assert sequences == []


async def test_the_client_reads_the_version_and_no_table(boss: Session, guest: Session) -> None:
    readable = await boss.rows(
        f"SELECT relname FROM pg_class WHERE relnamespace = {SCHEMA} AND relkind IN ('r', 'p', 'v')"
        " AND has_table_privilege('aioqueue_client', oid, 'SELECT')"
    )
    assert readable == [("schema_version",)]
    for table in ("job", "live", "outcome", "jobs", "worker"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await guest.rows(f"SELECT 1 FROM aioqueue.{table}")


@pytest.mark.parametrize(("role", "allowed"), [("worker", WORKER_FUNCTIONS), ("client", CLIENT_FUNCTIONS), ("public", ())])
async def test_each_role_has_its_functions_and_no_other(boss: Session, role: str, allowed: tuple[str, ...]) -> None:
    who = "public" if role == "public" else f"aioqueue_{role}"
    test = (
        "EXISTS (SELECT 1 FROM aclexplode(coalesce(proacl, acldefault('f', proowner))) a WHERE a.grantee = 0)"
        if role == "public"
        else f"has_function_privilege('{who}', oid, 'EXECUTE')"
    )
    found = await boss.rows(f"SELECT proname FROM pg_proc WHERE pronamespace = {SCHEMA} AND {test}")
    assert {name for (name,) in found} == set(allowed)


async def test_every_file_is_a_function_and_every_function_a_file(boss: Session) -> None:
    found = await boss.rows(f"SELECT proname FROM pg_proc WHERE pronamespace = {SCHEMA}")
    assert sorted(name for (name,) in found) == sorted(functions())


async def test_every_function_that_a_role_may_call_is_the_owners_with_a_fixed_path(boss: Session) -> None:
    """But scrub and lane, which need nothing of the owner's."""
    rows = await boss.rows(
        f"SELECT proname, prosecdef, coalesce(proconfig, '{{}}') FROM pg_proc WHERE pronamespace = {SCHEMA}"
        " AND has_function_privilege('aioqueue_worker', oid, 'EXECUTE')"
    )
    for name, definer, config in rows:
        if name not in ("scrub", "lane"):
            assert definer, name
            assert "search_path=pg_catalog, pg_temp" in config, name
    inner = await boss.rows(
        f"SELECT proname FROM pg_proc WHERE pronamespace = {SCHEMA} AND prosecdef"
        " AND NOT has_function_privilege('aioqueue_worker', oid, 'EXECUTE')"
    )
    assert inner == [], "what is called from inside needs no rights of its own"


async def test_nobody_may_make_anything_in_the_schema(boss: Session, one: Session, guest: Session) -> None:
    for session in (one, guest):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await session.rows("CREATE TABLE aioqueue.mine (n int)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await session.rows("CREATE FUNCTION aioqueue.enqueue(text) RETURNS int LANGUAGE sql AS 'SELECT 1'")


SHADOWS = """
CREATE TEMP TABLE live (lane bigint, vt bigint, job_id uuid, tenant text, worker bigint);
CREATE TEMP TABLE job (id uuid, task text, tenant text);
CREATE TEMP TABLE worker (id bigint, dead boolean);
CREATE TEMP TABLE pg_class (oid oid);
CREATE TEMP TABLE scheduled (run_at timestamptz);
CREATE TEMP TABLE outcome (job_id uuid, state text);
"""
EVIL = """
CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.pg_current_xact_id() RETURNS xid8 LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.array_agg(anyelement) RETURNS anyarray LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.jsonb_array_elements(jsonb) RETURNS SETOF jsonb LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.btrim(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.md5(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.evil(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.evil(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE FUNCTION {schema}.evil(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadowed'; END $$;
CREATE OPERATOR {schema}.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {schema}.evil);
CREATE OPERATOR {schema}.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = {schema}.evil);
CREATE OPERATOR {schema}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {schema}.evil);
CREATE OPERATOR {schema}.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = {schema}.evil);
"""


async def whole_life(session: Session) -> list[str | None]:
    """Everything that can become of a job, called by this session."""
    worker = await session.register()
    ids = await session.enqueue(4, tenant="T")
    ids += await session.enqueue(1, tenant="T", delay=60)
    await session.tick(worker, 0, 10_000)
    jobs = {job.job_id: job for job in await session.claim(worker)}
    await session.record(worker, entry(jobs[ids[0]], r=1), entry(jobs[ids[1]], "error", d=0))
    await session.open_job(jobs[ids[2]])
    await session.finish(jobs[ids[2]])
    await session.commit()
    await session.cancel(ids[3])
    await session.store.promote(session.conn, limit=1)
    await session.store.beat(session.conn, worker=worker, lease=30, running=1)
    await session.rescue()
    await session.store.rescue_orphans(session.conn, limit=1)
    statuses = [await session.store.job_status(session.conn, job_id) for job_id in ids]
    await session.store.read_outcomes(session.conn, [(job_id, None) for job_id in ids])
    await session.store.report(session.conn, json.dumps([progress(jobs[job_id]) for job_id in ids[:4]]))
    await session.store.follow(session.conn, [(job_id, None) for job_id in ids])
    await session.store.sweep_progress(session.conn, limit=10)
    await session.store.resign(session.conn, worker=worker)
    await session.rows("SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)")
    return [None if status is None else str(status.state) for status in statuses]


ALL = ["succeeded", "ready", "succeeded", "running", "scheduled"]


async def test_temporary_tables_of_our_names_change_nothing(one: Session) -> None:
    await one.rows(SHADOWS)
    assert await whole_life(one) == ALL


async def test_functions_and_operators_ahead_in_the_callers_path_change_nothing(
    boss: Session, one: Session, connect: Connect
) -> None:
    root = await connect("superuser")
    await root.rows("CREATE SCHEMA trap; GRANT USAGE ON SCHEMA trap TO PUBLIC")
    try:
        await root.rows(EVIL.format(schema="trap"))
        await root.rows(SHADOWS.replace("CREATE TEMP TABLE ", "CREATE TABLE trap."))
        await one.rows("SET search_path = trap, pg_catalog")
        with pytest.raises(psycopg.errors.RaiseException, match="shadowed"):
            await one.rows("SELECT clock_timestamp()")
        assert await whole_life(one) == ALL
    finally:
        await root.rows("DROP SCHEMA trap CASCADE")


async def test_settings_of_the_caller_change_nothing(one: Session) -> None:
    for setting in (
        "enable_indexscan = off", "enable_indexonlyscan = off", "plan_cache_mode = force_custom_plan", 
        "timezone = 'Pacific/Apia'", "intervalstyle = iso_8601", "bytea_output = 'escape'", "extra_float_digits = 0",
        "xmloption = 'document'", "backslash_quote = off", "client_encoding = 'UTF8'", "work_mem = '64kB'",
    ):  # fmt: skip
        await one.rows(f"SET {setting}")
    assert await whole_life(one) == ALL
