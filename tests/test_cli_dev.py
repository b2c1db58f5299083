"""`python -m aioqueue dev` as a real process: the worker starts anew at a change, survives a broken one, ends at Ctrl-C."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioqueue import AioQueue
from aioqueue.cli.dev import reload_worker
from tests.kit import PATIENCE

pytestmark = pytest.mark.anyio
TASKS = """
import os
from aioqueue import AioQueue
app = AioQueue(schema=os.environ["AIOQUEUE_SCHEMA"])

@app.task(name="answer")
async def answer() -> int:
    return {answer}
"""


class Dev:
    """The command, its lines on standard error, and the file that it watches."""

    def __init__(self, directory: Path, dsn: str, schema: str, *arguments: str) -> None:
        self.file = directory / "tasks.py"
        self.write(1)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOQUEUE_", "PG"))}
        path = os.pathsep.join(filter(None, [str(Path.cwd()), kept.get("PYTHONPATH")]))
        # Tests may run under nohup, which the command would heed: it inherits what is ignored.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aioqueue", "dev", "-A", "tasks:app", *arguments],
                cwd=directory,
                env={**kept, "PYTHONPATH": path, "AIOQUEUE_DSN": dsn, "AIOQUEUE_SCHEMA": schema},
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGHUP, before)

    def write(self, answer: object) -> None:
        self.file.write_text(TASKS.replace("{answer}", str(answer)))

    def wait_line(self, part: str) -> str:
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if part in line:
                return line
        raise AssertionError(f"it ended without saying {part!r}: {''.join(said)}")

    def line_of(self, said: list[dict[str, Any]]) -> str:
        """Read one line of JSON; its message."""
        assert self.process.stderr is not None
        said.append(json.loads(self.process.stderr.readline()))
        return str(said[-1]["message"])


@pytest.fixture
def dev(tmp_path: Path, owner_dsn: str, schema: str, request: pytest.FixtureRequest) -> Iterator[Dev]:
    started = Dev(tmp_path, owner_dsn, schema, *getattr(request, "param", ()))
    yield started
    if started.process.poll() is None:
        started.process.terminate()
    started.process.communicate()


async def test_a_change_takes_effect_also_after_one_that_does_not_import(dev: Dev, owner_dsn: str, schema: str) -> None:
    async with AioQueue(owner_dsn, schema=schema) as app:

        async def answer() -> object:
            job = await app.enqueue_by_name("answer", {})
            return await job.result(60)

        dev.wait_line("serves")
        assert await answer() == 1
        dev.write("2 +")
        dev.wait_line("SyntaxError")
        dev.write(3)
        dev.wait_line("serves")
        assert await answer() == 3
    dev.process.send_signal(signal.SIGINT)
    assert dev.process.wait(60) == 0


@pytest.mark.parametrize("dev", [("--log-format", "json")], indirect=True)
async def test_its_lines_and_its_workers_are_json_if_wanted_also_of_what_does_not_import(dev: Dev) -> None:
    said: list[dict[str, Any]] = []

    def until(part: str) -> None:
        while part not in dev.line_of(said):
            pass

    until("serves")
    assert said[-1]["event"] == "WorkerStarted" and said[-1]["worker"]
    dev.write("2 +")
    until("changed")
    assert said[-1]["logger"] == "aioqueue.dev"
    until("SyntaxError")
    assert said[-1]["level"] == "ERROR"
    dev.process.send_signal(signal.SIGINT)
    dev.process.wait(60)


async def test_a_terminal_that_is_closed_ends_both(dev: Dev) -> None:
    dev.wait_line("serves")
    dev.process.send_signal(signal.SIGHUP)
    assert dev.process.wait(60) == 0


async def test_a_signal_while_the_worker_is_started_anew_ends_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    stopping = asyncio.Event()
    create = asyncio.create_subprocess_exec

    async def create_late(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if started:
            os.kill(os.getpid(), signal.SIGINT)
            await stopping.wait()
        started.append(await create(*command, **options))
        return started[-1]

    async def changes() -> AsyncIterator[set[tuple[Any, str]]]:
        yield {(1, "tasks.py")}
        await stopping.wait()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_late)
    try:
        async with asyncio.timeout(PATIENCE):
            await reload_worker([sys.executable, "-c", "import signal; signal.pause()"], changes(), stopping)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


def test_without_an_app_it_says_what_it_needs() -> None:
    ended = subprocess.run([sys.executable, "-m", "aioqueue", "dev"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "-A module:app" in ended.stderr
