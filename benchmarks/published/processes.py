"""Processes of a row: workers of aioqueue as their users start them, and naive ones; killed at the end of the row."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Processes:
    """Starts processes from the repository's root; a context manager that kills what still runs."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, dsn: str, *command: str, before: Sequence[str] = (), **environ: str) -> subprocess.Popen[bytes]:
        """Start `python -m …` with the DSN in its environment; `before`: what it is started by."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_"))}
        process = subprocess.Popen(
            [*before, sys.executable, "-m", *command],
            cwd=ROOT,
            env={**inherited, "AIOQUEUE_DSN": dsn, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if "PUBLISHED_DEBUG" not in os.environ else None,
        )
        self.started.append(process)
        return process

    def worker(
        self, dsn: str, *options: str, lease: float = 2.0, before: Sequence[str] = (), **environ: str
    ) -> subprocess.Popen[bytes]:
        """Start a worker with the tasks of tasks.py."""
        command = ("aioqueue", "worker", "-A", "benchmarks.published.tasks:app", "--start-timeout", "30", *options)
        return self.start(dsn, *command, before=before, PUBLISHED_LEASE=str(lease), **environ)


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    """Processes that do not outlive the block."""
    found = Processes()
    try:
        yield found
    finally:
        for process in found.started:
            if process.poll() is None:
                process.kill()
            process.wait(10)
