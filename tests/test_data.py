"""What jobs carry, end to end: payloads, results, errors and names that are hard to store, and code of two versions.

Whatever it is, the job ends or waits with a reason that can be read, whoever waits for it is told, and its neighbours go on.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from pydantic import BaseModel, ConfigDict

from aioqueue import (
    AioQueue,
    InvalidOption,
    InvalidPayload,
    JobFailed,
    JobState,
    JobTransaction,
    ResultInvalid,
    Retry,
    Task,
    TaskDefinitionError,
    UnknownTask,
    WorkerSettings,
)
from aioqueue.events import JobClaimed, JobRecorded
from tests.kit import MakeApp, Seen, until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

ONCE = Retry(max_attempts=1)


# -- what cannot be stored -------------------------------------------------------------------------------------------

HARD: dict[str, Callable[[], object]] = {
    "NUL": lambda: {"a": ["x\0y"]},
    "NUL in a key": lambda: {"x\0y": 1},
    "half a surrogate pair": lambda: ["\ud800"],
    "NaN": lambda: {"deep": [1, {"a": float("nan")}]},
    "infinity": lambda: float("inf"),
    "a decimal NaN": lambda: [Decimal("NaN")],
    "an object": object,
    "a generator": lambda: (n for n in range(3)),
    "a set of objects": lambda: {object()},
    "an exception": lambda: ValueError("no"),
    "a class": lambda: int,
}


@pytest.mark.parametrize("name", [name for name in HARD if name != "a generator"])  # which Any writes as a list
async def test_a_payload_that_cannot_be_stored_is_refused_in_the_callers_stack(app: AioQueue, boss: Session, name: str) -> None:
    @app.task(name="take")
    async def take(number: int, value: Any) -> None: ...

    with pytest.raises(InvalidPayload, match="payload of task 'take': "):
        await take.enqueue(1, HARD[name]())
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 0


@pytest.mark.parametrize("holds", ["nothing", "a transaction", "a thread"])
async def test_a_result_that_cannot_be_stored_ends_its_job_tells_who_waits_and_harms_no_neighbour(
    app: AioQueue, boss: Session, holds: str
) -> None:
    async def plain(name: str) -> Any:
        return HARD[name]()

    async def own(tx: JobTransaction, name: str) -> Any:
        return HARD[name]()

    def thread(name: str) -> Any:
        return HARD[name]()

    tasks: dict[str, Any] = {"nothing": plain, "a transaction": own, "a thread": thread}
    give = app.task(name="give")(tasks[holds])
    async with app.worker():
        jobs = await give.enqueue_many([(name,) for name in HARD])
        fine = await app.get("add").enqueue(1)
        for job in jobs:
            with pytest.raises(JobFailed, match="result of task 'give' cannot be stored") as failed:
                await job.result(30)
            assert failed.value.attempt == 1
        assert await fine.result(30) == 2
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 0


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"], ids=["NUL", "surrogate"])
async def test_names_that_cannot_be_stored_are_refused_where_they_are_given(app: AioQueue, text: str) -> None:
    add = app.get("add")
    given: dict[str, Any]
    for given in ({"tenant": text}, {"queue": text}, {"key": text}):
        with pytest.raises(InvalidOption, match=next(iter(given))):
            add.options(**given)
    for given in ({"name": text}, {"name": "nothing", "queue": text}):
        with pytest.raises(TaskDefinitionError, match=list(given)[-1]):
            app.task(**given)(lambda: None)
    with pytest.raises((InvalidOption, UnknownTask)):
        await app.enqueue_by_name(text)
    for call in (app.set_tenant(text, weight=1), app.pause_queue(text)):
        with pytest.raises(InvalidOption):
            await call
    job = await add.enqueue(1)
    with pytest.raises(InvalidOption):
        await app.job(job.id, tenant=text).status()


class Hostile(Exception):
    """As hard to store as an exception can be."""

    def __str__(self) -> str:
        return "message \0 \ud800"

    def __reduce__(self) -> Any:
        raise RuntimeError("not picklable")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def hostile() -> BaseException:
    error = Hostile()
    error.add_note("note \0 \ud800")
    error.__cause__ = ValueError("cause \0")
    return error


def renamed() -> BaseException:
    return type("Name\0\ud800", (Exception,), {})("x" * 1_000_000)


def from_hostile_source() -> BaseException:
    try:
        exec(compile("def broken():\n    raise ValueError('x')  # \ud800\nbroken()", "file \ud800.py", "exec"), {})  # noqa: S102
    except ValueError as error:
        return error
    raise AssertionError


ERRORS: dict[str, Callable[[], BaseException]] = {
    "text, note and cause": hostile,
    "its own name, and a megabyte": renamed,
    "the source line and file": from_hostile_source,
    "no words at all": Silent,
    "a lock among its arguments": lambda: ValueError(asyncio.Lock(), object()),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_whose_text_cannot_be_stored_is_a_counted_attempt_with_a_retry(
    app: AioQueue, boss: Session, name: str
) -> None:
    @app.task(name="fail", retry=Retry(max_attempts=2, base=0))
    async def fail() -> None:
        raise ERRORS[name]()

    async with app.worker():
        job = await fail.enqueue()
        with pytest.raises(JobFailed):
            await job.result(30)
    attempts = await boss.attempts(job.id)
    assert [row[:2] for row in attempts] == [(1, "error"), (2, "error")]
    status = await job.status()
    assert status.error is not None and status.error.error_type and status.error.traceback


# -- sizes -----------------------------------------------------------------------------------------------------------


async def test_payloads_and_results_up_to_the_limits_pass_and_larger_ones_are_refused_by_name(app: AioQueue) -> None:
    @app.task(name="echo", retry=ONCE)
    async def echo(text: str, times: int = 1) -> str:
        return text * times

    almost = "ü" * 499_950  # 999,900 bytes, and the JSON around it
    async with app.worker():
        jobs = await echo.enqueue_many([(almost,)] * 10)
        assert [await job.result(60) for job in jobs] == [almost] * 10
        with pytest.raises(InvalidPayload, match=r"1,?000,?000"):
            await echo.enqueue(almost + "ü" * 50)
        with pytest.raises(JobFailed, match=r"cannot be stored: .*10,?000,?000"):
            await (await echo.enqueue("x" * 900_000, times=12)).result(60)


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ['{"a": "one"}', "{}", "[]", "null", "5", '"text"', '{"a": 1, "nobody": 2}'])
async def test_a_payload_that_cannot_be_read_is_dead_at_once_with_the_reason_and_the_next_job_runs(
    app: AioQueue, boss: Session, payload: str
) -> None:
    broken = await app.get("add").enqueue(1)
    await boss.rows("UPDATE aioqueue.job SET payload = %s::jsonb WHERE id = %s", payload, broken.id)
    async with app.worker():
        fine = await app.get("add").enqueue(1)
        with pytest.raises(JobFailed, match="InvalidPayload: payload of task 'add'") as failed:
            await broken.result(30)
        assert failed.value.attempt == 1
        assert await fine.result(30) == 2
    assert [row[:2] for row in await boss.attempts(broken.id)] == [(1, "invalid payload")]


async def test_a_result_that_no_longer_fits_its_type_is_an_error_of_its_own_and_can_be_read_without_it(
    make_app: MakeApp,
) -> None:
    class Total(BaseModel):
        cents: int

    class NewTotal(BaseModel):
        euros: int

    before, after = make_app(), make_app()

    @before.task(name="total")
    async def total() -> Total:
        return Total(cents=7)

    @after.task(name="total")
    async def new_total() -> NewTotal:
        return NewTotal(euros=7)

    async with before, after:
        async with before.worker():
            job = await total.enqueue()
            assert (await job.result(30)).cents == 7
        with pytest.raises(ResultInvalid, match="euros"):
            await after.job(job.id, of=new_total).result(30)
        assert await after.job(job.id).result(30) == {"cents": 7}


# -- two versions of the code ----------------------------------------------------------------------------------------


async def run_on(app: AioQueue, job_id: Any) -> Any:
    """Run the job on that app's code; its result."""
    async with app.worker():
        return await app.job(job_id).result(30)


async def test_an_argument_with_a_default_is_added_without_harm_to_old_jobs(make_app: MakeApp) -> None:
    old, new = make_app(), make_app()

    @old.task(name="greet")
    async def greet(name: str) -> str:
        return name

    @new.task(name="greet")
    async def greet_politely(name: str, title: str = "Dr") -> str:
        return f"{title} {name}"

    async with old, new:
        assert await run_on(new, (await greet.enqueue("Ada")).id) == "Dr Ada"
        # Nothing is stored of a default: what is sent without the new argument is read by old code, too.
        assert await run_on(old, (await greet_politely.enqueue("Ada")).id) == "Ada"
        with pytest.raises(JobFailed, match="no argument is named 'title'"):
            await run_on(old, (await greet_politely.enqueue("Ada", title="Ms")).id)


async def test_whether_a_model_takes_fields_that_it_does_not_know_is_the_models_to_say(make_app: MakeApp) -> None:
    class Order(BaseModel):
        number: int

    class StrictOrder(BaseModel):
        model_config = ConfigDict(extra="forbid")
        number: int

    class NewOrder(Order):
        note: str = ""

    old, strict, new = make_app(), make_app(), make_app()

    @old.task(name="order")
    async def order(order: Order) -> int:
        return order.number

    @strict.task(name="order")
    async def strict_order(order: StrictOrder) -> int:
        return order.number

    @new.task(name="order")
    async def new_order(order: NewOrder) -> int:
        return order.number

    async with old, strict, new:
        assert await run_on(old, (await new_order.enqueue(NewOrder(number=1, note="x"))).id) == 1
        with pytest.raises(JobFailed, match="note: Extra inputs"):
            await run_on(strict, (await new_order.enqueue(NewOrder(number=1, note="x"))).id)


async def test_a_job_that_code_of_another_version_cannot_read_is_dead_and_runs_again_on_code_that_can(
    make_app: MakeApp, boss: Session
) -> None:
    old, new = make_app(), make_app()

    @old.task(name="greet")
    async def greet(name: str) -> str:
        return name

    @new.task(name="greet")
    async def greet_in(full_name: str, language: str) -> str:
        return f"{language}: {full_name}"

    async with old, new:
        calls: list[tuple[Task[..., ..., Any], tuple[str, ...], AioQueue, AioQueue]] = [
            (greet_in, ("Ada", "en"), new, old),
            (greet, ("Ada",), old, new),
        ]
        for task, arguments, sender, other in calls:
            (sent,) = await task.enqueue_many([arguments])
            with pytest.raises(JobFailed, match="InvalidPayload"):
                await run_on(other, sent.id)
            assert [row[:2] for row in await boss.attempts(sent.id)] == [(1, "invalid payload")]
            again = await sender.job(sent.id).retry()
            assert await run_on(sender, again.id) in ("Ada", "en: Ada")


async def test_a_task_may_let_jobs_that_it_cannot_read_wait_for_code_that_can(make_app: MakeApp, seen: Seen) -> None:
    """Only if it names InvalidPayload itself: its base ValueError is what tasks raise."""
    old, new = make_app(), make_app()

    @old.task(name="greet", retry=Retry(on={InvalidPayload: timedelta(0)}))
    async def greet(name: str) -> str:
        return name

    @new.task(name="greet")
    async def greet_in(name: str, language: str) -> str:
        return f"{language}: {name}"

    @old.task(name="impatient", retry=Retry(on={ValueError: timedelta(0), Exception: True}))
    async def impatient(name: str) -> None: ...

    async with old, new:
        job = await greet_in.enqueue("Ada", "en")
        async with old.worker(queues=["default"]):
            await seen.wait(JobRecorded, 2, job_id=job.id, state="ready", reason="invalid payload")
        assert await run_on(new, job.id) == "en: Ada"
        never = await old.enqueue_by_name("impatient", {"name": "x"})
        async with old.worker():
            await never.result(30)


async def test_a_renamed_task_may_keep_its_old_name_beside_the_new_one(make_app: MakeApp) -> None:
    before, after = make_app(), make_app()

    @before.task(name="old.name")
    async def work(n: int) -> int:
        return n

    async def renamed_work(n: int) -> int:
        return 10 * n

    new = after.task(name="new.name")(renamed_work)
    after.task(name="old.name")(renamed_work)
    async with before, after:
        jobs = [await work.enqueue(1), await new.enqueue(2)]
        async with after.worker():
            assert [await after.job(job.id).result(30) for job in jobs] == [10, 20]


async def test_a_job_of_a_task_that_its_worker_does_not_know_waits_spared_and_visible_for_one_that_does(
    make_app: MakeApp, boss: Session, seen: Seen
) -> None:
    old, new = make_app(), make_app()

    @new.task(name="new", retry=ONCE)
    async def added() -> str:
        return "done"

    async with old, new:
        job = await added.enqueue()
        async with old.worker() as worker:
            await seen.wait(JobRecorded, 1, job_id=job.id, reason="unknown task")
            await (await old.get("add").enqueue(1)).result(30)
            assert worker.problems() == [] or "listener" in worker.problems()[0]
        status = await job.status()
        assert status.attempt == status.spared > 0
        assert await boss.value("SELECT unknown_task IS NOT NULL FROM aioqueue.scheduled WHERE job_id = %s", job.id)
        assert await run_on(new, job.id) == "done"


async def test_a_worker_without_any_task_idles_and_hands_back_what_it_meets(
    worker_dsn: str, schema: str, seen: Seen, boss: Session
) -> None:
    app = AioQueue(worker_dsn, schema=schema, observers=[seen], worker=WorkerSettings(poll=0.05))
    job_id = await boss.enqueue_one(task="somebody's")
    async with app, app.worker() as worker:
        await seen.wait(JobRecorded, 1, job_id=job_id, reason="unknown task")
        await until(boss, "SELECT NOT EXISTS (SELECT FROM aioqueue.live)")
        assert worker.running == 0
    assert len(seen.all(JobClaimed)) >= 1


# -- keys ------------------------------------------------------------------------------------------------------------


async def test_a_dead_job_blocks_no_new_job_of_its_key(app: AioQueue) -> None:
    @app.task(name="print", max_running_per_key=1, retry=ONCE)
    async def print_label(fails: bool) -> str:
        if fails:
            raise ValueError("out of paper")
        return "printed"

    keyed = print_label.options(key="printer 7")
    async with app.worker():
        with pytest.raises(JobFailed):
            await (await keyed.enqueue(True)).result(30)
        job = await keyed.enqueue(False)
        assert await job.result(30) == "printed"
        assert (await job.status()).state is JobState.SUCCEEDED


# -- from SQL --------------------------------------------------------------------------------------------------------


async def test_sql_refuses_what_cannot_be_stored_and_lets_the_worker_judge_the_rest(
    app: AioQueue, client_dsn: str, schema: str
) -> None:
    enqueue = SQL("SELECT {}.enqueue('add', %s::jsonb)").format(Identifier(schema))
    async with await psycopg.AsyncConnection.connect(client_dsn, autocommit=True) as conn:
        for payload in ('{"a": "\\u0000"}', '{"a": NaN}', '{"a": "\\ud800"}', "{"):
            with pytest.raises(psycopg.DataError):
                await conn.execute(enqueue, [payload])
        row = await (await conn.execute(enqueue, ['{"a": "one"}'])).fetchone()
    assert row is not None
    async with app.worker():
        with pytest.raises(JobFailed, match="InvalidPayload"):
            await app.job(row[0]).result(30)
