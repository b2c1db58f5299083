"""A server of one test alone, on TCP: it is stopped, started, held still and failed over as the test likes."""

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import psycopg

from aioqueue import migrate
from aioqueue.embedded import hold, keep
from aioqueue.embedded_cluster import SUPERUSER, Cluster
from aioqueue.sql import place
from tests.postgres import FAST, Database, Server

DATABASE = "outage"
# What was committed stays when the server is killed: the tests count jobs.
SAFE = {**FAST, "synchronous_commit": "on", "full_page_writes": "on", "listen_addresses": "127.0.0.1"}
TRUSTED = "host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n"


PORTS = range(10_000, 32_000)
"""Below those that outgoing connections get, which would take the port of a server that is down."""


def free_port() -> int:
    """A port that nobody listens on; hardly ever the same in two processes, whose `random` begins alike."""
    while True:
        with socket.socket() as sock:
            port = PORTS[secrets.randbelow(len(PORTS))]
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                return port


class OutageServer(Server):
    """A server with one migrated database; `settings` are added to the fast ones that survive a kill."""

    def __init__(self, version: int, schema: str, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(version)
        self.schema = schema
        self.port = free_port()
        self._settings = {**SAFE, "port": str(self.port), **(settings or {})}
        self._held: list[int] = []

    def __enter__(self) -> "OutageServer":
        try:
            self.cluster.initialise(sync=False)
            self.trust(TRUSTED)
            os.close(hold(self.home / "start.lock", fcntl.LOCK_EX))
            self._users = hold(self.home / "users.lock", fcntl.LOCK_SH)
            keep(self.cluster)
            self.start()
            self.cluster.ensure_roles(DATABASE)
            asyncio.run(self._migrate())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        super().__exit__()

    async def _migrate(self) -> None:
        owner = Database(self, DATABASE).dsn("owner")
        await migrate.migrate(owner, schema=self.schema)
        await migrate.grant(owner, schema=self.schema, role="aioqueue_worker", kind="worker")

    @property
    def home(self) -> Path:
        """The directory of it all."""
        return self.cluster.directory

    def trust(self, lines: str) -> None:
        """Make pg_hba.conf of these lines; in force after `start` or a reload."""
        (self.cluster.pgdata / "pg_hba.conf").write_text(f"local all all trust\n{lines}")

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.cluster.start(self._settings)

    def stop(self, mode: str = "immediate") -> None:
        """Stop it and wait for its end."""
        self.cluster.stop(mode)

    def tcp(self, role: str = "worker", *, port: int | None = None, **more: str) -> str:
        """The URI of a role by TCP, perhaps through a proxy."""
        name = SUPERUSER if role == "superuser" else f"aioqueue_{role}"
        rest = "&".join(f"{key}={quote(value)}" for key, value in more.items())
        return f"postgresql://{name}@127.0.0.1:{port or self.port}/{DATABASE}?{rest}"

    def hold_still(self) -> None:
        """SIGSTOP every process of the server."""
        address = self.cluster.address()
        assert address is not None
        self._held = [address.pid]
        os.kill(address.pid, signal.SIGSTOP)
        for child in _children(address.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
                self._held.append(child)

    def go_on(self) -> None:
        """SIGCONT them."""
        held, self._held = self._held, []
        for pid in reversed(held):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def run(self, *commands: str) -> None:
        """Run statements as superuser, by the socket."""
        with psycopg.connect(self.dsn("superuser", DATABASE), autocommit=True, connect_timeout=10) as conn:
            for command in commands:
                conn.execute(command.encode())

    def rows(self, query: str, *params: object) -> list[tuple[object, ...]]:
        """Ask as superuser, by the socket; the query says `aioqueue.`."""
        with psycopg.connect(self.dsn("superuser", DATABASE), autocommit=True, connect_timeout=10) as conn:
            return conn.execute(place(query, self.schema).encode(), params or None).fetchall()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it still for the block."""
        self.hold_still()
        try:
            yield
        finally:
            self.go_on()


class Standby:
    """A synchronous standby of a server."""

    def __init__(self, primary: OutageServer) -> None:
        self.port = free_port()
        self._home = Path(tempfile.mkdtemp(prefix="aioqueue-test-", dir="/tmp")).resolve()
        self._home.chmod(0o711)
        user = primary.cluster.user
        self.cluster = Cluster(self._home, primary.cluster.bin_dir, user)
        inside = self._home / "inside"
        inside.mkdir(0o700)
        self.cluster.run_dir.mkdir(0o700)
        if user:
            os.chown(inside, user.uid, user.gid)
            os.chown(self.cluster.run_dir, user.uid, user.gid)
        source = f"host=127.0.0.1 port={primary.port} user=postgres application_name=standby"
        primary.cluster._run("pg_basebackup", "-D", str(inside / "pgdata"), "-R", "-c", "fast", "--no-sync", "-d", source)
        self.cluster.pgdata.symlink_to(inside / "pgdata")
        self.cluster.start({**SAFE, "port": str(self.port)})
        primary.run("ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")

    def promote(self) -> None:
        """Make it the primary."""
        with psycopg.connect(self.cluster.dsn("postgres", "postgres"), autocommit=True) as conn:
            conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
            conn.execute("SELECT pg_reload_conf()")
            assert conn.execute("SELECT pg_promote(true, 30)").fetchone() == (True,)

    def close(self) -> None:
        """Stop it and remove it."""
        if self.cluster.address() is not None:
            self.cluster.stop("immediate")
        shutil.rmtree(self._home, ignore_errors=True)


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(stat.parent.name))
    return found
