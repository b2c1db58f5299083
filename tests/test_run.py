"""One run of one job: every way user code can end becomes an outcome, and it is cancelled once and only while it runs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from pydantic import BaseModel, field_validator

from aioqueue import AioQueue, Cancel, JobContext, JobTransaction, LimitSettings, Retry, RetryIn, Snooze
from aioqueue.attempt import Cause
from aioqueue.context import current_job
from aioqueue.events import JobAbandoned, JobLost
from aioqueue.outcome import Cancelled, Failed, Outcome, Reason, Released, Snoozed, Succeeded
from aioqueue.settings import PoolSettings
from tests.kit import Bench, bench, passed, turn_until
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

LIMITS = LimitSettings(abandon=0.2)


@pytest.fixture
async def at(boss: Session, worker_dsn: str) -> AsyncIterator[Bench]:
    async with bench(worker_dsn, boss, AioQueue(), limits=LIMITS) as made:
        yield made


def failed(outcome: Outcome | None, reason: Reason = Reason.ERROR) -> Failed:
    assert isinstance(outcome, Failed) and outcome.reason is reason, outcome
    return outcome


class Exit(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Ending(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


# -- returning and raising -------------------------------------------------------------------------------------------


async def test_what_a_task_returns_is_its_result(at: Bench) -> None:
    class Total(BaseModel):
        cents: int

    async def count(n: int) -> Total:
        return Total(cents=n)

    at.tasks.task(name="work")(count)
    assert await at.run("work", '{"n": 7}') == Succeeded('{"cents":7}')


@pytest.mark.parametrize("how", ["async", "thread", "transaction"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"), KeyError("key"), SystemExit(1), SystemExit(), KeyboardInterrupt(), GeneratorExit(), StopIteration(1),
        StopAsyncIteration(), asyncio.CancelledError(), TimeoutError(), Exit("out"), MemoryError(),
        RecursionError(), Unprintable(), Ending(), ValueError("a\0b\ud800"), BaseExceptionGroup("two", [Exit(), ValueError()]),
        ExceptionGroup("wide", [ValueError(n) for n in range(1_000)]), NotImplementedError,
    ],
    ids=lambda e: e.__name__ if isinstance(e, type) else f"{type(e).__name__}{str(e.args)[:12]!r}",
)  # fmt: skip
async def test_whatever_a_task_raises_is_a_failed_attempt_and_the_next_job_runs(at: Bench, error: Any, how: str) -> None:
    def in_thread() -> None:
        raise error

    async def in_loop() -> None:
        raise error

    async def in_transaction(tx: JobTransaction) -> None:
        raise error

    async def fine() -> int:
        return 1

    work: Any = {"async": in_loop, "thread": in_thread, "transaction": in_transaction}[how]
    at.tasks.task(name="work")(work)
    at.tasks.task(name="fine")(fine)
    outcome = failed(await at.run("work"))
    if not isinstance(error, StopIteration | StopAsyncIteration):
        kind = error if isinstance(error, type) else type(error)
        assert outcome.error.type.rpartition(".")[2] == kind.__name__
    assert outcome.delay is not None
    assert outcome.error.traceback
    # As it is recorded: the database takes the text.
    text = outcome.error.type + outcome.error.message + outcome.error.traceback
    assert "\0" not in text
    await at.engine.rows("SELECT %s::text", text)
    assert await at.run("fine") == Succeeded("1")


async def test_a_task_that_cancels_itself_fails(at: Bench) -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def fine() -> int:
        return 1

    at.tasks.task(name="work")(work)
    at.tasks.task(name="fine")(fine)
    assert failed(await at.run("work")).error.type == "asyncio.exceptions.CancelledError"
    assert await at.run("fine") == Succeeded("1")


async def test_a_cancel_scope_of_the_task_s_own_is_none_of_our_business(at: Bench) -> None:
    async def work() -> str:
        with anyio.move_on_after(0.01):
            await asyncio.Event().wait()
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "went on"
        return "?"

    at.tasks.task(name="work")(work)
    assert await at.run("work") == Succeeded('"went on"')


async def test_a_failure_outside_user_code_is_still_an_outcome(at: Bench) -> None:
    """Nothing stays running: also when something raises that nobody thought of."""

    class Odd(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            raise KeyError("no pydantic error")

    async def odd_payload(odd: Odd) -> None:
        pass

    at.tasks.task(name="odd")(odd_payload)
    outcome = await at.run("odd", '{"n": 1}')
    assert isinstance(outcome, Failed), outcome


# -- retries ---------------------------------------------------------------------------------------------------------


def retried(at: Bench, error: Exception, retry: Retry) -> None:
    async def work() -> None:
        raise error

    at.tasks.task(name="work", retry=retry)(work)


async def attempts_used(at: Bench, number: int, task: str = "work", *, spared: int = 0, max_attempts: int = 5) -> Outcome | None:
    """Run a job that was claimed so many times, this one included."""
    job = await at.claim(task, max_attempts=max_attempts)
    job.attempt, job.spared = number, spared
    at.runner.start(job)
    await at.end()
    return at.outcomes[job.job_id]


async def test_a_failed_attempt_waits_by_the_policy_and_the_last_is_dead(at: Bench) -> None:
    retried(at, ValueError("no"), Retry(base=10, factor=2, jitter=False, max_attempts=3))
    delays = [failed(await attempts_used(at, n, max_attempts=3)).delay for n in (1, 2, 3)]
    assert delays == [10, 20, None]


async def test_spared_claims_are_not_held_against_the_job(at: Bench) -> None:
    retried(at, ValueError("no"), Retry(base=10, factor=2, jitter=False, max_attempts=3))
    delays = [failed(await attempts_used(at, n, spared=20, max_attempts=3)).delay for n in (21, 22, 23)]
    assert delays == [10, 20, None]


async def test_the_job_s_own_number_of_attempts_counts_not_the_task_s(at: Bench) -> None:
    retried(at, ValueError("no"), Retry(base=10, jitter=False, max_attempts=3))
    assert failed(await attempts_used(at, 1, max_attempts=1)).delay is None
    assert failed(await attempts_used(at, 3, max_attempts=9)).delay is not None


async def test_a_type_of_exception_has_its_own_policy(at: Bench) -> None:
    retried(at, KeyError("k"), Retry(on={LookupError: False, KeyError: timedelta(seconds=42)}))
    assert failed(await at.run("work")).delay == 42
    retry = Retry(on={LookupError: False})

    async def never() -> None:
        raise IndexError

    at.tasks.task(name="never", retry=retry)(never)
    assert failed(await at.run("never")).delay is None


async def test_snooze_retry_in_and_cancel_say_how_the_attempt_ended(at: Bench) -> None:
    async def snooze() -> None:
        raise Snooze(60)

    async def retry_in() -> None:
        raise RetryIn(timedelta(minutes=2), "the bank is closed")

    def cancel() -> None:
        raise Cancel("no longer wanted\0\ud800")

    for function in (snooze, retry_in, cancel):
        at.tasks.task(name=function.__name__)(function)
    assert await at.run("snooze") == Snoozed(60)
    assert await attempts_used(at, 5, "snooze") == Snoozed(60)
    again = failed(await at.run("retry_in"))
    assert (again.delay, again.error.message) == (120, "the bank is closed")
    assert failed(await attempts_used(at, 5, "retry_in")).delay is None
    ended = await at.run("cancel")
    assert isinstance(ended, Cancelled)
    assert ended.message == "no longer wanted\\x00\\ud800"


# -- payloads and results --------------------------------------------------------------------------------------------


async def test_a_payload_that_does_not_validate_is_dead_with_pydantics_reason(at: Bench) -> None:
    ran: list[int] = []

    async def work(n: int) -> None:
        ran.append(n)

    at.tasks.task(name="work")(work)
    for payload in ('{"n": "many"}', "{}", "[]", "null", '{"n": 1, "m": 2}'):
        outcome = failed(await at.run("work", payload), Reason.INVALID_PAYLOAD)
        assert outcome.delay is None
        assert outcome.error.message
    assert "valid integer" in failed(await at.run("work", '{"n": "many"}'), Reason.INVALID_PAYLOAD).error.message
    assert ran == []


async def _coroutine() -> int:
    return 1


RESULTS: dict[str, Callable[[], object]] = {
    "an object": object,
    "a generator": lambda: (n for n in range(3)),
    "a coroutine": _coroutine,
    "NUL": lambda: {"a": "x\0y"},
    "NUL in a key": lambda: {"x\0y": 1},
    "a surrogate": lambda: ["\ud800"],
    "NaN": lambda: [float("nan")],
    "infinity": lambda: {"x": float("-inf")},
    "too large": lambda: "x" * 10_000_001,
    "a function": lambda: print,
    "a lock": threading.Lock,
}


@pytest.mark.parametrize("holds", ["nothing", "a transaction"])
@pytest.mark.parametrize("name", RESULTS)
async def test_a_result_that_cannot_be_stored_is_dead_with_the_reason(at: Bench, name: str, holds: str) -> None:
    async def plain() -> Any:
        return RESULTS[name]()

    async def own(tx: JobTransaction) -> Any:
        return RESULTS[name]()

    at.tasks.task(name="work")(own if holds == "a transaction" else plain)
    outcome = failed(await at.run("work"), Reason.INVALID_RESULT)
    assert outcome.delay is None
    assert "work" in outcome.error.message


async def test_a_result_of_the_wrong_type_is_dead(at: Bench) -> None:
    async def work() -> int:
        return "seven"  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    at.tasks.task(name="work")(work)
    failed(await at.run("work"), Reason.INVALID_RESULT)


async def test_a_task_that_nobody_here_registered_is_handed_back_with_growing_delay(at: Bench) -> None:
    job = await at.claim("elsewhere")
    at.runner.start(job)
    await at.end()
    first = at.outcomes[job.job_id]
    assert isinstance(first, Released) and first.reason is Reason.UNKNOWN_TASK and 0.5 <= first.delay <= 1
    late = await attempts_used(at, 31, "elsewhere", spared=30)
    assert isinstance(late, Released) and 30 <= late.delay <= 60
    assert "elsewhere" in late.message


# -- time limits and cancellation ------------------------------------------------------------------------------------


async def test_a_time_out_is_a_failed_attempt_with_an_error_of_its_own(at: Bench) -> None:
    seen: list[BaseException] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            seen.append(error)
            raise

    at.tasks.task(name="work", timeout=0.05, retry=Retry(base=10, jitter=False))(work)
    outcome = failed(await at.run("work"), Reason.TIME_LIMIT)
    assert outcome.error.type == "aioqueue.errors.TimeLimitExceeded" and "0.05" in outcome.error.message
    assert outcome.delay == 10
    assert [type(error) for error in seen] == [asyncio.CancelledError]
    assert failed(await attempts_used(at, 5), Reason.TIME_LIMIT).delay is None


async def test_a_task_without_a_limit_of_its_own_has_the_workers(boss: Session, worker_dsn: str) -> None:
    limits = LimitSettings(time_limit=0.05, transaction_time_limit=0.06)
    async with bench(worker_dsn, boss, AioQueue(), limits=limits) as at:

        async def plain() -> None:
            await asyncio.Event().wait()

        async def own(tx: JobTransaction) -> None:
            await asyncio.Event().wait()

        at.tasks.task(name="plain")(plain)
        at.tasks.task(name="own")(own)
        assert "0.05 s" in failed(await at.run("plain"), Reason.TIME_LIMIT).error.message
        assert "0.06 s" in failed(await at.run("own"), Reason.TIME_LIMIT).error.message


CAUSES = {
    Cause.CANCELLED: Cancelled,
    Cause.INTERRUPTED: Released,
    Cause.LEASE_LOST: Released,
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_a_cancelled_task_is_cancelled_once_and_cleans_up_at_leisure(at: Bench, cause: Cause) -> None:
    inside = asyncio.Event()
    cancels: list[str] = []

    async def work(ctx: JobContext) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancels.append("once")
            raise
        finally:
            for _ in range(10):
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    cancels.append("again")
            cancels.append(f"should stop: {ctx.should_stop}")

    at.tasks.task(name="work")(work)
    job = await at.start("work")
    await passed(inside)
    for _ in range(3):
        at.stop(job, cause)
    at.stop(job, Cause.INTERRUPTED)
    await at.end()
    assert cancels == ["once", "should stop: True"]
    assert isinstance(at.outcomes[job.job_id], CAUSES[cause])


async def test_a_task_that_ends_well_although_cancelled_has_succeeded(at: Bench) -> None:
    inside = asyncio.Event()

    async def work() -> str:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "saved"
        return "?"

    at.tasks.task(name="work")(work)
    job = await at.start("work")
    await passed(inside)
    at.stop(job, Cause.INTERRUPTED)
    await at.end()
    assert at.outcomes[job.job_id] == Succeeded('"saved"')


async def test_a_result_after_the_time_limit_comes_too_late(at: Bench) -> None:
    async def work() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"
        return "?"

    at.tasks.task(name="work", timeout=0.05)(work)
    failed(await at.run("work"), Reason.TIME_LIMIT)


async def test_an_error_raised_on_cancellation_stands_as_the_cause_of_the_time_out(at: Bench) -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("while cleaning up")

    at.tasks.task(name="work", timeout=0.05)(work)
    outcome = failed(await at.run("work"), Reason.TIME_LIMIT)
    assert "while cleaning up" in (outcome.error.traceback or "")


async def test_a_run_that_is_ended_before_user_code_never_starts_it(at: Bench) -> None:
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)

    at.tasks.task(name="work")(work)
    job = await at.start("work")
    at.stop(job, Cause.INTERRUPTED)
    await at.end()
    assert ran == []
    assert isinstance(at.outcomes[job.job_id], Released)


async def test_a_handler_that_ignores_its_cancellation_is_recorded_and_keeps_its_slot(at: Bench) -> None:
    goes_on = asyncio.Event()

    async def work() -> str:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                pass
        return "late"

    at.tasks.task(name="work", timeout=0.05)(work)
    job = await at.start("work")
    await at.seen.wait(JobAbandoned, job_id=job.job_id)
    failed(at.outcomes[job.job_id], Reason.TIME_LIMIT)
    assert [run.job for run in at.runner.runs.values()] == [job]
    goes_on.set()
    await at.end()
    failed(at.outcomes[job.job_id], Reason.TIME_LIMIT)


async def test_an_abandoned_run_and_a_new_one_of_the_same_job_are_kept_apart(at: Bench) -> None:
    """The old run ends while the new one is under way: the new one keeps its slot and can be ended."""
    goes_on = [asyncio.Event(), asyncio.Event()]
    inside = asyncio.Event()

    async def work(ctx: JobContext) -> None:
        if ctx.attempt == 2:
            inside.set()
            await asyncio.Event().wait()
        while not goes_on[0].is_set():
            try:
                await goes_on[0].wait()
            except asyncio.CancelledError:
                pass

    at.tasks.task(name="work", timeout=0.05, retry=Retry(base=0, jitter=False))(work)
    old = await at.start("work")
    await at.seen.wait(JobAbandoned, job_id=old.job_id)
    outcome = at.outcomes.pop(old.job_id)
    assert isinstance(outcome, Failed)
    await at.engine.record(at.worker, {"j": str(old.job_id), "l": old.lane, "v": old.vt, "a": 1, "o": "error", "d": 0})
    (new,) = await at.engine.claim(at.worker)
    assert (new.job_id, new.attempt) == (old.job_id, 2)
    at.runner.start(new)
    await passed(inside)
    assert len(at.runner.runs) == 2
    goes_on[0].set()
    while len(at.runner.runs) > 1:
        at.freed.clear()
        await passed(at.freed)
    at.stop(new, Cause.INTERRUPTED)
    await at.end()


# -- threads ---------------------------------------------------------------------------------------------------------


async def test_a_def_task_runs_in_a_thread_and_sees_its_job(at: Bench) -> None:
    def work(ctx: JobContext) -> list[str]:
        running = current_job()
        assert running is ctx and running is not None
        return [threading.current_thread().name, str(running.job_id)]

    at.tasks.task(name="work")(work)
    job = await at.start("work")
    await at.end()
    outcome = at.outcomes[job.job_id]
    assert isinstance(outcome, Succeeded) and str(job.job_id) in outcome.result and "MainThread" not in outcome.result
    assert current_job() is None


async def test_as_many_threads_as_jobs_run_at_once(boss: Session, worker_dsn: str) -> None:
    barrier = threading.Barrier(50)

    def work() -> None:
        barrier.wait(60)

    async with bench(worker_dsn, boss, AioQueue(), concurrency=50) as at:
        at.tasks.task(name="work")(work)
        jobs = [await at.start("work") for _ in range(50)]
        await at.end()
        assert all(at.outcomes[job.job_id] == Succeeded("null") for job in jobs)


async def test_a_thread_at_its_time_limit_is_asked_to_stop(at: Bench) -> None:
    def work(ctx: JobContext) -> str:
        while not ctx.should_stop:
            pass
        return "stopped"

    at.tasks.task(name="work", timeout=0.05)(work)
    failed(await at.run("work"), Reason.TIME_LIMIT)


@pytest.mark.parametrize("looks", [True, False])
async def test_what_a_thread_returns_counts_unless_it_has_seen_that_it_is_to_stop(at: Bench, looks: bool) -> None:
    inside, stopped = threading.Event(), threading.Event()

    def work(ctx: JobContext) -> str:
        inside.set()
        stopped.wait(60)
        return "half" if looks and ctx.should_stop else "whole"

    at.tasks.task(name="work")(work)
    job = await at.start("work")
    await asyncio.to_thread(inside.wait, 60)
    at.stop(job, Cause.INTERRUPTED)
    stopped.set()
    await at.end()
    outcome = at.outcomes[job.job_id]
    if looks:
        assert isinstance(outcome, Released) and outcome.reason is Reason.INTERRUPTED
    else:
        assert outcome == Succeeded('"whole"')


async def test_a_thread_that_goes_on_keeps_its_slot_and_its_outcome_is_written_without_it(at: Bench) -> None:
    goes_on = threading.Event()

    def work() -> str:
        goes_on.wait(60)
        return "late"

    at.tasks.task(name="work", timeout=0.05)(work)
    job = await at.start("work")
    try:
        await at.seen.wait(JobAbandoned, job_id=job.job_id)
        failed(at.outcomes[job.job_id], Reason.TIME_LIMIT)
        assert len(at.runner.runs) == 1
    finally:
        goes_on.set()
    await at.end()
    failed(at.outcomes[job.job_id], Reason.TIME_LIMIT)


# -- transactions ----------------------------------------------------------------------------------------------------


async def test_a_job_that_gets_no_connection_in_time_is_handed_back_spared(boss: Session, worker_dsn: str) -> None:
    async with bench(worker_dsn, boss, AioQueue(), pool=PoolSettings(size=3), limits=LimitSettings(transaction_wait=0.05)) as at:
        goes_on = asyncio.Event()
        inside = asyncio.Event()
        ran: list[int] = []

        async def holds(tx: JobTransaction) -> None:
            inside.set()
            await goes_on.wait()

        async def waits(tx: JobTransaction) -> None:
            ran.append(1)

        at.tasks.task(name="holds")(holds)
        at.tasks.task(name="waits")(waits)
        await at.start("holds")
        await passed(inside)
        job = await at.start("waits")
        while job.job_id not in at.outcomes:
            at.freed.clear()
            await passed(at.freed)
        goes_on.set()
        outcome = at.outcomes[job.job_id]
        assert isinstance(outcome, Released) and outcome.reason is Reason.NO_CONNECTION and outcome.delay > 0
        assert ran == []


async def test_a_job_that_is_ended_while_it_waits_for_a_connection_ends_at_once(boss: Session, worker_dsn: str) -> None:
    """A stopping worker has less time than a wait may take."""
    limits = LimitSettings(transaction_wait=3600)
    async with bench(worker_dsn, boss, AioQueue(), pool=PoolSettings(size=3), limits=limits) as at:
        goes_on = asyncio.Event()
        inside: list[int] = []

        async def work(tx: JobTransaction, n: int) -> int:
            inside.append(n)
            await goes_on.wait()
            return n

        at.tasks.task(name="work")(work)
        await at.start("work", '{"n": 1}')
        await turn_until(lambda: inside)
        job = await at.start("work", '{"n": 2}')
        await turn_until(lambda: at.database.waiting)
        at.stop(job, Cause.INTERRUPTED)
        while job.job_id not in at.outcomes:
            at.freed.clear()
            await passed(at.freed)
        outcome = at.outcomes[job.job_id]
        assert isinstance(outcome, Released) and outcome.reason is Reason.INTERRUPTED
        goes_on.set()
        await at.end()
        assert inside == [1]


async def test_an_abandoned_transaction_cannot_commit_once_its_time_out_is_recorded(at: Bench) -> None:
    goes_on = asyncio.Event()

    async def work(tx: JobTransaction) -> None:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                pass

    at.tasks.task(name="work", timeout=0.05)(work)
    job = await at.start("work")
    await at.seen.wait(JobAbandoned, job_id=job.job_id)
    failed(at.outcomes[job.job_id], Reason.TIME_LIMIT)
    goes_on.set()
    await at.end()
    assert not at.settled_jobs
    assert await at.state(job) == "running", "the recorder has the outcome, nobody else wrote one"


async def test_the_context_tells_the_facts_of_the_job(at: Bench) -> None:
    facts: list[Any] = []

    async def work(ctx: JobContext) -> None:
        facts.append((ctx.job_id, ctx.task, ctx.queue, ctx.priority, ctx.tenant, ctx.attempt, ctx.spared, ctx.max_attempts))

    at.tasks.task(name="work")(work)
    job = await at.start("work", tenant="a", max_attempts=9)
    await at.end()
    assert facts == [(job.job_id, "work", "default", 0, "a", 1, 0, 9)]
    assert not at.seen.all(JobLost)
