"""The storm's own PostgreSQL: on TCP, so that proxies can stand before it, and safe when it is killed."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

from aioqueue import embedded, migrate
from aioqueue.embedded import DATABASE
from aioqueue.embedded_cluster import SUPERUSER, Cluster
from aioqueue.embedded_system import reachable_bin, server_user

WATCH = "storm-watch"
"""application_name of the connections that no fault may touch."""

TABLES = """
CREATE SCHEMA storm;
CREATE TABLE storm.asked (job_id uuid PRIMARY KEY);
CREATE TABLE storm.effect (job_id uuid PRIMARY KEY, attempt integer NOT NULL);
CREATE TABLE storm.part (job_id uuid, attempt integer, part integer, PRIMARY KEY (job_id, attempt, part));
CREATE TABLE storm.violation (tenant text, setting text, job_id uuid);
CREATE TABLE storm.ledger (tenant text NOT NULL, job_id uuid NOT NULL);
ALTER TABLE storm.ledger ENABLE ROW LEVEL SECURITY;
ALTER TABLE storm.ledger FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON storm.ledger USING (tenant = current_setting('app.tenant', true)) WITH CHECK (true);
CREATE FUNCTION storm.check_tenant() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.tenant IS DISTINCT FROM current_setting('app.tenant', true) THEN
        INSERT INTO storm.violation VALUES (NEW.tenant, current_setting('app.tenant', true), NEW.job_id);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_tenant BEFORE INSERT ON storm.ledger FOR EACH ROW EXECUTE FUNCTION storm.check_tenant();
GRANT USAGE ON SCHEMA storm TO aioqueue_worker, aioqueue_client;
GRANT INSERT ON storm.asked TO aioqueue_worker, aioqueue_client;
GRANT INSERT ON storm.effect, storm.part TO aioqueue_worker;
GRANT SELECT, INSERT ON storm.ledger TO aioqueue_worker;
"""


class StormServer:
    """One server with a migrated database and the storm's tables."""

    def __init__(self, cluster: Cluster, settings: dict[str, str], port: int) -> None:
        self._cluster = cluster
        self._settings = settings
        self.port = port
        self.owner = self._socket("aioqueue_owner")
        """The URI of the owner, by the socket."""
        self.watch = self._socket(SUPERUSER)
        """The URI of the superuser, by the socket."""

    def stop(self) -> None:
        """Stop it as a crash would; blocks."""
        self._cluster.stop("immediate")

    def start(self) -> None:
        """Start it and wait until it answers; blocks."""
        self._cluster.start(self._settings)

    def tcp(self, role: str, name: str, port: int | None = None) -> str:
        """The URI of a role by TCP, perhaps through a proxy."""
        return f"postgresql://aioqueue_{role}@127.0.0.1:{port or self.port}/{DATABASE}?application_name={name}"

    def _socket(self, role: str) -> str:
        return f"{self._cluster.dsn(role, DATABASE)}&application_name={WATCH}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def storm_server() -> Iterator[StormServer]:
    """Start a server in a temporary directory, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="aioqueue-storm-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o711)  # noqa: S103 - as root the server is another user, who must get through
        directory = Path(home).resolve() / "server"
        port = _free_port()
        # The machine stays up, only the server is killed: without fsync nothing committed is lost.
        settings = {"fsync": "off", "max_connections": "200", "listen_addresses": "127.0.0.1", "port": str(port)}
        with embedded.start(directory, settings=settings) as started:
            user = server_user(directory / "pgdata")
            cluster = Cluster(directory, reachable_bin(embedded.programs(), user), user)
            (cluster.pgdata / "pg_hba.conf").write_text("local all all trust\nhost all all 127.0.0.1/32 trust\n")
            with psycopg.connect(started.dsn("superuser"), autocommit=True) as conn:
                conn.execute("SELECT pg_reload_conf()")
            try:
                yield StormServer(cluster, settings, port)
            finally:
                if cluster.address() is None:
                    cluster.start(settings)


async def prepare(server: StormServer) -> None:
    """Migrate, grant, make the storm's tables."""
    await migrate.migrate(server.owner)
    await migrate.grant(server.owner, role="aioqueue_worker", kind="worker")
    await migrate.grant(server.owner, role="aioqueue_client", kind="client")
    async with await psycopg.AsyncConnection.connect(server.owner, autocommit=True) as conn:
        await conn.execute(TABLES)
