"""A PgBouncer in front of a server: Debian's, in transaction mode, on a socket of its own, gone at the end."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

import psycopg

from aioqueue.embedded_system import ServerUser, server_user

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
USERS = ("aioqueue_owner", "aioqueue_worker", "aioqueue_client", "postgres")
PORT = 6432
# A run that is killed leaves none behind; where there is no setpriv, it may.
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
START_SECONDS = 20.0


class PgBouncer:
    """A running PgBouncer; `dsn` turns a DSN of the server into one that goes through it."""

    def __init__(self, home: Path, user: ServerUser | None) -> None:
        self.home = home
        self._user = user
        self.process = self._start()

    def dsn(self, direct: str) -> str:
        """The same role and database, through the pooler."""
        parts = urlsplit(direct)
        return urlunsplit(parts._replace(query=f"host={self.home}&port={PORT}"))

    def _start(self) -> subprocess.Popen[bytes]:
        assert PROGRAM is not None
        user = self._user
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                [*DIES_WITH_US, PROGRAM, str(self.home / "ini")], cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                user=user.uid if user else None, group=user.gid if user else None, extra_groups=[] if user else None,
            )  # fmt: skip

    def stop(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def restart(self, direct: str) -> None:
        """Kill it and start another in its place."""
        self.stop()
        (self.home / f".s.PGSQL.{PORT}").unlink()
        self.process = self._start()
        self.wait_until_it_answers(direct)

    def wait_until_it_answers(self, direct: str) -> None:
        """Wait until it has a connection of the server for a client."""
        give_up = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn(direct), connect_timeout=2).close()
            except psycopg.OperationalError as error:
                if time.monotonic() > give_up or self.process.poll() is not None:
                    raise AssertionError(f"PgBouncer does not answer: {error}\n{self.log}") from error
                time.sleep(0.02)
            else:
                return

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")


@contextlib.contextmanager
def pgbouncer(direct: str, **settings: object) -> Iterator[PgBouncer]:
    """Run a PgBouncer in transaction mode in front of the server that `direct` names."""
    home = Path(tempfile.mkdtemp(prefix="aioqueue-pooler-", dir="/tmp"))
    # As root, PgBouncer refuses to run: it runs as the server's user then.
    user = server_user(home / "none")
    try:
        _configure(home, direct, settings, user)
        running = PgBouncer(home, user)
        try:
            running.wait_until_it_answers(direct)
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _configure(home: Path, direct: str, settings: dict[str, object], user: ServerUser | None) -> None:
    server = parse_qs(urlsplit(direct).query)
    values: dict[str, object] = {
        "listen_addr": "", "unix_socket_dir": home, "listen_port": PORT, "pool_mode": "transaction", "auth_type": "trust",
        "auth_file": home / "users", "default_pool_size": 8, "max_client_conn": 200,
    }  # fmt: skip
    lines = [f"{name} = {value}" for name, value in {**values, **settings}.items()]
    database = f"* = host={server['host'][0]} port={server['port'][0]}"
    (home / "ini").write_text("\n".join(["[databases]", database, "[pgbouncer]", *lines, ""]))
    (home / "users").write_text("".join(f'"{name}" ""\n' for name in USERS))
    if user is not None:
        for path in (home, home / "ini", home / "users"):
            os.chown(path, user.uid, user.gid)
