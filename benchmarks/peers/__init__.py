"""The same work on aioqueue and on its peers: who they are, how each is configured, how its driver is run.

Each peer is installed into an environment of its own (environment.py) and driven by a script there (drivers/), which takes
commands by a pipe and times itself. Configured as its documentation advises for throughput; the settings are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environment import NotInstallable, default_cache, node_environment, python_environment

__all__ = ["CONTESTANTS", "Contestant", "Driver", "NotInstallable", "add_options", "chosen", "running"]

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "drivers"
PATIENCE = 600.0
"""Seconds that one command may take."""


@dataclass(frozen=True)
class Contestant:
    """One library with one configuration."""

    name: str
    driver: str
    packages: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = False
    """Whether it is given a tenth of the jobs: it would take minutes."""
    python: tuple[int, int] = (3, 11)
    """The oldest Python that it runs on."""
    one: dict[str, Any] = field(default_factory=dict)
    """What makes it claim, run and end one job at a time; empty: not tried."""

    def command(self, cache: Path) -> tuple[list[str], dict[str, str], Path]:
        """Return program, environment and directory, installing what is missing; raises NotInstallable."""
        script = DRIVERS / self.driver
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        if script.suffix == ".mjs":
            home, env["PATH"] = node_environment(cache, self.packages)
            return ["node", str(script)], env, home
        if not self.packages:
            env["PYTHONPATH"] = str(HERE.parent.parent)
            return [sys.executable, str(script)], env, HERE
        env.pop("PYTHONPATH", None)
        return [str(python_environment(cache, self.packages, self.python)), str(script)], env, cache


_PSYCOPG = "psycopg[binary,pool]>=3.2"
_NODE = ("graphile-worker", "pg-boss", "pg")
_PGQUEUER = ("pgqueuer[asyncpg,psycopg]", "uvloop", _PSYCOPG)

CONTESTANTS = {
    c.name: c
    for c in (
        Contestant("aioqueue", "aioqueue_driver.py", one={"concurrency": 1, "claim_batch": 1}),
        Contestant("aioqueue-400", "aioqueue_driver.py", options={"concurrency": 400}),
        Contestant("aioqueue-uvloop", "aioqueue_driver.py", options={"loop": "uvloop"}),
        Contestant("graphile-worker", "graphile_worker.mjs", _NODE, one={"concurrency": 1, "size": 0}),
        Contestant("pg-boss", "pg_boss.mjs", _NODE),
        Contestant("pgqueuer-asyncpg", "pgqueuer_driver.py", _PGQUEUER, {"driver": "asyncpg", "batch": 100}, one={"batch": 1}),
        Contestant("pgqueuer-psycopg", "pgqueuer_driver.py", _PGQUEUER, {"driver": "psycopg", "batch": 100}),
        Contestant("pgqueuer-default", "pgqueuer_driver.py", _PGQUEUER, {"driver": "asyncpg"}),
        Contestant("procrastinate", "procrastinate_driver.py", ("procrastinate>=3", _PSYCOPG), slow=True),
        Contestant("chancy", "chancy_driver.py", ("chancy", _PSYCOPG)),
        Contestant("saq", "saq_driver.py", ("saq[postgres]", _PSYCOPG), slow=True),
        Contestant("awa", "awa_driver.py", ("awa-pg", _PSYCOPG)),
        Contestant("oban", "oban_driver.py", ("oban", _PSYCOPG), python=(3, 12)),
        Contestant("dbos", "dbos_driver.py", ("dbos", _PSYCOPG), slow=True),
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let the command line say which peers take part."""
    parser.add_argument(
        "--peers", nargs="?", const="all", default="", metavar="NAMES", help="all, or some of " + ",".join(CONTESTANTS)
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where peers are installed (default %(default)s)")


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace, able: Collection[str] = CONTESTANTS) -> list[str]:
    """The names of those that it says, of the `able` ones; an unknown one ends the program."""
    names = [*able] if arguments.peers == "all" else [name for name in arguments.peers.split(",") if name]
    if unknown := {*names} - {*able}:
        parser.error(f"--peers: expected some of {','.join(able)}, got {', '.join(sorted(unknown))}")
    return names


class Driver:
    """A running driver."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    async def ask(self, *command: object, seconds: float = PATIENCE) -> dict[str, Any]:
        """Send one command and return its answer; RuntimeError with what went wrong."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.hear(seconds)

    async def hear(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Return the next line it says."""
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("its driver has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


@contextlib.asynccontextmanager
async def running(contestant: Contestant, dsn: str, cache: Path, log: Path | None = None) -> AsyncIterator[Driver]:
    """Run a driver on a database; killed at the end. Raises NotInstallable."""
    command, env, directory = await asyncio.to_thread(contestant.command, cache)
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("ab")) if log else asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, dsn, json.dumps(contestant.options),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
            env=env, cwd=directory, limit=2**24, start_new_session=True,
        )  # fmt: skip
        try:
            yield Driver(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
