"""Runs the blocks of one page in their order, as a reader would: on a real server, in a directory with the page's files.

A fragment may use what the README's `tasks.py` has, and what given.py gives it. One that names `tx` or `ctx` is run inside a job.
"""

import asyncio
import configparser
import contextlib
import dis
import fcntl
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import tomllib
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import psycopg
import yaml

from aioqueue import AioQueue, JobContext, JobTransaction, embedded
from tests.documents.pages import Block
from tests.postgres import Database

Names = dict[str, Any]

PATIENCE = 60.0
"""Seconds after which a wait is a failure."""
ROLES = {"my_owner": "owner", "owner": "owner", "my_worker": "worker", "worker": "worker", "my_web": "client"}
"""What the pages call the roles, and whose rights they have."""
DSN = re.compile(r"postgresql(\+\w+)?://(?:…|(\w+)@[\w.,]+(?::\d+)?/app)(?:\?([\w=-]+))?")
PORT = re.compile(r"\b8080\b")
LASTING = re.compile(r"\baioqueue (?:\S+ )*?(?:worker|dev)\b(?!.*--drain)|\buvicorn\b")
"""A command that goes on until it is stopped."""


class PageRun:
    """One page, its database, its directory, and the names that its fragments have so far."""

    def __init__(self, database: Database, directory: Path, names: Names) -> None:
        self.database = database
        self.directory = directory
        self.names = names
        self.opened = contextlib.AsyncExitStack()
        self.jobs = 0
        self.port = free_port()
        self.said: dict[str, str] = {}
        """What programs among the page's files have printed."""

    def real(self, text: str, quote: Callable[[str], str] = str) -> str:
        """Put this database in the place of the pages' one."""

        def dsn(found: re.Match[str]) -> str:
            uri = self.database.dsn(ROLES[found[2] or "worker"]) + (f"&{found[3]}" if found[3] else "")
            return quote(uri.replace("postgresql://", f"postgresql{found[1] or ''}://"))

        text = re.sub(r"\bDATABASE app\b", f"DATABASE {self.database.name}", DSN.sub(dsn, text))
        return PORT.sub(str(self.port), text)

    async def run(self, block: Block) -> None:
        """Run a block, or see that it is an exception."""
        if not block.runs:
            return
        if block.file is not None:
            path = self.directory / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.real(block.text))
            if block.language != "python":
                self.parse(block)
            elif "asyncio.run(" in block.text:
                self.said[block.file] = await ended(await self.start(f"python {block.file}"), block)
            return
        if block.language == "python":
            await self.python(block)
        elif block.language == "sql":
            await self.sql(block.text)
        elif block.language == "bash":
            await self.shell(block)
        else:
            self.parse(block)

    def parse(self, block: Block) -> None:
        """Read data of a format: it must at least be well-formed."""
        match block.language:
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "yaml":
                assert list(yaml.safe_load_all(block.text))
            case "ini":
                parser = configparser.ConfigParser(strict=False, interpolation=None)
                parser.read_string(block.text if block.text.startswith("[") else f"[section]\n{block.text}")
                assert parser.sections()
            case "sql":
                pass  # a file that another block runs
            case _:
                raise AssertionError(f"{block}: nothing checks this language; see NOT_CODE")

    async def python(self, block: Block) -> None:
        """Run a fragment in the page's namespace: inside a job of tenant 42 where it names `ctx` or `tx`."""
        code = compile(self.real(block.text), str(block), "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT)
        wanted = taken(code)
        app = self.names["app"]
        if wanted.isdisjoint({"ctx", "tx"}):
            await self.open_apps()
            await self.evaluate(code)
            return

        async def with_context(ctx: JobContext) -> None:
            self.names["ctx"] = ctx
            await self.evaluate(code)

        async def with_transaction(tx: JobTransaction) -> None:
            self.names["tx"] = tx
            await self.evaluate(code)

        self.jobs += 1
        task = app.task(name=f"fragment {self.jobs}")(with_context if "ctx" in wanted else with_transaction)
        await self.open_apps()
        await self.finished(task.options(tenant="42", max_attempts=1))

    async def evaluate(self, code: CodeType) -> None:
        awaitable = eval(code, self.names)  # noqa: S307 - the project's own pages
        if inspect.isawaitable(awaitable):
            async with asyncio.timeout(PATIENCE):
                await awaitable

    async def finished(self, task: Any, *arguments: Any) -> Any:
        """Enqueue a job and run it; its result."""
        app = self.names["app"]
        await self.open_apps()
        job = await task.enqueue(*arguments)
        async with app.worker():
            return await job.result(timeout=PATIENCE)

    async def open_apps(self) -> None:
        """Open the apps that the page has made so far."""
        for value in [value for value in self.names.values() if isinstance(value, AioQueue)]:
            if not value.is_open:
                await self.opened.enter_async_context(value)

    async def sql(self, text: str, role: str | None = None) -> None:
        """Execute statements as the owner; those about roles as an administrator."""
        role = role or ("superuser" if re.search(r"\bROLE\b|pg_terminate_backend", text) else "owner")
        async with await psycopg.AsyncConnection.connect(self.database.dsn(role), autocommit=True) as conn:
            await conn.execute(self.real(text).encode())

    async def shell(self, block: Block) -> None:
        """Run commands, each of which must succeed; one that goes on for ever is stopped by a signal at the end."""
        text = self.real(block.text, quote=shlex.quote)
        if LASTING.search(text):
            process = await self.start(f"exec {text}")
            async with asyncio.timeout(PATIENCE):
                said = await working(process)
            self.opened.push_async_callback(stopped, process, block, said)
        else:
            await ended(await self.start(text), block)

    async def pytest(self, page: str) -> None:
        """Run the page's tests, where it has some."""
        if list(self.directory.glob("test_*.py")):
            await ended(await self.start("python -m pytest -q -p no:cacheprovider -p no:randomly"), page)

    async def start(self, text: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", text, cwd=self.directory, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={
                "PATH": os.environ["PATH"], "HOME": str(self.directory), "AIOQUEUE_DSN": self.database.dsn("worker"),
                "AIOQUEUE_TEST_DSN": self.database.server.dsn("superuser", "postgres"),
            },
        )  # fmt: skip


def remove_embedded_data() -> None:
    """Wait until the embedded server of this directory has ended, and remove its data."""
    directory = embedded.default_data_dir()
    if (directory / "keeper.lock").exists():
        os.close(embedded.hold(directory / "keeper.lock", fcntl.LOCK_EX))  # the keeper's, for as long as the server runs
    shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def ended(process: asyncio.subprocess.Process, what: object, said: str = "") -> str:
    """Wait until a command has ended well; what it has said."""
    async with asyncio.timeout(PATIENCE):
        said += (await process.communicate())[0].decode()
    assert process.returncode == 0, f"{what} ended with {process.returncode}:\n{said}"
    return said


async def stopped(process: asyncio.subprocess.Process, block: Block, said: str) -> None:
    """Stop a worker or a server as a supervisor does; it must end well."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    await ended(process, block, said)


async def working(process: asyncio.subprocess.Process) -> str:
    """Wait until a worker or a server has said that it works; what it has said."""
    assert process.stdout is not None
    said = ""
    while line := (await process.stdout.readline()).decode():
        said += line
        if re.search(r"worker \d+ serves|Uvicorn running on", line):
            return said
    raise AssertionError(f"it ended before it worked:\n{said}")


def taken(code: CodeType) -> set[str]:
    """The names that a fragment takes from outside: read at its top level, and not written there."""
    steps = list(dis.get_instructions(code))
    read = {step.argval for step in steps if step.opname == "LOAD_NAME"}
    return read - {step.argval for step in steps if step.opname == "STORE_NAME"}
