"""The system user and the directories of an embedded server: who runs it, and what that user can reach.

It creates what is missing, and never changes the mode or the owner of a directory that it finds.
"""

import hashlib
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from aioqueue.errors import EmbeddedError

if sys.platform != "win32":
    import pwd

SYSTEM_DIR = Path("/var/lib/aioqueue")


class ServerUser(NamedTuple):
    """The system user that runs the server when we are root, as whom PostgreSQL does not run."""

    name: str
    uid: int
    gid: int


def server_user(pgdata: Path) -> ServerUser | None:
    """Choose who runs the server: ourselves (None); as root the data's owner, else postgres, else nobody."""
    if os.geteuid() != 0:
        return None
    everybody = pwd.getpwall()
    if pgdata.exists():
        uid = pgdata.stat().st_uid
        entries = [entry for entry in everybody if entry.pw_uid == uid != 0]
    else:
        entries = [entry for name in ("postgres", "nobody") for entry in everybody if entry.pw_name == name]
    if not entries:
        raise EmbeddedError(
            f"PostgreSQL does not run as root, and no other user can take {pgdata}: when it exists it must "
            "belong to a user of this system; when it does not, there must be a user postgres or nobody"
        )
    return ServerUser(entries[0].pw_name, entries[0].pw_uid, entries[0].pw_gid)


def barrier(path: Path, user: ServerUser) -> Path | None:
    """Find the first part of `path`, itself included, that `user` may not enter or execute, if any."""
    for part in (*reversed(path.parents), path):
        found = part.stat()
        own, group = found.st_uid == user.uid, found.st_gid == user.gid
        if not found.st_mode & (stat.S_IXUSR if own else stat.S_IXGRP if group else stat.S_IXOTH):
            return part
    return None


def reachable_bin(bin_dir: Path, user: ServerUser | None) -> Path:
    """Return a directory of PostgreSQL's programs that `user` can run: this one, or a copy where it cannot.

    A virtual environment under /root is the usual case. Copies stand in SYSTEM_DIR, one for each build.
    """
    if user is None or barrier(bin_dir / "postgres", user) is None:
        return bin_dir
    package = bin_dir.parent.parent
    found = (bin_dir / "postgres").stat()
    build = hashlib.sha256(f"{package}:{found.st_size}:{found.st_mtime_ns}".encode()).hexdigest()[:12]
    target = SYSTEM_DIR / f"{package.name}-{build}"
    if not target.exists():
        make_directory(SYSTEM_DIR, 0o755)
        new = SYSTEM_DIR / f".{target.name}-{os.getpid()}"
        for folder in (
            package,
            package.with_name(package.name + ".libs"),
        ):  # the programs find libs beside them
            if folder.exists():
                skip = shutil.ignore_patterns("include", "__pycache__")
                shutil.copytree(folder, new / folder.name, symlinks=True, ignore=skip)
        for file in (new, *new.rglob("*")):
            if not file.is_symlink():
                file.chmod(0o755 if file.stat().st_mode & stat.S_IXUSR else 0o644)
        try:
            new.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(new, ignore_errors=True)
    copied = target / bin_dir.relative_to(package.parent)
    if closed := barrier(copied / "postgres", user):
        raise EmbeddedError(f"the user {user.name} cannot run PostgreSQL's programs: {closed} is closed to others")
    return copied


def make_directory(path: Path, mode: int, user: ServerUser | None = None) -> None:
    """Make a directory of this mode (and owner) and its missing parents; leave what exists as it is."""
    for part in (*reversed(path.parents), path):
        try:
            part.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            if part.is_dir():
                continue
            raise EmbeddedError(f"cannot make the directory {part}: {error.strerror}") from error
        part.chmod(mode if part == path else 0o755)
        if user and part == path:
            os.chown(part, user.uid, user.gid)
