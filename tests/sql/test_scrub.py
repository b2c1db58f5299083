"""scrub: nothing that a job left on a connection reaches the next job."""

import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_settings_temporary_tables_locks_cursors_and_listens_go(one: Session) -> None:
    await one.rows("SET app.tenant = 'T'")
    await one.rows("SET search_path = pg_temp")
    await one.rows("SET statement_timeout = '1h'")
    await one.rows("CREATE TEMP TABLE left_over (n int)")
    await one.rows("SELECT pg_advisory_lock(99)")
    await one.rows("LISTEN something")
    await one.begin()
    await one.rows("DECLARE c CURSOR WITH HOLD FOR SELECT 1")
    await one.commit()
    await one.store.execute(one.conn, "scrub")
    assert await one.value("SELECT current_setting('app.tenant', true)") in ("", None)
    assert await one.value("SHOW search_path") == '"$user", public'
    assert await one.value("SHOW statement_timeout") == "0"
    assert await one.value("SELECT to_regclass('pg_temp.left_over')") is None
    assert await one.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()") == 0
    assert await one.value("SELECT count(*) FROM pg_cursors WHERE name = 'c'") == 0
    assert await one.value("SELECT count(*) FROM pg_listening_channels()") == 0


async def test_a_role_taken_is_given_back(connect: Connect) -> None:
    root = await connect("superuser")
    me = await root.value("SELECT session_user")
    await root.rows("SET SESSION AUTHORIZATION aioqueue_worker")
    await root.store.execute(root.conn, "scrub")
    assert await root.value("SELECT session_user || current_user") == me * 2


async def test_it_may_be_called_again(one: Session) -> None:
    for _ in range(3):
        await one.store.execute(one.conn, "scrub")
