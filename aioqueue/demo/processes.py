"""The demo's worker processes: started by the same command that a user types, and started again when one is killed.

Takes no part in the recovery of jobs: that is the other workers' own doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

from .tasks import LEASE, LEASE_VARIABLE, POISON_EXIT, QUEUE

COMMAND = ("-m", "aioqueue", "worker", "-A", "aioqueue.demo.tasks:app", "-q", QUEUE)


class WorkersFailed(Exception):
    """A worker process ended for another reason than the poison job."""


class WorkerProcesses:
    """A number of worker processes; `run` keeps that number up, and ends once all have ended after `stop`."""

    def __init__(self, dsn: str, number: int) -> None:
        self.number = number
        self.killed = 0
        """Processes that the poison job has killed."""
        self.exits: list[int] = []
        """Exit codes after `stop`."""
        self._environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_"))},
            "AIOQUEUE_DSN": dsn,
            LEASE_VARIABLE: str(LEASE),
        }
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")
        self._processes: set[asyncio.subprocess.Process] = set()
        self._asked_to_stop = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """Processes that run now."""
        return [process.pid for process in self._processes]

    async def run(self) -> None:
        """Keep the processes running. Raises WorkersFailed."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.number):
                group.create_task(self._keep_one())

    async def _keep_one(self) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *COMMAND,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
            self._processes.add(process)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
            finally:
                self._processes.discard(process)
            if code == POISON_EXIT:
                self.killed += 1
            elif self._asked_to_stop.is_set():
                self.exits.append(code)
                return
            else:
                raise WorkersFailed(f"a worker process ended with status {code}; its output:\n{self.output()}")

    def stop(self) -> None:
        """Ask all to stop, as a deployment does: SIGTERM."""
        self._asked_to_stop.set()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def output(self) -> str:
        """Return the end of what the workers have printed."""
        self._log.flush()
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4000))
        text = self._log.read().decode(errors="replace")
        return text.strip() or "(nothing)"

    def close(self) -> None:
        """Let go of the output."""
        self._log.close()
