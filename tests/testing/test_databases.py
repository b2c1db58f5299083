"""The databases of a run: one template, copies of it, and nothing left behind, also by a run that was killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from aioqueue.embedded_cluster import OWNER
from aioqueue.testing import Databases
from aioqueue.testing.databases import PREFIX
from aioqueue.testing.dsns import as_role, of_login, with_database
from tests.postgres import Server

RUN, DEAD = "0000beef", "dead0000"


@pytest.fixture
def admin(server: Server) -> Iterator[str]:
    yield server.dsn("superuser", "postgres")
    with psycopg.connect(server.dsn("superuser", "postgres"), autocommit=True) as conn:
        for name in names(conn):
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def names(conn: psycopg.Connection) -> list[str]:
    return sorted(
        name for (name,) in conn.execute("SELECT datname FROM pg_database WHERE datname ~ %s", [f"^{PREFIX}({RUN}|{DEAD})"])
    )


def all_names(admin: str) -> list[str]:
    with psycopg.connect(admin) as conn:
        return names(conn)


def test_copies_have_the_schema_and_the_tables_of_the_application(admin: str, schema: str) -> None:
    made: list[str] = []

    async def tables(dsn: str) -> None:
        made.append(dsn)
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.execute("CREATE TABLE shop (n int); INSERT INTO shop VALUES (1)")
            await conn.execute("GRANT SELECT ON shop TO aioqueue_client")

    options = {"run": RUN, "schema": schema, "owner": OWNER, "logins": True, "tables": tables}
    with Databases(admin, process="gw0", **options) as one, Databases(admin, process="gw1", **options) as two:
        first, second = one.take(), two.take()
        assert len(made) == 1, "the template is made once for all processes of a run"
        assert first.name != second.name
        for database in (first, second):
            with psycopg.connect(database.dsn) as conn:
                assert conn.execute("SELECT current_user::text, n FROM shop").fetchall() == [(OWNER, 1)]
        with psycopg.connect(first.dsn) as conn:
            conn.execute("DELETE FROM shop")
        third = one.take()
        with psycopg.connect(third.dsn) as conn:
            assert conn.execute("SELECT n FROM shop").fetchall() == [(1,)]
        with psycopg.connect(third.as_role("aioqueue_client")) as conn:
            assert conn.execute("SELECT current_user::text, n FROM shop").fetchall() == [("aioqueue_client", 1)]
        with psycopg.connect(second.as_role("aioqueue_worker")) as conn:
            query = sql.SQL("SELECT count(*) FROM {}.jobs").format(sql.Identifier(schema))
            assert conn.execute(query).fetchall() == [(0,)]
        one.give_back(first)
    assert all_names(admin) == []
    assert len(one.timings.created) == len(one.timings.waited) + 1 == 3


def test_a_role_of_the_tests_is_taken_at_the_start(admin: str, schema: str) -> None:
    def tables(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE shop (tenant text); INSERT INTO shop VALUES ('42'), ('43')")
            conn.execute("ALTER TABLE shop ENABLE ROW LEVEL SECURITY; GRANT SELECT ON shop TO aioqueue_client")
            conn.execute("CREATE POLICY own ON shop USING (tenant = current_setting('app.tenant', true))")

    with Databases(admin, run=RUN, schema=schema, role="aioqueue_client", tables=tables) as databases:
        database = databases.take()
        with psycopg.connect(database.dsn) as conn:
            conn.execute("SET app.tenant = '42'")
            assert conn.execute("SELECT tenant, current_user::text FROM shop").fetchall() == [("42", "aioqueue_client")]
        with psycopg.connect(database.owner_dsn) as conn:
            assert conn.execute("SELECT count(*) FROM shop").fetchone() == (2,)


def test_a_template_that_failed_is_made_anew(admin: str, schema: str) -> None:
    attempts: list[str] = []

    def tables(dsn: str) -> None:
        attempts.append(dsn)
        if len(attempts) == 1:
            raise ZeroDivisionError

    with Databases(admin, run=RUN, schema=schema, tables=tables) as databases:
        with pytest.raises(ZeroDivisionError):
            databases.template()
        assert databases.template() == databases.template() == f"{PREFIX}{RUN}"
        assert len(attempts) == 2


def test_the_template_is_looked_up_once(admin: str, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Databases(admin, run=RUN, schema=schema) as databases:
        name = databases.template()
        with monkeypatch.context() as patched:
            patched.setattr(databases, "_connect", None)
            assert databases.template() == name


def test_what_another_user_of_the_server_has_left_is_left_to_that_user(admin: str, schema: str) -> None:
    with psycopg.connect(admin, autocommit=True) as conn:
        conn.execute("CREATE ROLE tests_elsewhere LOGIN CREATEDB")
        try:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(f"{PREFIX}{DEAD}_main_1")))
            with Databases(of_login(admin, "tests_elsewhere"), run=RUN, schema=schema):
                assert all_names(admin) == [f"{PREFIX}{DEAD}_main_1"]
        finally:
            conn.execute("DROP ROLE tests_elsewhere")


KILLED = """
import sys
from aioqueue.testing import Databases
databases = Databases(sys.argv[1], run=sys.argv[3], schema=sys.argv[2]).__enter__()
databases.take()
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_has_left_is_dropped_by_the_next(admin: str, schema: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, admin, schema, DEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdout, process.stdin:
        assert process.stdout.readline() == "ready\n"
        with Databases(admin, run=RUN, schema=schema):
            assert f"{PREFIX}{DEAD}_main_1" in all_names(admin), "it lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
        while all_names(admin):  # until the server has noticed its end
            with Databases(admin, run=RUN, schema=schema):
                pass


def test_dsns() -> None:
    uri = "postgresql://me:secret@host:5432/app?sslmode=require"
    assert with_database(uri, 'a "b') == "postgresql://me:secret@host:5432/a%20%22b?sslmode=require"
    assert of_login(uri, "you") == "postgresql://you@host:5432/app?sslmode=require"
    assert as_role(uri, "you") == "postgresql://me:secret@host:5432/app?sslmode=require&options=-c%20role%3Dyou"
    again = as_role(as_role(uri, "you"), "o ther")
    parsed = conninfo_to_dict(again)
    assert parsed["options"] == "-c role=you -c role=o\\ ther"
    words = "host=host user=me dbname=app"
    assert conninfo_to_dict(with_database(words, "b"))["dbname"] == "b"
    assert conninfo_to_dict(of_login(words, "you"))["user"] == "you"
    assert conninfo_to_dict(as_role(words, "you"))["options"] == "-c role=you"


@pytest.mark.parametrize(("run", "process"), [("xyz", "main"), (RUN, "a" * 11), (RUN, 'a"')])
def test_names_are_checked(run: str, process: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        Databases("", run=run, process=process)
