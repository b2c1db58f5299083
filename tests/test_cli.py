"""The command line in this process: what it prints, its exit codes, which rights it needs. Signals: test_cli_worker.py."""

import asyncio
import dataclasses
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.sql import SQL, Identifier

from aioqueue import AioQueue, embedded, events, migrate
from aioqueue.cli import job as job_module
from aioqueue.cli import output
from aioqueue.cli.failure import Misuse
from aioqueue.cli.loading import load_app
from aioqueue.cli.main import cli
from aioqueue.cli.output import print_table, shorten
from aioqueue.eventlog import EventLog, describe
from aioqueue.events import Event, JobAbandoned, JobClaimed, JobRecorded, OfJob, WorkerStopped
from aioqueue.lines import age
from aioqueue.migrate import code_version, script
from aioqueue.rights import grants
from aioqueue.sql import Migration, migrations, quote_schema
from tests.kit import session, wait_until_true
from tests.postgres import Database
from tests.sql.engine import Session, entry, progress

T = TypeVar("T")


class Said(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Said]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, schema: str) -> Call:
    """A function that runs a command in an empty directory, with no database named but the given one."""
    for name in list(os.environ):
        if name.startswith(("AIOQUEUE_", "PG")) or name == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AIOQUEUE_SCHEMA", schema)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*args: object, dsn: str | None = None) -> Said:
        capsys.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            if dsn is not None:
                patch.setenv("AIOQUEUE_DSN", dsn)
            cli([str(arg) for arg in args], prog_name="aioqueue")
        written = capsys.readouterr()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, written.out, written.err)

    return run


@pytest.fixture
def prepare(worker_dsn: str, schema: str) -> Callable[[Callable[[Session], Awaitable[T]]], T]:
    """A function that runs a coroutine function on a session as worker."""

    def run(steps: Callable[[Session], Awaitable[T]]) -> T:
        async def inside() -> T:
            async with session(worker_dsn, schema) as one:
                return await steps(one)

        return asyncio.run(inside())

    return run


Prepare = Callable[[Callable[[Session], Awaitable[Any]]], Any]


async def one_of_each(one: Session) -> dict[str, UUID]:
    """A job in every state; the dead one's message has two lines."""
    await one.register(tasks=[{"name": "t", "queue": "default", "priority": 0, "max_attempts": 5}])
    running, done, dead = await one.enqueue(3, tenant="a")
    worker = await one.register()
    jobs = {job.job_id: job for job in await one.claim(worker)}
    failure = entry(jobs[dead], "error", t="ValueError", m="broken\nin two", b="Traceback: here\n")
    await one.record(worker, entry(jobs[done], r={"total": 3}), failure)
    await one.store.report(one.conn, json.dumps([progress(jobs[running], 0.4, m="page 4 of 10")]))
    cancelled = await one.enqueue_one()
    await one.cancel(cancelled)
    ready = await one.enqueue_one(tenant="b", priority=1, payload=json.dumps({"text": "long " * 100}))
    return {
        "running": running, "succeeded": done, "dead": dead, "cancelled": cancelled, "ready": ready,
        "scheduled": await one.enqueue_one(delay=3600),
    }  # fmt: skip


# -- migrate --------------------------------------------------------------------------------------------------------------


LATER = Migration(code_version() + 1, 1, "later", "SELECT 1;")


def test_migrate_status_sql_and_grants(
    call: Call, fresh_database: Callable[[], Database], schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = fresh_database()
    owner, worker, client = (database.dsn(role) for role in ("owner", "worker", "client"))
    said = call("migrate", "--status", "--json", dsn=owner)
    assert (said.code, said.json["version"], said.json["fits"]) == (3, 0, False)
    said = call("migrate", "--sql", dsn=owner)
    assert (said.code, said.out.strip()) == (0, script(schema=schema).strip())
    assert call("migrate", "--status", dsn=owner).code == 3, "it was only printed"
    assert "version 0 → " in call("migrate", dsn=owner).out
    assert "nothing to do" in call("migrate", dsn=owner).out
    said = call("migrate", "--status", dsn=owner)
    assert (said.code, "nothing is pending" in said.out) == (0, True)
    nothing = f"-- schema {quote_schema(schema)} is at version {code_version()}: nothing to do\n"
    assert call("migrate", "--sql", dsn=owner).out == nothing

    said = call("status", dsn=worker)
    assert (said.code, "--grants ROLE" in said.err) == (3, True)
    said = call("migrate", "--sql", "--grants", "aioqueue_worker", dsn=owner)
    assert said.out.strip() == grants(role="aioqueue_worker", schema=schema)
    assert call("status", dsn=worker).code == 3, "it was only printed"
    assert call("migrate", "--grants", "aioqueue_worker", dsn=owner).code == 0
    assert call("migrate", "--grants", "aioqueue_client", "--as", "client", dsn=owner).code == 0
    assert call("status", dsn=worker).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "migrations", lambda: (*migrations(), LATER))
        said = call("migrate", "--sql", dsn=owner)
    assert grants(role="aioqueue_worker", schema=schema) in said.out, "as migrate itself gives them"
    assert grants(role="aioqueue_client", schema=schema, kind="client") in said.out
    said = call("job", "list", dsn=client)
    assert (said.code, said.err.count("\n"), "permission denied" in said.err, "--as client" in said.err) == (1, 1, True, True)


def test_migrate_as_a_role_that_may_not(call: Call, fresh_database: Callable[[], Database]) -> None:
    said = call("migrate", dsn=fresh_database().dsn("worker"))
    assert (said.code, said.err.count("\n"), "the owner migrates" in said.err) == (1, 1, True)


def test_grants_need_a_schema_and_a_role(call: Call, fresh_database: Callable[[], Database]) -> None:
    owner = fresh_database().dsn("owner")
    said = call("migrate", "--grants", "aioqueue_worker", dsn=owner)
    assert (said.code, "python -m aioqueue migrate" in said.err) == (3, True)
    call("migrate", dsn=owner)
    said = call("migrate", "--grants", "nobody_here", dsn=owner)
    assert (said.code, said.err.count("\n"), "nobody_here" in said.err, "CREATE ROLE" in said.err) == (1, 1, True, True)


def test_sql_without_a_database(call: Call, schema: str) -> None:
    said = call("migrate", "--sql")
    assert (said.code, said.out.strip()) == (0, script(schema=schema).strip())


def test_options_that_exclude_each_other(call: Call) -> None:
    assert call("migrate", "--status", "--sql").code == 2
    assert call("migrate", "--json").code == 2
    assert call("job", "list", "--state", "dead", "--before", uuid4()).code == 2


# -- where the database is ------------------------------------------------------------------------------------------------


def test_a_missing_schema_is_named_with_the_command(call: Call, fresh_database: Callable[[], Database], schema: str) -> None:
    said = call("status", dsn=fresh_database().dsn("owner"))
    option = "" if schema == "aioqueue" else f" --schema {shlex.quote(schema)}"
    assert (said.code, said.out, said.err.count("\n")) == (3, "", 1)
    assert said.err.endswith(f"run python -m aioqueue migrate{option}\n")


def test_an_unreachable_database_is_one_line(call: Call) -> None:
    said = call("status", dsn="postgresql://127.0.0.1:1/none")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "cannot reach the database" in said.err and "--dsn" in said.err
    assert "Traceback" in call("status", "-v", dsn="postgresql://127.0.0.1:1/none").err


def test_options_before_and_after_the_command(call: Call, worker_dsn: str, schema: str) -> None:
    nowhere = "postgresql://127.0.0.1:1/none"
    assert call("--dsn", worker_dsn, "status", dsn=nowhere).code == 0
    assert call("status", "--dsn", worker_dsn, dsn=nowhere).code == 0
    assert call("--dsn", nowhere, "job", "--dsn", nowhere, "list", "--dsn", worker_dsn).code == 0
    assert call("status", "--schema", "elsewhere", dsn=worker_dsn).code == 3
    assert call("--schema", "elsewhere", "status", "--schema", schema, dsn=worker_dsn).code == 0


def test_a_wrong_dsn_and_none_are_wrong_calls(call: Call) -> None:
    assert call("status", dsn="nonsense").code == 2
    said = call("status")
    assert (said.code, "AIOQUEUE_DSN" in said.err) == (2, True)
    assert not Path(".aioqueue").exists(), "to look is not to make one"


@pytest.fixture
def embedded_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for the embedded server that its user can reach, taken for the default one; gone once it has stopped."""
    if not embedded.available():
        pytest.skip("the extra 'embedded' is not installed")
    home = Path(tempfile.mkdtemp(prefix="aioqueue-test-", dir="/tmp"))
    home.chmod(0o711)
    monkeypatch.setattr(embedded, "default_data_dir", lambda: home / "data")
    yield home / "data"
    wait_until_true(lambda: not (home / "data" / "pgdata" / "postmaster.pid").exists())
    shutil.rmtree(home)


def test_the_embedded_server(call: Call, embedded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOQUEUE_SCHEMA")
    said = call("status")
    assert (said.code, str(embedded_dir) in said.err, embedded_dir.exists()) == (2, True, False)
    assert "CREATE TABLE" in call("migrate", "--sql").out and not embedded_dir.exists()
    assert call("migrate").code == 0
    assert call("status", "--json").json["queues"] == [], "as the worker's role, with its rights"
    assert "no task is named 't'" in call("enqueue", "t").err


# -- the app --------------------------------------------------------------------------------------------------------------

APP = """
import os
from aioqueue import AioQueue, embedded, events
app = AioQueue(os.environ.get("APP_DSN"), schema=os.environ["AIOQUEUE_SCHEMA"])
other = 3
@app.task(name="add")
async def add(a: int, b: int) -> int:
    return a + b
@app.task(name="for_a_tenant", require_tenant=True)
async def for_a_tenant() -> None:
    pass
"""


@pytest.fixture
def module(call: Call, tmp_path: Path) -> str:
    """An importable module with an app, of a new name each."""
    assert call
    name = f"tasks_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(APP)
    return name


def test_the_app_is_found_and_wrong_names_are_answered_with_the_near_one(module: str, tmp_path: Path) -> None:
    assert isinstance(load_app(f"{module}:app"), AioQueue)
    assert load_app(module) is load_app(f"{module}:app")
    for wrong in (f"{module}:ap", f"{module}:queue", f"{module}:other", f"{module}:add", f"{module}:AioQueue"):
        with pytest.raises(Misuse, match=f"did you mean {module}:app"):
            load_app(wrong)
    with pytest.raises(Misuse, match=f"no module '{module[:-1]}'; did you mean {module}:app"):
        load_app(f"{module[:-1]}:app")
    with pytest.raises(Misuse, match="there is no module"):
        load_app("nowhere.at.all:app")
    for wrong in (":app", "tasks:", ""):
        with pytest.raises(Misuse, match="expected module:attribute"):
            load_app(wrong)
    (tmp_path / f"{module}_empty.py").write_text("")
    with pytest.raises(Misuse, match="no AioQueue at all"):
        load_app(f"{module}_empty:app")


def test_a_module_that_fails_to_import(call: Call, tmp_path: Path) -> None:
    (tmp_path / "broken_tasks.py").write_text("import no_such_dependency")
    said = call("worker", "-A", "broken_tasks:app")
    assert (said.code, said.err.count("\n"), "no_such_dependency" in said.err) == (1, 1, True)
    assert "broken_tasks.py" in call("worker", "-v", "-A", "broken_tasks:app").err


def test_the_apps_database_counts_before_the_environments(
    call: Call, module: str, worker_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_DSN", worker_dsn)
    assert call("status", "-A", f"{module}:app", dsn="postgresql://127.0.0.1:1/none").code == 0
    said = call("enqueue", "add", "-A", f"{module}:app", "--dsn", "postgresql://127.0.0.1:1/none")
    assert (said.code, "has a DSN of its own" in said.err) == (2, True)
    said = call("enqueue", "add", "-A", f"{module}:app", "--schema", "elsewhere")
    assert (said.code, "has schema" in said.err) == (2, True)


def test_worker_without_an_app(call: Call) -> None:
    said = call("worker")
    assert (said.code, "-A module:app" in said.err) == (2, True)


# -- jobs -----------------------------------------------------------------------------------------------------------------


def test_list(call: Call, worker_dsn: str, prepare: Prepare) -> None:
    jobs = prepare(one_of_each)
    said = call("job", "list", "--json", dsn=worker_dsn)
    assert {UUID(found["id"]): found["state"] for found in said.json} == {job_id: state for state, job_id in jobs.items()}
    for state, job_id in jobs.items():
        said = call("job", "list", "--state", state, "--json", dsn=worker_dsn)
        assert [UUID(found["id"]) for found in said.json] == [job_id]
    assert len(call("job", "list", "--limit", 2, "--json", dsn=worker_dsn).json) == 2
    assert len(call("job", "list", "--tenant", "a", "--json", dsn=worker_dsn).json) == 3
    said = call("job", "list", "--state", "dead", dsn=worker_dsn)
    lines = said.out.splitlines()
    assert (len(lines), lines[0].split()[0], lines[1].endswith("ValueError: broken in two")) == (2, "ID", True)
    assert " 1/5 " in lines[1]
    assert call("job", "list", "--task", "none", dsn=worker_dsn).out == "no such job\n"


EVIL = "e\x1b[31mvil\u202e\x9b1A\nfake  line"
"""A tenant's name that somebody has enqueued with."""


def test_a_terminal_acts_on_nothing_that_jobs_hold(call: Call, worker_dsn: str, prepare: Prepare) -> None:
    async def steps(one: Session) -> UUID:
        job_id = await one.enqueue_one(task="send", tenant=EVIL, payload=json.dumps({"text": EVIL}))
        (job,) = await one.claim(await one.register(), 1)
        await one.record(job.worker, entry(job, "error", s=False, d=None, y="ValueError", m=EVIL))
        await one.enqueue_one(task="send", tenant=EVIL)
        return job_id

    job_id = prepare(steps)
    shown = r"e\x1b[31mvil\u202e\x9b1A\nfake  line"
    assert call("tenant", "set", EVIL, "--pause", dsn=worker_dsn).out == f"tenant {shown}: paused\n"
    outputs = [
        call(*command, dsn=worker_dsn).out
        for command in (["job", "list"], ["status"], ["tenant", "list"], ["job", "show", job_id], ["job", "list", "--json"])
    ]
    for out in outputs:
        assert all(char.isprintable() or char == "\n" for char in out)
        assert not re.search("^fake", out, re.MULTILINE)
    assert all(shown in out for out in outputs[:3])
    assert json.loads(outputs[4])[0]["tenant"] == EVIL, "JSON says it as it is"


def test_list_says_where_it_stopped(call: Call, worker_dsn: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "WINDOW", 2)

    async def steps(one: Session) -> list[UUID]:
        return [await one.enqueue_one(id=UUID(int=1), task="rare"), *await one.enqueue(2)]

    rare, *newer = prepare(steps)
    said = call("job", "list", "--task", "rare", dsn=worker_dsn)
    assert (said.out, f"--before {min(newer)}" in said.err) == ("no such job\n", True)
    said = call("job", "list", "--task", "rare", "--before", min(newer), "--json", dsn=worker_dsn)
    assert [UUID(found["id"]) for found in said.json] == [rare]
    assert said.err == ""


def test_show(call: Call, worker_dsn: str, prepare: Prepare) -> None:
    jobs = prepare(one_of_each)
    said = call("job", "show", jobs["succeeded"], dsn=worker_dsn)
    assert 'result:       {"total": 3}' in said.out
    said = call("job", "show", jobs["dead"], dsn=worker_dsn)
    assert "ValueError: broken in two" in said.out and "Traceback" not in said.out
    assert "progress:     40%, page 4 of 10\n" in call("job", "show", jobs["running"], dsn=worker_dsn).out
    for option in ("--traceback", "-v"):
        assert "    Traceback: here\n" in call("job", "show", jobs["dead"], option, dsn=worker_dsn).out
    found = call("job", "show", jobs["dead"], "--json", dsn=worker_dsn).json
    assert (found["state"], found["attempts"][0]["error_message"]) == ("dead", "broken\nin two")
    short = call("job", "show", jobs["ready"], dsn=worker_dsn).out
    assert "…" in short and max(map(len, short.splitlines())) <= 100
    assert json.dumps({"text": "long " * 100}) in call("job", "show", jobs["ready"], "--full", dsn=worker_dsn).out
    said = call("job", "show", uuid4(), dsn=worker_dsn)
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert call("job", "show", "17", dsn=worker_dsn).code == 2


def test_show_as_client(call: Call, client_dsn: str, worker_dsn: str, prepare: Prepare) -> None:
    jobs = prepare(one_of_each)
    for state, job_id in jobs.items():
        said = call("job", "show", job_id, dsn=client_dsn)
        assert (said.code, said.err) == (0, "")
        shown = call("job", "show", job_id, dsn=worker_dsn).out.splitlines()
        assert said.out.splitlines() == [line for line in shown if not line.startswith("payload:")], state
    assert call("job", "show", jobs["succeeded"], "--json", dsn=client_dsn).json["result"] == {"total": 3}
    assert call("job", "show", uuid4(), dsn=client_dsn).code == 1


def test_attempts_are_those_that_count(call: Call, worker_dsn: str, prepare: Prepare) -> None:
    async def steps(one: Session) -> UUID:
        job_id = await one.enqueue_one(max_attempts=2)
        worker = await one.register()
        await one.record(worker, entry(await one.claim_one(worker), "interrupted", d=0, s=True, m="stopped"))
        await one.record(worker, entry(await one.claim_one(worker), "error", t="ValueError", m="word " * 60))
        return job_id

    job_id = prepare(steps)
    said = call("job", "show", job_id, dsn=worker_dsn)
    assert "attempts:     1 of 2, and 1 not held against it\n" in said.out
    assert max(map(len, said.out.splitlines())) <= 100
    assert said.out.count("word") == 2 * 60, "wrapped, not cut: the reason and the attempt"
    assert re.search(r"^attempt 2: +\S+ \S+[+-]\d\d:\d\d, error\n {14}ValueError: word", said.out, re.MULTILINE)
    assert " 1/2 " in call("job", "list", dsn=worker_dsn).out


def test_cancel_and_retry_as_client(call: Call, client_dsn: str, worker_dsn: str, prepare: Prepare) -> None:
    jobs = prepare(one_of_each)
    unknown = uuid4()
    said = call("job", "cancel", *jobs.values(), unknown, dsn=client_dsn)
    after = {**jobs, "unknown": unknown}
    ended = {"ready": "cancelled", "scheduled": "cancelled"}
    assert said.out.splitlines() == [f"{job_id} {ended.get(state, state)}" for state, job_id in after.items()]
    assert said.code == 1
    assert call("job", "cancel", jobs["ready"], dsn=client_dsn).code == 0

    said = call("job", "retry", jobs["dead"], dsn=client_dsn)
    assert said.code == 0
    found = call("job", "show", said.out.strip(), "--json", dsn=worker_dsn).json
    assert (UUID(found["retry_of"]), found["state"], found["tenant"]) == (jobs["dead"], "ready", "a")
    said = call("job", "retry", jobs["running"], unknown, jobs["cancelled"], dsn=client_dsn)
    assert (said.code, len(said.out.splitlines()), len(said.err.splitlines())) == (1, 1, 2)


# -- enqueue --------------------------------------------------------------------------------------------------------------


def test_enqueue_by_the_names_that_workers_left(call: Call, client_dsn: str, worker_dsn: str, prepare: Prepare) -> None:
    prepare(one_of_each)
    options = ("--tenant", "x", "--queue", "q", "--priority", "-1", "--delay", "60", "--max-attempts", "2")
    said = call("enqueue", "t", '{"a": 1}', *options, dsn=client_dsn)
    assert said.code == 0
    found = call("job", "show", said.out.strip(), "--json", dsn=worker_dsn).json
    facts = [found[name] for name in ("task", "tenant", "queue", "priority", "max_attempts", "state", "payload")]
    assert facts == ["t", "x", "q", -1, 2, "scheduled", {"a": 1}]

    async def steps(one: Session) -> None:
        await one.register(tasks=[{"name": "mail.send", "queue": "default", "priority": 0, "max_attempts": 5}])

    prepare(steps)
    for wrong in ("mail.sent", "sent"):
        said = call("enqueue", wrong, dsn=client_dsn)
        assert (said.code, "did you mean 'mail.send'?" in said.err) == (2, True)


def test_enqueue_validates_with_the_app(call: Call, module: str, client_dsn: str) -> None:
    assert call("enqueue", "-A", f"{module}:app", "add", '{"a": 1, "b": 2}', dsn=client_dsn).code == 0
    said = call("enqueue", "-A", f"{module}:app", "add", '{"a": 1}', dsn=client_dsn)
    assert (said.code, said.out, "'b'" in said.err) == (2, "", True)


def test_enqueue_without_the_tenant_that_is_required(call: Call, module: str, client_dsn: str) -> None:
    command = ("enqueue", "-A", f"{module}:app", "for_a_tenant")
    said = call(*command, dsn=client_dsn)
    assert (said.code, said.out, said.err) == (2, "", "error: task 'for_a_tenant' runs for a tenant only: give --tenant\n")
    assert call(*command, "--tenant", "42", dsn=client_dsn).code == 0


def test_enqueue_what_is_no_object(call: Call, client_dsn: str) -> None:
    for payload in ("{", "[1]", "3", "name"):
        said = call("enqueue", "t", payload, dsn=client_dsn)
        assert (said.code, said.err.count("\n")) == (2, 1)


def test_wait_gives_up(call: Call, client_dsn: str, prepare: Prepare) -> None:
    prepare(one_of_each)
    said = call("enqueue", "t", "--wait", "0.01", dsn=client_dsn)
    assert (said.code, len(said.out.splitlines()), "has not ended" in said.err) == (1, 1, True)


# -- status ---------------------------------------------------------------------------------------------------------------


def test_status_of_nothing(call: Call, worker_dsn: str) -> None:
    said = call("status", "--check", dsn=worker_dsn)
    assert (said.code, "no job is ready or running" in said.out, "workers: none" in said.out) == (0, True, True)


def test_status_as_json_and_text(call: Call, worker_dsn: str, prepare: Prepare) -> None:
    prepare(one_of_each)
    found = call("status", "--json", dsn=worker_dsn).json
    assert [(q["queue"], q["priority"], q["ready"], q["running"]) for q in found["queues"]] == [
        ("default", 1, 1, 0), ("default", 0, 0, 1)
    ]  # fmt: skip
    assert found["scheduled"]["scheduled"] == 1
    assert [(t["tenant"], t["ready"]) for t in found["tenants"]] == [("b", 1)]
    assert sorted(w["running"] for w in found["workers"]) == [0, 1], "as the queues say, not as old as a beat"
    assert {type(w["id"]) for w in found["workers"]} == {str}, "readers of JSON lose the last of 63 bits"
    assert found["dead"] == 1
    assert (found["problems"], found["handed_back"], found["unknown_tasks"]) == ([], [], [])
    text = call("status", dsn=worker_dsn).out
    for part in ("QUEUE", "scheduled: 1", "dead in the last 7 days: 1", "TENANT", "host:1", "1/10", "alive"):
        assert part in text
    assert call("status", "--check", dsn=worker_dsn).code == 0


def test_check_finds_what_is_wrong(call: Call, owner_dsn: str, worker_dsn: str, schema: str, prepare: Prepare) -> None:
    async def steps(one: Session) -> int:
        await one.enqueue(2, task="nobody")
        await one.enqueue(1, queue="left alone", priority=-1)
        worker = await one.register()
        job = await one.claim_one(worker)
        await one.record(worker, entry(job, "unknown task", d=60, s=True, u="nobody"))
        await one.claim_one(worker)
        return worker

    worker = prepare(steps)
    assert call("status", "--check", dsn=worker_dsn).code == 3, "nobody knows the task"

    async def later() -> None:
        async with session(owner_dsn, schema) as boss:
            await boss.end_lease(worker)
            await boss.rows("UPDATE aioqueue.job SET created_at = created_at - interval '90 s'")

    asyncio.run(later())
    said = call("status", "--check", "--json", dsn=worker_dsn)
    dead, unserved, unknown = said.json["problems"]
    assert said.code == 3
    assert "host:1 is dead and still holds 1 jobs" in dead
    assert "'left alone'" in unserved and "-q" in unserved
    assert "'nobody'" in unknown
    said = call("status", dsn=worker_dsn)
    assert (said.code, said.out.count("\nproblem: ")) == (0, 3)


def test_counts_stop_at_ten_thousand(call: Call, worker_dsn: str, prepare: Prepare) -> None:
    async def steps(one: Session) -> None:
        for _ in range(2):
            await one.enqueue(5_500, tenant="a")
            await one.enqueue(5_500, delay=3600)

    prepare(steps)
    lines = call("status", dsn=worker_dsn).out
    assert lines.count("10000+") == 3, "ready, scheduled, the tenant's"
    assert "11000" not in lines


# -- the rest -------------------------------------------------------------------------------------------------------------


def test_every_option_has_its_variable() -> None:
    def options(command: Any, path: str) -> None:
        for name, sub in getattr(command, "commands", {}).items():
            options(sub, f"{path} {name}")
        for param in command.params:
            if param.param_type_name == "option":
                assert param.show_envvar, f"{path} {param.opts}"

    options(cli, "")


def test_a_variable_sets_an_option(call: Call, worker_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOQUEUE_STATUS_JSON", "1")
    assert call("status", dsn=worker_dsn).json["queues"] == []


def test_version(call: Call) -> None:
    assert set(call("version", "--json").json) == {"aioqueue", "schema", "python", "psycopg", "libpq"}
    assert call("version").out.startswith("aioqueue ")


def test_as_a_module(worker_dsn: str, schema: str) -> None:
    environ = {**os.environ, "AIOQUEUE_DSN": worker_dsn, "AIOQUEUE_SCHEMA": schema}
    command = [sys.executable, "-m", "aioqueue", "status", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["queues"] == []


def test_a_reader_that_has_enough_ends_the_command_quietly(worker_dsn: str, schema: str) -> None:
    environ = {**os.environ, "AIOQUEUE_DSN": worker_dsn, "AIOQUEUE_SCHEMA": schema}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        command = [sys.executable, "-m", "aioqueue", "status"]
        done = subprocess.run(command, env=environ, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_policy_on_the_queues_own_table_leads_to_doctor(
    call: Call, owner_dsn: str, worker_dsn: str, schema: str, prepare: Prepare
) -> None:
    prepare(one_of_each)
    table = Identifier(schema, "live")
    with psycopg.connect(owner_dsn, autocommit=True) as conn:
        conn.execute(SQL("ALTER TABLE {} ENABLE ROW LEVEL SECURITY").format(table))
        try:
            said = call("status", dsn=worker_dsn)
        finally:
            conn.execute(SQL("ALTER TABLE {} DISABLE ROW LEVEL SECURITY").format(table))
    assert (said.code, "row-level security" in said.err) == (1, True)
    assert "python -m aioqueue doctor" in said.err and "migrate" not in said.err


def test_tables_ages_and_short_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_table(("NAME", "N"), [("a", "10"), ("long name", "1")], right=("N",), indent=1)
    assert capsys.readouterr().out == " NAME        N\n a          10\n long name   1\n"
    assert [age(s) for s in (None, -1, 0, 119, 120, 7200, 200_000)] == ["-", "0 s", "0 s", "119 s", "2 min", "2 h", "2 d"]
    monkeypatch.setenv("COLUMNS", "30")
    assert shorten("x" * 50) == "x" * 29 + "…"
    assert shorten("a\n  b") == "a b"


def test_a_table_in_a_terminal_keeps_all_but_its_last_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(("ID", "N", "ERROR"), [(str(UUID(int=1)), "12", "broken [red] " * 20)], right=("N",))
    header, line = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert header.split() == ["ID", "N", "ERROR"]
    assert line.startswith(f"{UUID(int=1)}  12  broken [red] ") and "…" in line
    monkeypatch.setattr(output, "RICH", False)
    print_table(("ID",), [("1",)])
    assert capsys.readouterr().out == "ID\n1\n"


def _events() -> list[type[Event]]:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
    return [kind for kind in kinds if kind not in (Event, OfJob)]


@pytest.mark.parametrize("kind", _events())
def test_every_event_has_a_line(kind: type[Event]) -> None:
    values = {"int": 1, "float": 1.0, "str": "x", "bool": False, "UUID": UUID(int=1)}
    fields = {
        field.name: ("q",) if "tuple" in str(field.type) else values[str(field.type).partition(" ")[0]]
        for field in dataclasses.fields(kind)
    }
    _, line = describe(kind(**fields))
    assert line and kind.__name__ not in line, "the general form is for events of later versions"


def test_levels_of_outcomes() -> None:
    levels = {
        state: describe(JobRecorded(UUID(int=1), "t", None, 1, "q", 7, state, 0.1, None))[0]
        for state in ("succeeded", "ready", "scheduled", "cancelled", "dead")
    }
    assert levels == {"succeeded": 10, "ready": 30, "scheduled": 30, "cancelled": 20, "dead": 30}
    assert describe(JobClaimed(UUID(int=1), "t", "a", 1, "q", 7)) == (10, f"claimed t {UUID(int=1)} (attempt 1, tenant a)")


@pytest.mark.parametrize(
    ("state", "reason", "failures", "delay", "line"),
    [
        ("scheduled", "error", 1, 2.5, "failed t ID (attempt 1 of 5, tenant a), again in 2.5 s: ValueError: broken"),
        ("ready", "error", 2, 0.0, "failed t ID (attempt 2 of 5, tenant a), again at once: ValueError: broken"),
        ("dead", "error", 5, None, "dead t ID (attempt 5 of 5, tenant a): ValueError: broken"),
        ("scheduled", "snoozed", 0, 600.0, "snoozed t ID (attempt 7, tenant a), again in 10 min"),
        ("ready", "interrupted", 0, None, "handed back t ID (attempt 7, tenant a), again at once: ValueError: broken"),
        ("cancelled", "cancelled", 1, None, "cancelled t ID (attempt 7, tenant a): ValueError: broken"),
    ],
)
def test_lines_of_attempts_that_did_not_succeed(state: str, reason: str, failures: int, delay: float | None, line: str) -> None:
    event = JobRecorded(
        UUID(int=1),
        "t",
        "a",
        7,
        "q",
        7,
        state,
        0.1,
        "ValueError: broken",
        reason=reason,
        failures=failures,
        max_attempts=5,
        delay=delay,
    )
    assert describe(event)[1].replace(str(UUID(int=1)), "ID") == line


def test_jobs_without_a_connection_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = EventLog(logging.getLogger("test of the log"), clock=lambda: now)
    event = JobRecorded(UUID(int=1), "t", None, 1, "q", 7, "scheduled", 0.1, "none", reason="no connection", delay=0.5)
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            log(event)
        now = 5.0
        log(event)
        log(event)
        log(WorkerStopped(1))
    said = [record.message.partition(":")[0] for record in caplog.records]
    assert said == ["handed back 1 job", "handed back 10 jobs", "worker 1 has stopped", "handed back 1 job"]


def test_an_abandoned_job_says_why_the_worker_stops(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(logging.getLogger("test of the log"))
    log(JobAbandoned(UUID(int=1), "t", None, 1, "q", 7))
    log(JobAbandoned(UUID(int=2), "t", None, 1, "q", 7))
    said = [record.message for record in caplog.records]
    assert [line.split()[0] for line in said] == ["gave", "this", "gave"]
    assert "exits with 1" in said[1]
