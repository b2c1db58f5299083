"""Worker processes of the tests: started by the command line as users do, watched through the database, killed at the end."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection, OperationalError

from aioqueue.job import new_job_id
from benchmarks.mixed_jobs import NewJob, enqueue_many
from tests.kit import PATIENCE, until_true
from tests.sql.engine import Session

ROOT = Path(__file__).parents[2]

TABLES = """
CREATE SCHEMA flow;
CREATE TABLE flow.note (job_id uuid NOT NULL, attempt integer NOT NULL, pid integer NOT NULL, what text NOT NULL,
                        at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE flow.counted (job_id uuid NOT NULL);
GRANT USAGE ON SCHEMA flow TO aioqueue_worker;
GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA flow TO aioqueue_worker;
"""


class Process:
    """One worker process; `log` is what it wrote, which the test's loop reads as it comes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process = process
        self._output = process.stdout.fileno()
        self._wrote = bytearray()
        self._more = asyncio.Event()
        self._over = False
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self._over:
                said = os.read(self._output, 65536)
                self._wrote += said
                if not said:  # it has ended
                    self._over = True
                    self._loop.remove_reader(self._output)
        self._more.set()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        self._read()
        return self._wrote.decode(errors="replace")

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
                assert not self._over, f"the process ended:\n{self.log}"
                self._more.clear()
                await self._more.wait()

    async def ended(self) -> int:
        """Wait until it has ended by itself; its exit code."""
        async with asyncio.timeout(PATIENCE):
            return await self.end()

    async def end(self) -> int:
        """The same, however long that takes."""
        while not self._over:
            self._more.clear()
            await self._more.wait()
        return self.process.wait(10)

    def close(self) -> None:
        """End it, whatever it does, and print what it wrote: pytest shows it where the test failed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        print(f"--- process {self.pid}, exit code {self.process.returncode}\n{self.log[-4000:]}")
        self._over = True
        self._loop.remove_reader(self._output)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Gate:
    """What tasks wait at that are to be caught in the middle, in any process: a socket that is listened on until it is open.

    It knows of no database, which a test may break. Nobody is answered: at the end of the listener all who wait are cut off.
    """

    def __init__(self) -> None:
        self._home = tempfile.mkdtemp(prefix="aioqueue-gate-", dir="/tmp")
        self.path = f"{self._home}/gate"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1000)

    def open(self) -> None:
        """Let everybody go on, those too who come later."""
        shutil.rmtree(self._home, ignore_errors=True)
        self._listener.close()


@dataclass
class Flow:
    """A database, the worker processes on it, and questions about both; only a hang meets the limit."""

    owner: Session
    dsn: str
    schema: str
    evidence: str | None = None
    """Where tasks note what they do, when it is not `dsn`, which a test may break."""
    processes: list[Process] = field(default_factory=list)
    gate: Gate = field(default_factory=Gate)

    def run(self, *arguments: str, dsn: str | None = None, **settings: float | None) -> Process:
        """Start a process of Python with these arguments, on `dsn` (the flow's), with settings of tests/flow/tasks.py."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_", "FLOW_"))}
        environ |= {
            "AIOQUEUE_DSN": dsn or self.dsn,
            "AIOQUEUE_SCHEMA": self.schema,
            "PYTHONUNBUFFERED": "1",
            "FLOW_GATE": self.gate.path,
        }
        environ |= {f"FLOW_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
        if self.evidence is not None:
            environ["FLOW_EVIDENCE"] = self.evidence
        started = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        self.processes.append(Process(started))
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

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.close()
        self.gate.open()

    async def value(self, expression: str, *params: object) -> Any:
        """The value of an expression that says `aioqueue.`."""
        return await self.owner.value(f"SELECT {expression}", *params)

    async def until(self, condition: str, *params: object, alive: Process | None = None) -> None:
        """Wait until a condition of the database holds, while the process lives."""

        async def holds() -> Any:
            assert alive is None or alive.process.poll() is None, f"the worker ended:\n{alive.log}"
            return await self.value(condition, *params)

        await until_true(holds)

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

    @asynccontextmanager
    async def restarting(self, start: Callable[[], Awaitable[Process]], number: int = 1) -> AsyncIterator[list[Process]]:
        """So many workers, each of which is started again when it ends, as a supervisor does; those of now."""
        workers = [await start() for _ in range(number)]

        async def restart(place: int) -> None:
            while True:
                await workers[place].end()
                workers[place] = await start()

        async with asyncio.TaskGroup() as group:
            supervisors = [group.create_task(restart(place)) for place in range(number)]
            yield workers
            for supervisor in supervisors:
                supervisor.cancel()

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

    async def connected() -> AsyncConnection[Any] | None:
        with contextlib.suppress(OperationalError):
            return await AsyncConnection.connect(dsn, autocommit=True)
        return None

    flow.owner.conn = await until_true(connected)
