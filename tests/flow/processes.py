"""Worker processes of the tests: started by the command line as users do, watched through the database, killed at the end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from psycopg import OperationalError

from aioqueue.job import new_job_id
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.kit import PATIENCE
from tests.sql.engine import Session

ROOT = Path(__file__).parents[2]

TABLES = """
CREATE SCHEMA flow;
CREATE TABLE flow.note (job_id uuid NOT NULL, attempt integer NOT NULL, pid integer NOT NULL, what text NOT NULL,
                        at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE flow.gate (open boolean);
CREATE TABLE flow.counted (job_id uuid NOT NULL);
GRANT USAGE ON SCHEMA flow TO aioqueue_worker;
GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA flow TO aioqueue_worker;
"""


@dataclass
class Process:
    """One worker process; `log` is what it wrote."""

    process: subprocess.Popen[bytes]
    path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.path.read_text()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def logged(self, text: str, times: int = 1) -> None:
        """Wait until it has written this so often."""
        async with asyncio.timeout(PATIENCE):
            while self.log.count(text) < times:
                assert self.process.poll() is None or self.log.count(text) >= times, f"the process ended:\n{self.log}"
                await asyncio.sleep(0.02)

    async def ended(self) -> int:
        """Wait until it has ended by itself; its exit code."""
        async with asyncio.timeout(PATIENCE):
            while (code := self.process.poll()) is None:  # noqa: ASYNC110 - another process sets no event of ours
                await asyncio.sleep(0.02)
        return code


@dataclass
class Flow:
    """A database, the worker processes on it, and questions about both. Polls; only a hang meets the limit."""

    owner: Session
    dsn: str
    schema: str
    directory: Path
    evidence: str | None = None
    """Where tasks note what they do, when it is not `dsn`, which a test may break."""
    processes: list[Process] = field(default_factory=list)

    def run(self, *arguments: str, dsn: str | None = None, **settings: float | None) -> Process:
        """Start a process of Python with these arguments, on `dsn` (the flow's), with settings of tests/flow/tasks.py."""
        path = self.directory / f"process-{len(self.processes)}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_", "FLOW_"))}
        environ |= {"AIOQUEUE_DSN": dsn or self.dsn, "AIOQUEUE_SCHEMA": self.schema, "PYTHONUNBUFFERED": "1"}
        environ |= {f"FLOW_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
        if self.evidence is not None:
            environ["FLOW_EVIDENCE"] = self.evidence
        with path.open("wb") as log:
            started = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(Process(started, path))
        return self.processes[-1]

    async def start(
        self, *arguments: str, lease: float | None = 1.5, dsn: str | None = None, ready: bool = True, **settings: float | None
    ) -> Process:
        """Start a worker process and wait until it has its row."""
        command = ("-m", "aioqueue", "worker", "-A", "tests.flow.tasks:app", "--grace", "60", *arguments)
        process = self.run(*command, dsn=dsn, lease=lease, **settings)
        if ready:
            await self.until("EXISTS (SELECT FROM aioqueue.worker WHERE pid = %s AND NOT dead)", process.pid, alive=process)
        return process

    def kill_all(self) -> None:
        """End what still runs, and print what each wrote: pytest shows it where the test failed."""
        for process in self.processes:
            if process.process.poll() is None:
                process.process.send_signal(signal.SIGCONT)
                process.kill()
            print(f"--- process {process.pid}, exit code {process.process.returncode}\n{process.log[-4000:]}")

    async def value(self, expression: str, *params: object) -> Any:
        """The value of an expression that says `aioqueue.`."""
        return await self.owner.value(f"SELECT {expression}", *params)

    async def until(self, condition: str, *params: object, alive: Process | None = None) -> None:
        """Wait until a condition of the database holds, while the process lives."""
        async with asyncio.timeout(PATIENCE):
            while not await self.value(condition, *params):
                assert alive is None or alive.process.poll() is None, f"the worker ended:\n{alive.log}"
                await asyncio.sleep(0.02)

    async def enqueue(self, task: str, number: int = 1, *, payload: str = "{}", max_attempts: int = 5) -> list[UUID]:
        """Enqueue jobs of a task; their ids."""
        jobs = [NewJob(id=new_job_id(), task=task, payload=payload, max_attempts=max_attempts) for _ in range(number)]
        await enqueue_many(self.owner.store, self.owner.conn, jobs)
        return [job.id for job in jobs]

    async def command(self, *arguments: str) -> str:
        """Run another command of aioqueue's; what it prints."""
        environ = {**os.environ, "AIOQUEUE_DSN": self.evidence or self.dsn, "AIOQUEUE_SCHEMA": self.schema}
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "aioqueue", *arguments], cwd=ROOT, env=environ, stdout=subprocess.PIPE
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said
        return said.decode()

    async def open_gate(self) -> None:
        await self.owner.rows("INSERT INTO flow.gate VALUES (true)")

    async def until_started(self, number: int) -> None:
        """Wait until jobs have noted so many starts."""
        await self.until("count(*) >= %s FROM flow.note WHERE what = 'start'", number)

    async def until_ended(self, ids: Sequence[UUID]) -> None:
        """Wait until all of these jobs have ended."""
        await self.until("count(*) = %s FROM aioqueue.outcome WHERE job_id = ANY (%s)", len(ids), list(ids))

    async def outcomes(self) -> dict[UUID, tuple[str, int]]:
        """(state, attempt) of every job that has ended."""
        rows = await self.owner.rows("SELECT job_id, state, attempt FROM aioqueue.outcome")
        return {row[0]: (row[1], row[2]) for row in rows}

    async def starts(self) -> dict[UUID, list[int]]:
        """The attempts that each job noted the start of, in order."""
        rows = await self.owner.rows("SELECT job_id, attempt FROM flow.note WHERE what = 'start' ORDER BY at")
        found: dict[UUID, list[int]] = {}
        for job, attempt in rows:
            found.setdefault(job, []).append(attempt)
        return found

    async def reasons(self, job: UUID) -> list[str]:
        """Why each attempt of the job that did not succeed ended."""
        return [reason for _, reason, _ in await self.owner.attempts(job)]


async def reconnect(flow: Flow, dsn: str) -> None:
    """Give the flow a new connection after its server went away."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                flow.owner.conn = await type(flow.owner.conn).connect(dsn, autocommit=True)
            except OperationalError:
                await asyncio.sleep(0.05)
            else:
                return
