"""Task: what is refused at registration, names, options, and the jobs that a task makes."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from aioqueue.context import JobContext, JobTransaction
from aioqueue.definition import Holds, define
from aioqueue.errors import InvalidOption, InvalidPayload, TaskDefinitionError, UnknownTask
from aioqueue.job import Job, JobSource
from aioqueue.new_jobs import NewJobs
from aioqueue.registry import TaskRegistry
from aioqueue.retry import Retry
from aioqueue.task import Task
from benchmarks.mixed_jobs import NewJob, split

pytestmark = pytest.mark.anyio

T = TypeVar("T")


class Order(BaseModel):
    id: int


class App(TaskRegistry):
    """The half of an app that is a registry; it keeps the jobs that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[NewJob], object | None]] = []

    @property
    def payload_limit(self) -> int:
        return 1000

    async def enqueue_jobs(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        self.calls.append((split(jobs.joined(parts)), on))

    def enqueue_jobs_sync(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        self.calls.append((split(jobs.joined(parts)), on))

    def handle(self, job_id: UUID, decode: Callable[[str], Any] | None, tenant: str | None, *, on: object | None) -> Job[Any]:
        return Job(job_id, source=cast(JobSource, None), decode=decode, tenant=tenant)

    @property
    def job(self) -> NewJob:
        """The only job so far."""
        [([job], _)] = self.calls
        return job


@pytest.fixture
def app() -> App:
    return App()


# ---- functions that can be tasks


async def transactional(tx: JobTransaction, order: Order) -> int:
    return order.id


async def contextual(ctx: JobContext, n: int) -> int:
    return n


async def positional_context(ctx: JobContext, /, n: int) -> int:
    return n


async def annotated_context(ctx: Annotated[JobContext, "note"], n: int) -> int:
    return n


async def plain(n: int) -> int:
    return n


def threaded(n: int) -> int:
    return n


def threaded_context(ctx: JobContext, n: int) -> int:
    return n


async def keywords(*, anything: Any, thing: object = None) -> None: ...


@pytest.mark.parametrize(
    ("fn", "holds", "is_async"),
    [
        (transactional, Holds.TRANSACTION, True),
        (contextual, Holds.CONTEXT, True),
        (positional_context, Holds.CONTEXT, True),
        (annotated_context, Holds.CONTEXT, True),
        (plain, Holds.NOTHING, True),
        (threaded, Holds.NOTHING, False),
        (threaded_context, Holds.CONTEXT, False),
        (keywords, Holds.NOTHING, True),
    ],
)
def test_first_parameter_says_what_is_held(fn: Callable[..., Any], holds: Holds, is_async: bool) -> None:
    definition = define(fn)
    assert (definition.holds, definition.is_async) == (holds, is_async)
    if holds is not Holds.NOTHING:
        name = "order" if fn is transactional else "n"
        value = {"id": 1} if fn is transactional else 1
        (_, arguments) = definition.payload.load(definition.payload.dump((value,), {}, limit=1000))
        assert set(arguments) == {name}


def test_defaults() -> None:
    definition = define(plain)
    assert definition.name == f"{__name__}.plain"
    assert (definition.queue, definition.priority, definition.timeout) == ("default", 0, None)
    assert definition.retry == Retry()
    assert definition.fn is plain


def test_options() -> None:
    retry = Retry(max_attempts=9)
    definition = define(plain, name="n", queue="q", priority=-2, retry=retry, timeout=timedelta(minutes=1))
    assert (definition.name, definition.queue, definition.priority) == ("n", "q", -2)
    assert (definition.retry, definition.timeout) == (retry, 60.0)


def test_decorated_function() -> None:
    def decorator(fn: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(fn)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await fn(*args, **kwargs)

        return wrapper

    definition = define(decorator(contextual))
    assert definition.holds is Holds.CONTEXT
    assert definition.name == f"{__name__}.contextual"
    assert definition.payload.dump((1,), {}, limit=100) == '{"n":1}'


# ---- functions that cannot


async def first_any(x: Any, n: int) -> None: ...
async def first_object(x: object, n: int) -> None: ...
async def first_hashable(x: Hashable, n: int) -> None: ...
async def first_union(x: int | Any, n: int) -> None: ...
async def first_optional_object(x: object | None, n: int) -> None: ...
async def first_type_variable(x: T, n: int) -> T:
    return x


async def later_type_variable(n: int, x: T) -> T:
    return x


async def untyped_first(x, n: int) -> None: ...  # type: ignore[no-untyped-def]
async def untyped_later(n: int, x) -> None: ...  # type: ignore[no-untyped-def]
async def stars(n: int, *rest: int) -> None: ...
async def double_stars(n: int, **rest: int) -> None: ...
async def positional_only(n: int, /, m: int) -> None: ...
async def late_context(n: int, ctx: JobContext) -> None: ...
async def late_transaction(n: int, *, tx: JobTransaction) -> None: ...
async def two_contexts(ctx: JobContext, other: JobContext) -> None: ...
async def optional_context(ctx: JobContext | None, n: int) -> None: ...
async def nested_context(ctxs: list[JobContext], n: int) -> None: ...
async def keyword_context(*, ctx: JobContext) -> None: ...
def threaded_transaction(tx: JobTransaction, n: int) -> None: ...
def generator(n: int) -> Iterator[int]:
    yield n


async def async_generator(n: int) -> AsyncIterator[int]:
    yield n


async def unresolved(n: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
async def unknown_class(n: int, app: App) -> None: ...
async def unknown_result(n: int) -> App:
    raise NotImplementedError


async def field_default(n: int = Field(gt=0)) -> None: ...


@functools.wraps(plain)
def plainly_wrapped(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


class Callee:
    def method(self, n: int) -> None: ...

    def __call__(self, n: int) -> None: ...


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (first_any, "first parameter of type .*Any could be a context"),
        (first_object, "first parameter of type object could be a context"),
        (first_hashable, "first parameter of type .*Hashable could be a context"),
        (first_union, "could be a context"),
        (first_optional_object, "could be a context"),
        (first_type_variable, "'x' is a type variable"),
        (later_type_variable, "'x' is a type variable"),
        (untyped_first, "'x' has no annotation"),
        (untyped_later, "'x' has no annotation"),
        (stars, r"\*rest has no fixed payload"),
        (double_stars, r"\*\*rest has no fixed payload"),
        (positional_only, "'n' is positional-only"),
        (late_context, "'ctx' is JobContext"),
        (late_transaction, "'tx' is JobTransaction"),
        (two_contexts, "'other' is JobContext"),
        (optional_context, "'ctx' is .*JobContext"),
        (nested_context, "'ctxs' is .*JobContext"),
        (keyword_context, "'ctx' is JobContext"),
        (threaded_transaction, "make it async def"),
        (generator, "generator function"),
        (async_generator, "generator function"),
        (unresolved, "cannot be resolved .*Missing"),
        (unknown_class, "parameter 'app' cannot be a payload"),
        (unknown_result, "return annotation cannot be a result"),
        (field_default, r"Annotated\[…, Field\(…\)\]"),
        (plainly_wrapped, "make the wrapper async"),
        (lambda: 1, "a lambda has no name"),
        (Callee, "expected a function"),
        (Callee(), "expected a function"),
        (Callee().method, "expected a function"),
        (functools.partial(plain, 1), "expected a function"),
        (staticmethod(plain), "expected a function"),
        (3, "expected a function"),
    ],
)
def test_refused(fn: Any, reason: str) -> None:
    with pytest.raises(TaskDefinitionError, match=reason):
        define(fn)


def test_local_class_in_an_annotation_is_refused_with_the_reason() -> None:
    class Local(BaseModel): ...

    async def job(local: Local) -> None: ...

    with pytest.raises(TaskDefinitionError, match=r"Local.*must be known at module level"):
        define(job)


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\x00"}, "name"),
        ({"name": "a" * 201}, "name"),
        ({"name": 3}, "name"),
        ({"queue": " "}, "queue"),
        ({"queue": None}, "queue"),
        ({"priority": 3}, "priority"),
        ({"priority": -3}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"retry": 3}, "retry"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": timedelta(0)}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"timeout": True}, "timeout"),
    ],
)
def test_options_refused(wrong: dict[str, Any], about: str) -> None:
    with pytest.raises(TaskDefinitionError, match=about):
        define(plain, **wrong)


# ---- names


SCRIPT = """
from aioqueue.definition import define
def job() -> None: ...
print(define(job).name)
"""


def test_task_of_a_script_has_the_name_of_its_module(tmp_path: Path) -> None:
    script = tmp_path / "my_jobs.py"
    script.write_text(SCRIPT, "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    for arguments in (["-c", "import my_jobs"], ["my_jobs.py"], ["-m", "my_jobs"]):
        command = [sys.executable, *arguments]
        name = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        assert name == "my_jobs.job\n"


def test_local_function_has_a_readable_name() -> None:
    def job() -> None: ...

    assert define(job).name == f"{__name__}.test_local_function_has_a_readable_name.job"


# ---- the registry


class TestRegistry:
    def test_bare_and_with_options(self, app: App) -> None:
        bare = app.task(plain)
        named = app.task(name="other", queue="mail")(plain)
        assert isinstance(bare, Task)
        assert (bare.name, named.name, named.definition.queue) == (f"{__name__}.plain", "other", "mail")
        assert list(app.tasks.values()) == [bare, named]
        assert app.get("other") is named

    def test_name_twice(self, app: App) -> None:
        app.task(name="one")(plain)
        with pytest.raises(TaskDefinitionError, match=r"the name is taken by .*test_task\.py:\d+"):
            app.task(name="one")(threaded)
        assert app.get("one").definition.fn is plain

    def test_task_of_a_task(self, app: App) -> None:
        with pytest.raises(TaskDefinitionError, match="is a task already"):
            app.task(name="again")(app.task(plain))

    def test_unknown(self, app: App) -> None:
        app.task(name="send_mail")(plain)
        with pytest.raises(UnknownTask, match="did you mean 'send_mail'"):
            app.get("send_mial")

    def test_tasks_are_read_only(self, app: App) -> None:
        with pytest.raises(TypeError):
            cast(dict[str, Any], app.tasks)["x"] = None

    def test_refused_function_leaves_no_trace(self, app: App) -> None:
        with pytest.raises(TaskDefinitionError):
            app.task(name="x")(generator)
        assert not app.tasks

    def test_task_looks_like_its_function(self, app: App) -> None:
        task = app.task(plain)
        assert (vars(task)["__name__"], task.__module__) == ("plain", __name__)
        assert inspect.signature(task) == inspect.signature(plain)
        assert repr(task) == f"Task('{__name__}.plain')"


# ---- calling and enqueueing


async def test_calling_runs_the_plain_function(app: App) -> None:
    assert await app.task(plain)(3) == 3
    assert await app.task(threaded)(3) == 3
    assert await app.task(contextual)(cast(JobContext, None), 3) == 3
    assert not app.calls


async def test_calling_a_def_task_raises_where_it_is_awaited(app: App) -> None:
    def broken() -> None:
        raise LookupError("broken")

    call = app.task(broken)()
    with pytest.raises(LookupError, match="broken"):
        await call


async def test_job_carries_the_tasks_options(app: App) -> None:
    task = app.task(name="t", queue="q", priority=1, retry=Retry(max_attempts=7))(plain)
    job = await task.enqueue(3)
    assert app.job == NewJob(id=job.id, task="t", payload='{"n":3}', queue="q", priority=1, tenant=None, max_attempts=7)
    assert app.calls[0][1] is None
    assert job.decode is not None
    assert job.decode("5") == 5


async def test_options_win(app: App) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    on = object()
    task = app.task(queue="q", priority=1)(plain)
    bound = task.options(tenant="42", queue="other", priority=0, run_at=at, max_attempts=1, on=on)
    job = await bound.enqueue(n=3)
    assert job.tenant == "42"
    assert (app.job.tenant, app.job.queue, app.job.priority) == ("42", "other", 0)
    assert (app.job.run_at, app.job.delay, app.job.max_attempts) == (at, None, 1)
    assert app.calls[0][1] is on


@pytest.mark.parametrize(("delay", "seconds"), [(0, 0), (1.5, 1.5), (timedelta(minutes=2), 120)])
async def test_delay(app: App, delay: float | timedelta, seconds: float) -> None:
    await app.task(plain).options(delay=delay).enqueue(1)
    assert app.job.delay == seconds


@pytest.mark.parametrize(
    ("wrong", "about"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": 42}, "tenant"),
        ({"tenant": "a\x00"}, "tenant"),
        ({"queue": ""}, "queue"),
        ({"queue": "x" * 201}, "queue"),
        ({"priority": 3}, "priority"),
        ({"priority": False}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"delay": -1}, "delay"),
        ({"delay": float("inf")}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": "1"}, "delay"),
        ({"delay": timedelta(days=4000)}, "delay"),
        ({"run_at": datetime(2026, 1, 1)}, "run_at"),
        ({"run_at": "2026-01-01"}, "run_at"),
        ({"run_at": datetime(2026, 1, 1, tzinfo=UTC), "delay": 0}, "run_at"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 1001}, "max_attempts"),
        ({"max_attempts": 1.0}, "max_attempts"),
    ],
)
def test_options_of_a_job_refused(app: App, wrong: dict[str, Any], about: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        app.task(plain).options(**wrong)
    assert caught.value.option == about
    assert not caught.value.reason.startswith(about)


async def test_bad_payload_enqueues_nothing(app: App) -> None:
    task = app.task(plain)
    with pytest.raises(InvalidPayload):
        await task.enqueue("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidPayload, match="at most 1,000"):
        await app.task(name="text")(text).enqueue("x" * 1000)
    assert not app.calls


async def text(value: str) -> None: ...


class TestMany:
    async def test_mappings_and_tuples(self, app: App) -> None:
        jobs = await app.task(plain).options(tenant="42").enqueue_many([(1,), {"n": 2}])
        [(new, _)] = app.calls
        assert [job.payload for job in new] == ['{"n":1}', '{"n":2}']
        assert [job.id for job in jobs] == [job.id for job in new]
        assert {job.tenant for job in jobs} == {"42"}

    async def test_models_from_an_iterator(self, app: App) -> None:
        jobs = await app.task(transactional).enqueue_many(Order(id=n) for n in range(3))
        assert len(jobs) == 3
        assert [job.payload for job in app.calls[0][0]] == ['{"id":0}', '{"id":1}', '{"id":2}']

    async def test_none_at_all(self, app: App) -> None:
        assert await app.task(plain).enqueue_many([]) == []
        assert not app.calls

    async def test_one_bad_refuses_all_and_is_named(self, app: App) -> None:
        with pytest.raises(InvalidPayload, match=r"number 1 \(from 0\): n: "):
            await app.task(plain).enqueue_many([(1,), ("x",), (3,)])
        assert not app.calls

    @pytest.mark.parametrize("payload", ["a", b"a", 1, 1.5, [1], None])
    async def test_one_that_is_no_payload(self, app: App, payload: Any) -> None:
        task: Any = app.task(plain)
        wanted = rf"number 1 .*: expected a tuple of arguments, a mapping .* model, got {type(payload).__name__}$"
        for first in ((1,), {"n": 1}):
            with pytest.raises(InvalidPayload, match=wanted):
                await task.enqueue_many([first, payload])
        assert not app.calls

    @pytest.mark.parametrize("payloads", [Order(id=1), {"id": 1}, "text", b"text"])
    async def test_one_payload_in_place_of_many(self, app: App, payloads: Any) -> None:
        with pytest.raises(InvalidPayload, match="expected a list of payloads"):
            await app.task(transactional).enqueue_many(payloads)
        assert not app.calls

    @pytest.mark.parametrize("payload", [1, None, "x", [1], Order(id=1)])
    async def test_payload_of_another_kind(self, app: App, payload: Any) -> None:
        with pytest.raises(InvalidPayload, match="number 0"):
            await app.task(plain).enqueue_many([payload])
