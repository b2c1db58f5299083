"""One PostgreSQL cluster on this machine: initdb, start, stop, roles; all that runs PostgreSQL's programs.

It knows nothing of who shares the server (embedded.py) or of how long it lives (embedded_keeper.py).
"""

import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import psycopg
from psycopg import sql

from aioqueue.embedded_system import ServerUser, barrier, make_directory
from aioqueue.errors import EmbeddedError

SUPERUSER = "postgres"
OWNER = "aioqueue_owner"
ROLES = (OWNER, "aioqueue_worker", "aioqueue_client")

PORT = 5432
# sun_path holds 104 bytes with its closing zero on the BSDs and macOS, 108 on Linux.
SOCKET_PATH_LIMIT = 103
START_SECONDS = 60
CRASHED_SECONDS = 10
# Beyond every kernel's pid_max, so nobody's: PostgreSQL finds it dead, and goes on to its own checks.
NOBODYS_PID = "2147483647"


class Address(NamedTuple):
    """Where a running server listens, by its postmaster.pid."""

    pid: int
    port: int
    socket_dir: str
    status: str


@dataclass(frozen=True)
class Cluster:
    """A data directory, PostgreSQL's programs for it, and who runs them (None: ourselves).

    `directory` is absolute, resolved and exists. Calls that change something are serialised by the caller.
    """

    directory: Path
    bin_dir: Path
    user: ServerUser | None

    @property
    def pgdata(self) -> Path:
        return self.directory / "pgdata"

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def log(self) -> Path:
        return self.run_dir / "server.log"

    def initialise(self, *, sync: bool = True) -> None:
        """Make the cluster if there is none: all or nothing, also when killed. `sync` waits for the disk."""
        if re.search(r'["$`\\\n]', str(self.directory)):  # pg_ctl puts the path into a shell command
            raise EmbeddedError(f'PostgreSQL cannot be started in {self.directory}: use a path without " $ ` \\')
        if self.user and (closed := barrier(self.directory, self.user)):
            raise EmbeddedError(
                f"we are root, so PostgreSQL runs as {self.user.name}, who cannot reach {self.directory}: "
                f"{closed} is closed to others. Give a data directory elsewhere, or open this one with: "
                f"chmod o+x {shlex.quote(str(closed))}"
            )
        make_directory(self.run_dir, 0o700, self.user)
        if not self.pgdata.exists():
            self._initdb(sync)
        have = (self.pgdata / "PG_VERSION").read_text().strip()
        want = re.findall(r"\d+", self._run("postgres", "--version"))[0]
        if have != want:
            raise EmbeddedError(
                f"{self.pgdata} was made by PostgreSQL {have}, the installed one is {want}: "
                f"give another data directory, or install {have} and move the data with pg_dump"
            )

    def _initdb(self, sync: bool) -> None:
        for left in self.directory.glob("pgdata.new-*"):
            shutil.rmtree(left, ignore_errors=True)
        new = self.directory / f"pgdata.new-{os.getpid()}"
        make_directory(new, 0o700, self.user)
        options = ["-U", SUPERUSER, "-E", "UTF8", "--no-locale", "--auth-local=trust", "--auth-host=reject"]
        self._run("initdb", "-D", str(new), *options, *([] if sync else ["--no-sync"]))
        new.rename(self.pgdata)
        if sync:  # the new name, too
            handle = os.open(self.directory, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    def start(self, settings: Mapping[str, str]) -> None:
        """Start the server unless it runs, and wait until it answers; one on its way is waited for."""
        began = time.monotonic()
        while (running := self.address()) and running.status != "ready":
            if time.monotonic() > began + START_SECONDS:
                raise EmbeddedError(f"PostgreSQL (process {running.pid}) stays {running.status}: see {self.log}")
            time.sleep(0.02)
        if running:
            return
        crashed = self._doubt_stale_files()
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.1"))
        values = {
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": f'"{self._socket_dir()}"',
            "unix_socket_permissions": "0700",
            **settings,
        }
        options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in values.items())
        where = ("-D", str(self.pgdata), "-l", str(self.log))
        while True:
            try:
                self._run("pg_ctl", "start", "-s", "-w", "-t", str(START_SECONDS), *where, "-o", options)
            except EmbeddedError:
                # The last processes of a crashed server may need a moment to notice; they hold its memory.
                if not crashed or time.monotonic() > began + CRASHED_SECONDS:
                    raise
                time.sleep(0.2)
            else:
                return

    def stop_command(self, mode: str = "fast") -> list[str]:
        """Build the command, to be run as `user`, that stops the server and waits for its end."""
        wait = ("-w", "-t", str(START_SECONDS))
        return [str(self.bin_dir / "pg_ctl"), "stop", "-s", *wait, "-m", mode, "-D", str(self.pgdata)]

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and wait for its end."""
        self._run(*self.stop_command(mode))

    def address(self) -> Address | None:
        """Read where the server listens; None when none runs, whatever a crash has left behind."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, ValueError, IndexError):
            return None
        if not self._serves(pid):
            return None
        lines += [""] * 8  # a server on its way has not written them all
        return Address(pid, int(lines[3] or PORT), lines[4], lines[7].strip() or "starting")

    def dsn(self, role: str, database: str) -> str:
        """Build the URI for a role. No password: only the server's user and root can reach the socket."""
        address = self.address()
        host, port = (address.socket_dir, address.port) if address else (str(self._socket_dir()), PORT)
        return f"postgresql://{quote(role, safe='')}@/{quote(database, safe='')}?host={quote(host)}&port={port}"

    def ensure_roles(self, *databases: str) -> None:
        """Create the three roles, and these databases of the owner, where missing."""
        with psycopg.connect(self.dsn(SUPERUSER, "postgres"), autocommit=True, connect_timeout=10) as conn:
            roles = {name for (name,) in conn.execute("SELECT rolname FROM pg_catalog.pg_roles")}
            there = {name for (name,) in conn.execute("SELECT datname FROM pg_catalog.pg_database")}
            for role in ROLES:
                if role not in roles:
                    conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
            for name in databases:
                if name not in there:
                    command = sql.SQL("CREATE DATABASE {} OWNER {}")
                    conn.execute(command.format(sql.Identifier(name), sql.Identifier(OWNER)))

    def _run(self, program: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs in a session of its own, out of reach of the terminal's Ctrl-C."""
        command = [str(self.bin_dir / program), *arguments]  # an absolute path stays as it is
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd="/",  # ours may be closed to the server's user
                env={**inherited, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                umask=0o077,
                user=self.user.uid if self.user else None,
                group=self.user.gid if self.user else None,
                extra_groups=[] if self.user else None,
            )
        except OSError as error:
            raise EmbeddedError(f"cannot run {command[0]}: {error}") from error
        if done.returncode:
            log = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
            name = Path(command[0]).name
            raise EmbeddedError(f"PostgreSQL's {name} failed in {self.directory}:\n{done.stdout.strip()}\n{log}".strip())
        return done.stdout

    def _serves(self, pid: int) -> bool:
        """Tell whether this process is our server: in a container, soon another one has its number."""
        process = Path("/proc") / str(pid)
        try:
            os.kill(pid, 0)
            if os.fsencode(self.pgdata) in (process / "cmdline").read_bytes().split(b"\0"):
                return True
            return (process / "cwd").samefile(self.pgdata)
        except (ProcessLookupError, PermissionError):  # none, or another user's
            return False
        except FileNotFoundError:  # ended meanwhile; without a /proc we believe the file
            return not Path("/proc/self").exists()

    def _doubt_stale_files(self) -> bool:
        """Take the pid out of files that a crashed server left: PostgreSQL would respect whoever has it now.

        The rest of postmaster.pid stays: by it PostgreSQL sees whether old processes still use shared memory.
        """
        crashed = False
        for file in (self.pgdata / "postmaster.pid", self._socket_dir() / f".s.PGSQL.{PORT}.lock"):
            if file.exists() and not file.is_symlink():
                crashed = True
                _, _, rest = file.read_text().partition("\n")
                file.write_text(f"{NOBODYS_PID}\n{rest}")
        return crashed

    def _socket_dir(self) -> Path:
        """Return the directory of the socket: run/, or one in /tmp where that path cannot be a socket's."""
        socket = os.fsencode(self.run_dir / f".s.PGSQL.{PORT}")
        if len(socket) <= SOCKET_PATH_LIMIT and b"," not in socket:  # to libpq, a comma divides hosts
            return self.run_dir
        found = self.directory.stat()
        name = hashlib.sha256(f"{self.directory}:{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:16]
        short = Path("/tmp") / f"aioqueue-{name}"  # noqa: S108 - owner and mode are checked below
        make_directory(short, 0o700, self.user)
        there, uid = short.lstat(), self.user.uid if self.user else os.geteuid()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != uid or there.st_mode & 0o077:
            raise EmbeddedError(f"{short}, needed for the socket, is not private to the server's user: remove it")
        return short
