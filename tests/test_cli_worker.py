"""`python -m aioqueue worker` as a real process: draining, signals, stuck jobs, exit codes."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import click
import pytest

from aioqueue.cli.options import address
from tests.kit import session, wait_until_true
from tests.postgres import Database
from tests.sql.engine import Session

TASKS = """
import asyncio, gc, logging, os, time, warnings
from pathlib import Path
from aioqueue import AioQueue, JobContext, LimitSettings

app = AioQueue(schema=os.environ["AIOQUEUE_SCHEMA"], limits=LimitSettings(abandon=0.2))

@app.task(name="add")
async def add(a: int, b: int) -> int:
    return a + b

class Journal:
    "A file that is written out when its object is finalised, which stands in a reference cycle."
    def __init__(self) -> None:
        self.file = open("journal", "w")
        self.write_line = self.write
    def write(self) -> None:
        self.file.write("a line")

journal = Journal()

@app.task(name="out_of_reach")
def out_of_reach() -> tuple[bool, bool]:
    "Whether what was imported, and what a job makes, is walked over by the garbage collector."
    journal.write_line()
    made: list[object] = [object()]
    walked = {id(each) for each in gc.get_objects()}
    return id(app) in walked, id(made) in walked

@app.task(name="until")
async def until(path: str) -> str:
    "Run until somebody writes into this pipe."
    print("started", flush=True)
    return await asyncio.to_thread(Path(path).read_text)

@app.task(name="for_ever")
async def for_ever() -> None:
    print("started", flush=True)
    await asyncio.Event().wait()

@app.task(name="thread")
def thread() -> None:
    "A thread that cannot be stopped."
    print("started", flush=True)
    time.sleep(100_000)

@app.task(name="own_thread")
async def own_thread() -> None:
    "A thread of the task's own, left behind."
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 100_000)

@app.task(name="logs")
def logs() -> None:
    "Logs what is hard to write, as libraries do, from a thread; then fails."
    logging.getLogger("library").warning("two\\nlines, a NUL \\0 and half a pair \\ud800")
    logging.getLogger("library").warning("%d", "wrongly")
    warnings.warn("old")
    raise ValueError("a\\0b\\nc")

@app.task(name="blocks")
async def blocks() -> None:
    "Blocks the event loop for ever."
    print("started", flush=True)
    while True:
        time.sleep(0.01)
"""


class Worker:
    """A worker process; its standard output and error can be waited for, line by line."""

    def __init__(self, directory: Path, environ: dict[str, str], *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aioqueue", "worker", *args],
            cwd=directory,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []

    def wait_started(self) -> None:
        """Wait until a job says that it runs."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "started\n", self.process.communicate()[1]

    def wait_line(self, part: str) -> str:
        """Wait for a line on standard error."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if part in line:
                return line
        raise AssertionError(f"it ended without saying {part!r}: {''.join(self.said)}")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end; its exit code and all that it wrote on standard error."""
        self.said.append(self.process.communicate(timeout=60)[1])
        return self.process.returncode, "".join(self.said)


Start = Callable[..., Worker]
Run = Callable[[Callable[[Session], Awaitable[Any]]], Any]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def start(directory: Path, worker_dsn: str, schema: str) -> Iterator[Start]:
    """A function that starts a worker of the tasks above; killed after the test if need be."""
    started: list[Worker] = []
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("AIOQUEUE_", "PG")) and name != "DATABASE_URL"
    }
    # The package may be a source tree, and the worker stands elsewhere.
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path.cwd()), environ.get("PYTHONPATH")]))

    def run(*args: str, app: str = "tasks:app", dsn: str = worker_dsn) -> Worker:
        started.append(Worker(directory, {**environ, "AIOQUEUE_DSN": dsn, "AIOQUEUE_SCHEMA": schema}, "-A", app, *args))
        return started[-1]

    yield run
    for worker in started:
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.communicate()


@pytest.fixture
def run(worker_dsn: str, schema: str) -> Run:
    """A function that runs a coroutine function on a session as worker."""

    def with_session(steps: Callable[[Session], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            async with session(worker_dsn, schema) as one:
                return await steps(one)

        return asyncio.run(inside())

    return with_session


def facts(run: Run, job_id: UUID) -> tuple[Any, ...]:
    """State, attempt and spared of the job."""

    async def read(one: Session) -> tuple[Any, ...]:
        (row,) = await one.rows("SELECT state, attempt, spared FROM aioqueue.jobs WHERE id = %s", job_id)
        return row

    found: tuple[Any, ...] = run(read)
    return found


def enqueue(run: Run, task: str, payload: str = "{}", **options: Any) -> UUID:
    job_id: UUID = run(lambda one: one.enqueue_one(task=task, payload=payload, **options))
    return job_id


def test_drain_ends_when_nothing_is_ready(start: Start, run: Run) -> None:
    jobs = [enqueue(run, "add", '{"a": 1, "b": 2}') for _ in range(3)]
    elsewhere = enqueue(run, "add", '{"a": 1, "b": 2}', queue="q")
    later = enqueue(run, "add", '{"a": 1, "b": 2}', delay=3600)
    code, said = start("--drain", "-c", "2", "-q", "default,other:3").end()
    assert code == 0, said
    assert [facts(run, job_id) for job_id in jobs] == [("succeeded", 1, 0)] * 3
    assert (facts(run, elsewhere)[0], facts(run, later)[0]) == ("ready", "scheduled")
    assert "serves default, other with 2 jobs at once" in said and "succeeded" not in said
    code, said = start("--drain", "-q", "q", "--log-level", "debug").end()
    assert code == 0 and facts(run, elsewhere)[0] == "succeeded"
    assert f"claimed add {elsewhere} (attempt 1)" in said and f"succeeded add {elsewhere} (attempt 1)" in said


def test_the_garbage_collector_does_not_walk_over_what_was_imported_until_the_end(
    start: Start, run: Run, directory: Path
) -> None:
    job_id = enqueue(run, "out_of_reach")
    code, said = start("--drain").end()
    assert code == 0, said

    async def read(one: Session) -> Any:
        return (await one.rows("SELECT result FROM aioqueue.outcome WHERE job_id = %s", job_id))[0][0]

    assert run(read) == [False, True]
    assert (directory / "journal").read_text() == "a line", "what stands in a cycle is finalised at the exit"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(start: Start, run: Run, directory: Path, number: signal.Signals) -> None:
    os.mkfifo(directory / "pipe")
    job_id = enqueue(run, "until", f'{{"path": "{directory}/pipe"}}')
    worker = start()
    worker.wait_started()
    waiting = enqueue(run, "for_ever", queue="q")
    worker.signal(number)
    worker.wait_line("claiming nothing more")
    after = enqueue(run, "add", '{"a": 1, "b": 2}')
    (directory / "pipe").write_text("go on")
    assert worker.end()[0] == 0
    assert facts(run, job_id) == ("succeeded", 1, 0)
    assert (facts(run, after)[:2], facts(run, waiting)[:2]) == (("ready", 0), ("ready", 0))


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_the_second_signal_hands_back(start: Start, run: Run, loop: str) -> None:
    job_id = enqueue(run, "for_ever")
    worker = start(loop)
    worker.wait_started()
    worker.signal()
    worker.wait_line("claiming nothing more")
    worker.signal(signal.SIGINT)
    code, said = worker.end()
    assert (code, "handing back" in said) == (0, True)
    assert facts(run, job_id) == ("ready", 1, 1)


def test_the_grace_period_ends_by_itself(start: Start, run: Run) -> None:
    job_id = enqueue(run, "for_ever")
    worker = start("--grace", "0")
    worker.wait_started()
    worker.signal()
    assert worker.end()[0] == 0
    assert facts(run, job_id) == ("ready", 1, 1)


@pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])
def test_the_third_signal_exits_although_the_loop_is_blocked(start: Start, run: Run, loop: str) -> None:
    job_id = enqueue(run, "blocks")
    worker = start(loop)
    worker.wait_started()

    # The loop cannot say that it has seen one; equal signals that come together count as one.
    def ended() -> bool:
        worker.signal()
        return worker.process.poll() is not None

    wait_until_true(ended)
    code, said = worker.end()
    assert (code, "third signal" in said) == (1, True)
    assert facts(run, job_id) == ("running", 1, 0), "its lease decides"


def test_a_thread_that_cannot_be_stopped_does_not_hold_up_the_end(start: Start, run: Run) -> None:
    job_id = enqueue(run, "thread")
    worker = start("--grace", "0")
    worker.wait_started()
    worker.signal()
    code, said = worker.end()
    assert code == 1
    assert "exiting without waiting" in said and re.search(r"tasks\.py:\d+ in thread", said)
    assert facts(run, job_id)[0] != "running", "its outcome was written before"


def test_nor_does_one_that_a_task_has_left_behind(start: Start, run: Run) -> None:
    job_id = enqueue(run, "own_thread")
    code, said = start("--drain").end()
    assert (code, "exiting without waiting" in said) == (1, True)
    assert facts(run, job_id)[0] == "succeeded"


def test_json_lines_whatever_is_logged_each_with_its_job(start: Start, run: Run) -> None:
    job = enqueue(run, "logs", tenant="a", queue="q", max_attempts=1)
    worker = start("--drain", "-q", "q", "--log-format", "json", "--log-level", "debug")
    code, said = worker.end()
    assert code == 0
    lines = [json.loads(line) for line in said.splitlines()]
    facts = {"job_id": str(job), "task": "logs", "tenant": "a", "attempt": 1, "queue": "q"}
    of_job = [line for line in lines if line.get("job_id") == str(job)]
    assert all(line[name] == value for line in of_job for name, value in facts.items())
    assert len({line["worker"] for line in of_job}) == 1
    events = [line["event"] for line in of_job if "event" in line]
    assert events == ["JobClaimed", "JobRecorded"]
    messages = [line["message"] for line in of_job if line["logger"] == "library"]
    assert messages == ["two\nlines, a NUL \\x00 and half a pair \\ud800", "'%d' ('wrongly',)"]
    assert [line["level"] for line in of_job if line["logger"] == "py.warnings"] == ["WARNING"]
    (recorded,) = [line for line in of_job if line.get("event") == "JobRecorded"]
    assert recorded["state"] == "dead" and recorded["error"].startswith("ValueError: a")


RESOURCES = """
import contextlib, os
from aioqueue import AioQueue

@contextlib.asynccontextmanager
async def resources(app):
    raise ConnectionError("no such host")
    yield

app = AioQueue(schema=os.environ["AIOQUEUE_SCHEMA"], resources=resources)
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_resources_that_cannot_be_opened(start: Start, directory: Path, form: str) -> None:
    (directory / "broken.py").write_text(RESOURCES)
    code, said = start("--log-format", form, app="broken:app").end()
    assert code == 1
    text = said.splitlines()[-1] if form == "console" else json.loads(said.splitlines()[-1])["message"]
    assert text.removeprefix("error: ") == (
        "the worker's resources could not be opened: ConnectionError: no such host (-v shows where)"
    )


def test_a_missing_schema(start: Start, fresh_database: Callable[[], Database], schema: str) -> None:
    database = fresh_database()
    code, said = start("--drain", dsn=database.dsn("owner")).end()
    option = "" if schema == "aioqueue" else f" --schema {shlex.quote(schema)}"
    assert (code, said.count("\n")) == (3, 1)
    assert said.endswith(f"run python -m aioqueue migrate{option}\n")
    code, said = start("--drain", "--migrate", dsn=database.dsn("owner")).end()
    assert code == 0, said
    assert start("--drain", dsn=database.dsn("owner")).end()[0] == 0


def test_a_wrong_name(start: Start) -> None:
    for wrong in ("tasks:application", "task:app"):
        code, said = start(app=wrong).end()
        assert (code, said.count("\n"), "did you mean tasks:app?" in said) == (2, 1, True)


def test_an_unreachable_database(start: Start) -> None:
    code, said = start("--start-timeout", "0", dsn="postgresql://127.0.0.1:1/none").end()
    assert (code, said.count("\n"), "cannot reach the database" in said) == (1, 1, True)


def test_a_signal_while_it_connects(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worker = start(dsn=f"postgresql://127.0.0.1:{silent.getsockname()[1]}/none")
        with silent.accept()[0]:
            worker.signal()
            assert worker.end()[0] == 0


def test_wait_prints_the_result_of_another_process(start: Start, run: Run, directory: Path, client_dsn: str, schema: str) -> None:
    worker = start()
    worker.wait_line("serves")
    environ = {**os.environ, "AIOQUEUE_DSN": client_dsn, "AIOQUEUE_SCHEMA": schema}

    def enqueued(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aioqueue", "enqueue", *args, "--wait", "60"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    done = enqueued("add", '{"a": 1, "b": 2}')
    job_id, result = done.stdout.splitlines()
    assert (done.returncode, result, facts(run, UUID(job_id))[0]) == (0, "3", "succeeded")
    done = enqueued("add", '{"a": 1, "b": "x"}')
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr.count("\n")) == (1, 1, 1)
    assert "is dead" in done.stderr
    worker.signal()
    assert worker.end()[0] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [("8080", ("127.0.0.1", 8080)), ("192.0.2.1:0", ("192.0.2.1", 0)), ("[::1]:9", ("::1", 9)), ("host:65535", ("host", 65535))],
)
def test_where_probes_are_answered(given: str, expected: tuple[str, int]) -> None:
    assert address(None, None, given) == expected


@pytest.mark.parametrize("given", ["", "host", "65536", "::1:9", "host:", "-1", "8080:host", "²"])
def test_an_address_that_is_none_is_refused_with_what_is_expected(given: str) -> None:
    with pytest.raises(click.BadParameter, match="expected PORT or HOST:PORT"):
        address(None, None, given)
