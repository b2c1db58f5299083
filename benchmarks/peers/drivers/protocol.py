"""What every Python driver shares: one command a line on stdin, one answer a line on stdout, both JSON.

A driver runs in the environment of its peer and imports nothing else of this repository, and only psycopg besides it.
The commands:

    ["setup"]      make the schema                             {"version", "settings"}
    ["bulk", n]    enqueue n jobs as the peer does in bulk     {"seconds"}
    ["single", n]  enqueue n jobs, awaited one by one          {"seconds", "at": when each was begun}
    ["drain", n]   start a worker, run n jobs, stop            {"seconds", "tenths", "cpu"}
    ["serve"]      start a worker; then {"ran": time} a job    {}
    ["work"]       start a worker, say nothing                 {}
    ["idle"]       what the process holds, and has done        {"rss_mb", "cpu", "runs"}
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from typing import Any

import psycopg

BODY = "x" * 60


def payload(number: int) -> dict[str, Any]:
    """The payload of every job in these benchmarks, distinct for each."""
    return {"to": f"someone{number}@example.org", "n": number, "body": BODY}


class Driver:
    """One peer. Subclasses fill in what is theirs; `ran()` is called by the job itself."""

    left = ""
    """SQL: whether any job is still to be done."""

    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        self.dsn = dsn
        self.options = options
        self.next = 0
        self._marks: list[float] = []
        self._runs = 0
        self._wanted = 0
        self._serving = False
        self._done = asyncio.Event()

    async def setup(self) -> dict[str, str]:
        """Make the schema; {"version", "settings"}: what is compared, as it is configured."""
        raise NotImplementedError

    async def bulk(self, first: int, n: int) -> None:
        """Enqueue jobs `first` to `first + n - 1` in one call where the peer has one."""
        raise NotImplementedError

    async def single(self, number: int) -> None:
        """Enqueue one job."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start a worker in this process."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop it; what it has done is recorded then."""
        raise NotImplementedError

    def ran(self) -> None:
        """A job runs."""
        self._runs += 1
        if self._serving:
            say({"ran": time.time()})
        elif self._wanted and (self._runs == 1 or self._runs * 10 % self._wanted < 10):
            self._marks.append(time.perf_counter())
            if self._runs >= self._wanted:
                self._loop.call_soon_threadsafe(self._done.set)  # some peers run jobs in a loop of their own

    async def drain(self, n: int) -> dict[str, Any]:
        """From the first job's start until none is left in the database."""
        self._runs, self._wanted, self._marks, self._serving = 0, n, [], False
        self._done.clear()
        self._loop = asyncio.get_running_loop()
        cpu = time.process_time()
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as conn:
            await self.start()
            await self._done.wait()
            while True:
                row = await (await conn.execute(self.left)).fetchone()
                if row is None or not row[0]:
                    break
                await asyncio.sleep(0.005)
            end = time.perf_counter()
        cpu = time.process_time() - cpu
        with contextlib.suppress(asyncio.CancelledError):
            await self.stop()
        marks = self._marks
        tenths = [after - before for before, after in itertools.pairwise(marks)]
        return {"seconds": end - marks[0], "tenths": tenths, "cpu": cpu}

    async def answer(self, command: list[Any]) -> dict[str, Any]:
        """Do as one line asks."""
        match command:
            case ["setup"]:
                return dict(await self.setup())
            case ["bulk", n]:
                begin = time.perf_counter()
                await self.bulk(self.next, n)
                self.next += n
                return {"seconds": time.perf_counter() - begin}
            case ["single", n]:
                begin, at = time.perf_counter(), []
                for number in range(self.next, self.next + n):
                    at.append(time.time())
                    await self.single(number)
                self.next += n
                return {"seconds": time.perf_counter() - begin, "at": at}
            case ["drain", n]:
                return await self.drain(n)
            case ["serve"]:
                self._serving = True
                await self.start()
                return {}
            case ["work"]:
                self._wanted = 0
                await self.start()
                return {}
            case ["idle"]:
                return {"rss_mb": rss_mb(), "cpu": time.process_time(), "runs": self._runs}
        raise ValueError(f"unknown command {command}")


def rss_mb() -> float:
    """Resident memory of this process in megabytes."""
    with open(f"/proc/{os.getpid()}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def say(answer: dict[str, Any]) -> None:
    """Write one line to whoever drives this."""
    sys.__stdout__.write(json.dumps(answer) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


async def _serve(make: type[Driver]) -> None:
    driver = make(sys.argv[1], json.loads(sys.argv[2]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = await driver.answer(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(answer)
    os._exit(0)  # whatever the peer still runs


def main(make: type[Driver]) -> None:
    """Run a driver: argv is the DSN and the options as JSON."""
    sys.stdout = sys.stderr  # prints of the peer are no answers
    if json.loads(sys.argv[2]).get("loop") == "uvloop":
        import uvloop  # noqa: PLC0415 - only some environments have it

        uvloop.run(_serve(make))
    else:
        asyncio.run(_serve(make))
