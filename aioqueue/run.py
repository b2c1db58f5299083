"""Runs one claimed job: payload → context → user code in an asyncio task of its own → an Outcome.

Turns everything user code can do into an outcome, and hands that on; it records nothing but the success of a job with a
transaction of its own, which its commit records. User code is cancelled once, by `task.cancel()`, and only while it runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Any, Protocol

import psycopg

from .context import JobContext, JobTransaction, current_job
from .database import NoFreeConnection
from .errors import InvalidPayload, InvalidResult, LeaseLost, TimeLimitExceeded, TransactionViolation
from .events import JobAbandoned, JobLost, Observers
from .job import Claimed
from .outcome import (
    Cancel,
    Cancelled,
    ErrorText,
    Failed,
    Outcome,
    Reason,
    Released,
    RetryIn,
    Snooze,
    Snoozed,
    Succeeded,
)
from .settings import LimitSettings
from .task import Holds, Task, TaskDefinition


class Cause(Enum):
    """Why the runtime ended a run."""

    TIME_LIMIT = "time limit"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    LEASE_LOST = "lease lost"


class OwnTransaction(Protocol):
    """The transaction a task runs in."""

    face: JobTransaction

    async def finish(self, result: str) -> None:
        """Record success and commit."""
        ...


class Transactions(Protocol):
    """Opens transactions for jobs."""

    def own(self, job: Claimed, seconds: float) -> AbstractAsyncContextManager[OwnTransaction]:
        """The one that a task runs in."""
        ...

    def short(self, job: Claimed, seconds: float) -> AbstractAsyncContextManager[JobTransaction]:
        """One on the way."""
        ...


class Sink(Protocol):
    """Where outcomes go: the recorder."""

    def put(self, job: Claimed, outcome: Outcome) -> None:
        """Take an outcome that is still to be written."""
        ...

    def settled(self, job: Claimed) -> None:
        """Take note of a success that its own commit recorded."""
        ...


class Run:
    """One job in this process, from its claim until its slot is free again."""

    __slots__ = (
        "abandoned",
        "blocked",
        "cause",
        "definition",
        "ends",
        "in_user_code",
        "job",
        "limit",
        "put",
        "should_stop",
        "started",
        "task",
        "thread",
        "timers",
    )

    def __init__(self, job: Claimed) -> None:
        self.job = job
        self.definition: TaskDefinition | None = None
        self.ends: float | None = None
        """When its time limit is over, by time.monotonic(); None while no user code runs."""
        self.blocked: str | None = None
        """What the guard saw it do to the event loop."""
        self.abandoned = False
        self.task: asyncio.Task[None] | None = None
        self.cause: Cause | None = None
        self.in_user_code = False
        self.should_stop = False
        self.put = False
        self.thread: asyncio.Future[Any] | None = None
        self.limit = 0.0
        self.started = 0.0
        self.timers: list[asyncio.TimerHandle] = []

    def ended_by(self, *causes: Cause) -> bool:
        """Whether the runtime has ended it for one of these causes (none given: for any)."""
        return self.cause is not None and (not causes or self.cause in causes)

    def delay(self, error: BaseException) -> float | None:
        """Seconds until it is tried again after `error`; None: dead."""
        failures = self.job.failures
        if self.definition is None or failures >= self.job.max_attempts:
            return None
        return self.definition.retry.delay(error, failures=failures, random=random.random)


class Runner:
    """All runs of one worker."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., ..., Any]],
        transactions: Transactions,
        sink: Sink,
        limits: LimitSettings,
        concurrency: int,
        observers: Observers,
        freed: Callable[[], None],
        abandoned: Callable[[], None],
    ) -> None:
        self.runs: dict[tuple[object, ...], Run] = {}
        """By fence: a run that was given up on and a later attempt of its job may stand side by side."""
        self._tasks = tasks
        self._transactions = transactions
        self._sink = sink
        self._limits = limits
        self._concurrency = concurrency
        self._observers = observers
        self._freed = freed
        self._abandoned = abandoned
        self._threads: ThreadPoolExecutor | None = None

    def start(self, job: Claimed) -> None:
        """Start the job in an asyncio task of its own."""
        run = Run(job)
        self.runs[job.fence] = run
        run.task = asyncio.create_task(self._run(run), name=f"aioqueue job {job.job_id}")

    def stop(self, run: Run, cause: Cause) -> None:
        """End a run: cancel its user code once. The first cause stands, but a lost lease overrides it."""
        if run.cause is None or cause is Cause.LEASE_LOST:
            first = run.cause is None
            run.cause = cause
            run.should_stop = True
            if first and run.in_user_code and run.task is not None:
                run.task.cancel()
                run.timers.append(asyncio.get_running_loop().call_later(self._limits.abandon, self._abandon, run))

    def stop_all(self, cause: Cause) -> None:
        """End every run."""
        for run in list(self.runs.values()):
            self.stop(run, cause)

    def close(self) -> None:
        """Let go of what still runs: threads end with the process, what waits for the database ends now."""
        for run in self.runs.values():
            if run.task is not None and not run.in_user_code:
                run.task.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _abandon(self, run: Run) -> None:
        """User code that ignores its cancellation: write how it ended; the slot stays taken until it is over."""
        if run.in_user_code and run.ended_by():
            run.abandoned = True
            self._deliver(run, self._ended_by(run))
            self._observers.emit(JobAbandoned(run.job.job_id, run.job.task, run.job.attempt))
            self._abandoned()

    def _deliver(self, run: Run, outcome: Outcome) -> None:
        if not run.put:
            run.put = True
            self._sink.put(run.job, outcome)

    async def _run(self, run: Run) -> None:
        try:
            try:
                outcome = await self._execute(run)
            except BaseException as error:
                # Nobody's plan (a validator that raises KeyError, a task that cancelled itself): the job must not stay running.
                outcome = self._failed(run, error, Reason.ERROR)
            if outcome is not None:
                self._deliver(run, outcome)
        finally:
            for timer in run.timers:
                timer.cancel()
            self._free(run)

    def _free(self, run: Run) -> None:
        self.runs.pop(run.job.fence, None)
        self._freed()

    async def _execute(self, run: Run) -> Outcome | None:
        """Return the outcome, or None where it is recorded already or nobody's business any more."""
        job = run.job
        task = self._tasks.get(job.task)
        if task is None:
            delay = min(60.0, 2.0 ** min(job.spared, 10)) * (0.5 + random.random() / 2)
            return Released(Reason.UNKNOWN_TASK, f"no task {job.task!r} is registered in this worker", delay)
        definition = run.definition = task.definition
        try:
            args, kwargs = definition.payload.load(job.payload)
        except InvalidPayload as error:
            return Failed(Reason.INVALID_PAYLOAD, ErrorText.of(error, with_traceback=False), None)
        if definition.holds is Holds.TRANSACTION:
            run.limit = definition.timeout or self._limits.transaction_time_limit
            return await self._in_transaction(run, definition, args, kwargs)
        run.limit = definition.timeout or self._limits.time_limit
        context = JobContext(job, lambda: self._transactions.short(job, self._left(run)), lambda: run.should_stop)
        if definition.holds is Holds.CONTEXT:
            args = (context, *args)
        return await self._user_code(run, definition, context, args, kwargs)

    def _left(self, run: Run) -> float:
        return max(0.001, run.started + run.limit - asyncio.get_running_loop().time())

    async def _in_transaction(
        self, run: Run, definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Outcome | None:
        try:
            async with self._transactions.own(run.job, run.limit) as own:
                outcome = await self._user_code(run, definition, own.face, (own.face, *args), kwargs)
                if not isinstance(outcome, Succeeded):
                    raise _RollBack(outcome)
                await own.finish(outcome.result)
        except _RollBack as ended:
            return ended.outcome
        except NoFreeConnection as error:
            return Released(Reason.NO_CONNECTION, str(error), 0.1 + random.random())
        except LeaseLost:
            self._observers.emit(JobLost(run.job.job_id, run.job.task, run.job.attempt))
            return None
        except TransactionViolation as error:
            return self._failed(run, error, Reason.VIOLATION)
        except InvalidResult as error:
            return Failed(Reason.INVALID_RESULT, ErrorText.of(error, with_traceback=False), None)
        except psycopg.Error as error:
            return self._failed(run, error, Reason.ERROR)
        if run.put:
            return None
        run.put = True
        self._sink.settled(run.job)
        return None

    async def _user_code(
        self,
        run: Run,
        definition: TaskDefinition,
        context: JobContext | JobTransaction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Outcome:
        if run.ended_by():
            return self._ended_by(run)
        loop = asyncio.get_running_loop()
        run.started = loop.time()
        current_job.set(context)
        timer = loop.call_later(run.limit, self.stop, run, Cause.TIME_LIMIT)
        run.ends = time.monotonic() + run.limit
        run.in_user_code = True
        try:
            if definition.is_async:
                value = await definition.fn(*args, **kwargs)
            else:
                value = await self._in_thread(run, definition.fn, args, kwargs)
        except BaseException as error:
            return self._raised(run, error)
        finally:
            run.in_user_code = False
            run.ends = None
            timer.cancel()
            current_job.set(None)
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()
        if run.ended_by(Cause.TIME_LIMIT, Cause.LEASE_LOST):
            return self._ended_by(run)
        try:
            if inspect.isawaitable(value):
                raise InvalidResult(definition.name, "the task returned an awaitable; await it in the task")
            return Succeeded(definition.result.dump(value, limit=self._limits.result))
        except InvalidResult as error:
            if inspect.iscoroutine(value):
                value.close()
            return Failed(Reason.INVALID_RESULT, ErrorText.of(error, with_traceback=False), None)

    async def _in_thread(self, run: Run, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="aioqueue job")
        context = contextvars.copy_context()
        run.thread = asyncio.get_running_loop().run_in_executor(self._threads, lambda: context.run(_call, fn, args, kwargs))
        try:
            return _unwrap(await asyncio.shield(run.thread))
        except asyncio.CancelledError:
            if run.cause is None:
                raise
            # should_stop has told it; a thread cannot be stopped, so it keeps its slot until it is over. After the abandon
            # limit its outcome is written without it.
            await asyncio.wait([run.thread])
            return _unwrap(run.thread.result())

    def _raised(self, run: Run, error: BaseException) -> Outcome:
        """Turn what user code raised into an outcome."""
        if isinstance(error, asyncio.CancelledError):
            if run.ended_by():
                return self._ended_by(run)
            # Otherwise the task cancelled itself or raised it: a failure like any other.
        elif run.ended_by(Cause.TIME_LIMIT, Cause.LEASE_LOST):
            return self._ended_by(run, error)
        match error:
            case Snooze():
                return Snoozed(error.delay)
            case Cancel():
                return Cancelled(error.reason)
            case RetryIn():
                last = run.job.failures >= run.job.max_attempts
                return Failed(Reason.ERROR, ErrorText.of(error, with_traceback=False), None if last else error.delay)
            case psycopg.errors.QueryCanceled() if self._left(run) < 0.05 * run.limit:
                run.cause = Cause.TIME_LIMIT
                return self._ended_by(run, error)
            case TransactionViolation():
                return self._failed(run, error, Reason.VIOLATION)
            case _:
                return self._failed(run, error, Reason.ERROR)

    def _failed(self, run: Run, error: BaseException, reason: Reason) -> Failed:
        return Failed(reason, ErrorText.of(error), run.delay(error))

    def _ended_by(self, run: Run, error: BaseException | None = None) -> Outcome:
        match run.cause:
            case Cause.TIME_LIMIT:
                limit = TimeLimitExceeded(run.limit)
                limit.__cause__ = error
                if run.blocked is not None:
                    limit.add_note(run.blocked)
                return self._failed(run, limit, Reason.TIME_LIMIT)
            case Cause.CANCELLED:
                return Cancelled("cancelled while it ran")
            case Cause.INTERRUPTED:
                return Released(Reason.INTERRUPTED, "its worker stopped")
            case _:
                return Released(Reason.INTERRUPTED, "its worker could not renew its lease")


class _RollBack(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
    # An exception such as SystemExit or StopIteration must not pass through an executor's future.
    try:
        return fn(*args, **kwargs), None
    except BaseException as error:
        return None, error


def _unwrap(result: tuple[Any, BaseException | None]) -> Any:
    value, error = result
    if error is not None:
        raise error
    return value
