"""The storm's own PostgreSQL servers: a primary and its synchronous standby, on TCP, so that proxies can stand before them.

A crash loses nothing that was committed: the machine stays up, and a promoted standby has all that anybody was told of.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from aioqueue import migrate
from aioqueue.embedded import DATABASE, hold, keep, programs
from aioqueue.embedded_cluster import OWNER, SUPERUSER, Cluster
from aioqueue.embedded_system import make_directory, reachable_bin, server_user

WATCH = "storm-watch"
"""application_name of the connections that no fault may touch."""
STANDBY = "standby"
CAUGHT_UP = 20.0
"""Seconds in which a standby must have caught up, or the failover is left out."""
TRUSTED = "local all all trust\nhost all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n"
SETTINGS = {
    "fsync": "off",
    "max_connections": "200",
    "listen_addresses": "127.0.0.1",
    "wal_keep_size": "256MB",
    "wal_retrieve_retry_interval": "200ms",
    "shared_buffers": "64MB",
}

TABLES = """
CREATE SCHEMA storm;
CREATE TABLE storm.asked (job_id uuid PRIMARY KEY);
CREATE TABLE storm.effect (job_id uuid PRIMARY KEY, attempt integer NOT NULL);
CREATE TABLE storm.part (job_id uuid, attempt integer, part integer, PRIMARY KEY (job_id, attempt, part));
CREATE TABLE storm.violation (tenant text, setting text, job_id uuid);
CREATE TABLE storm.probe (at timestamptz NOT NULL);
CREATE TABLE storm.ledger (tenant text NOT NULL, job_id uuid NOT NULL);
CREATE INDEX ON storm.ledger (job_id);
CREATE INDEX ON storm.ledger (tenant);
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


class Host:
    """A place for one server: its directory, its port, and a keeper that stops it when this process dies."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(0o711)
        self.port = _free_port()
        user = server_user(directory / "pgdata")
        self.cluster = Cluster(directory, reachable_bin(programs(), user), user)
        make_directory(self.cluster.run_dir, 0o700, user)
        os.close(hold(directory / "start.lock", fcntl.LOCK_EX))
        self._users = hold(directory / "users.lock", fcntl.LOCK_SH)
        keep(self.cluster)

    def start(self) -> None:
        """Start it and wait until it answers; blocks."""
        self.cluster.start({**SETTINGS, "port": str(self.port)})

    def stop(self) -> None:
        """Stop it as a crash would; blocks."""
        if self.cluster.address() is not None:
            self.cluster.stop("immediate")

    def copy(self, primary: Host) -> None:
        """Become a standby of another, from nothing; blocks."""
        shutil.rmtree(self.cluster.pgdata, ignore_errors=True)
        make_directory(self.cluster.pgdata, 0o700, self.cluster.user)
        source = f"host=127.0.0.1 port={primary.port} user={SUPERUSER} application_name={STANDBY}"
        self.cluster._run("pg_basebackup", "-D", str(self.cluster.pgdata), "-R", "-c", "fast", "--no-sync", "-d", source)
        self.start()

    def run(self, *commands: str) -> list[tuple[object, ...]]:
        """Run statements of the superuser by the socket; rows of the last one."""
        rows: list[tuple[object, ...]] = []
        uri = f"{self.cluster.dsn(SUPERUSER, 'postgres')}&application_name={WATCH}"
        with psycopg.connect(uri, autocommit=True, connect_timeout=10) as conn:
            for command in commands:
                cursor = conn.execute(command.encode())
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def close(self) -> None:
        """Stop it for good."""
        self.stop()
        os.close(self._users)


class Servers:
    """Two hosts, of which one is the primary."""

    def __init__(self, home: Path) -> None:
        self._home = home
        first = Host(home / "a")
        self._hosts = [first]
        first.cluster.initialise(sync=False)
        (first.cluster.pgdata / "pg_hba.conf").write_text(TRUSTED)
        first.start()
        first.cluster.ensure_roles(DATABASE)
        self.replicated = False
        """Whether a standby has been made; without one there is no failover."""

    @property
    def primary(self) -> Host:
        """The one that can write."""
        return self._hosts[0]

    @property
    def ports(self) -> list[int]:
        """The ports of both, in an order that stays."""
        return sorted(host.port for host in self._hosts)

    @property
    def owner(self) -> str:
        """The URI of the owner at the primary, by the socket."""
        return self._socket(OWNER)

    @property
    def watch(self) -> str:
        """The URI of the superuser at the primary, by the socket."""
        return self._socket(SUPERUSER)

    def replicate(self) -> None:
        """Make the standby, or make it again from the other one; blocks until commits wait for it."""
        if len(self._hosts) == 1:
            self._hosts.append(Host(self._home / "b"))
        primary, standby = self._hosts
        standby.copy(primary)
        give_up = time.monotonic() + CAUGHT_UP
        while primary.run("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'") != [(1,)]:
            if time.monotonic() > give_up:
                return
            time.sleep(0.05)
        primary.run(f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'", "SELECT pg_reload_conf()")
        self.replicated = self.wait_caught_up()

    def wait_caught_up(self) -> bool:
        """Wait until the standby has all that was committed until now; whether it has."""
        give_up = time.monotonic() + CAUGHT_UP
        primary = self.primary
        try:
            ((position,),) = primary.run("SELECT pg_current_wal_lsn()")
            query = f"SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND flush_lsn >= '{position}'"
            while time.monotonic() < give_up:
                if primary.run(query) == [(1,)]:
                    return True
                time.sleep(0.05)
        except psycopg.OperationalError:
            pass
        return False

    def promote(self) -> None:
        """The primary dies and the standby takes its place; the other one is of no use until `replicate`. Blocks."""
        self.primary.stop()
        self.replicated = False
        self._hosts.reverse()
        self.primary.run("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        assert self.primary.run("SELECT pg_promote(true, 60)") == [(True,)]

    def tcp(self, role: str, name: str, ports: list[int] | None = None) -> str:
        """The URI of a role by TCP, to whichever of these ports (both servers') leads to the one that can write."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports or self.ports)
        rest = f"application_name={name}&target_session_attrs=read-write&connect_timeout=2"
        return f"postgresql://aioqueue_{role}@{hosts}/{DATABASE}?{rest}"

    def close(self) -> None:
        """Stop all."""
        for host in self._hosts:
            host.close()

    def _socket(self, role: str) -> str:
        return f"{self.primary.cluster.dsn(role, DATABASE)}&application_name={WATCH}"


def _free_port() -> int:
    # Below the ports that the system gives to clients: none may take it while the server is away.
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def storm_servers() -> Iterator[Servers]:
    """Start a primary in a temporary directory, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="aioqueue-chaos-", ignore_cleanup_errors=True) as home:
        os.chmod(home, 0o711)  # noqa: S103 - as root the server is another user, who must get through
        servers = Servers(Path(home).resolve())
        try:
            yield servers
        finally:
            servers.close()


async def prepare(servers: Servers) -> None:
    """Migrate, grant, make the storm's tables."""
    await migrate.migrate(servers.owner)
    await migrate.grant(servers.owner, role="aioqueue_worker", kind="worker")
    await migrate.grant(servers.owner, role="aioqueue_client", kind="client")
    async with await psycopg.AsyncConnection.connect(servers.owner, autocommit=True) as conn:
        await conn.execute(TABLES)
