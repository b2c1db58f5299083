"""Runs one claimed job: payload → context → user code in an asyncio task of its own → an Outcome.

What an exception means is decided in attempt.py; the outcome is handed on. Records nothing but the success of a job with a
transaction of its own, which its commit records. User code is cancelled once, by `task.cancel()`, and only while it runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol

import psycopg

from .attempt import Cause, Run
from .claimed import Claimed, Reports
from .context import HeldSession, InTransaction, JobContext, JobTransaction, running_job
from .database import NoFreeConnection
from .definition import Holds, TaskDefinition
from .errors import InvalidPayload, InvalidResult, LeaseLost, TenantRequired, TransactionViolation
from .events import JobAbandoned, JobLost, Observers
from .middleware import CallNext, Middleware, wrap
from .outcome import ErrorText, Failed, Outcome, Reason, Released, Succeeded
from .result_codec import PLAIN_TYPES
from .settings import LimitSettings, TenantSettings
from .task import Task
from .threads import JobThreads

# The members of an enum are looked up by code in Python: at each job that would show.
_IN_TRANSACTION = (Holds.TRANSACTION, Holds.SESSION)
_CONTEXT = Holds.CONTEXT


class OwnTransaction(Protocol):
    """The transaction a task runs in."""

    @property
    def face(self) -> InTransaction[Any]:
        """What user code is given."""
        ...

    @property
    def settle(self) -> Callable[[], Awaitable[None]] | None:
        """Sends what is still to be sent when user code has returned, in its place; None: nothing is."""
        ...

    async def finish(self, result: str) -> None:
        """Record success and commit."""
        ...


class Transactions(Protocol):
    """Opens transactions for jobs."""

    def own(self, job: Claimed, seconds: float) -> AbstractAsyncContextManager[OwnTransaction]:
        """The one that a task runs in."""
        ...

    def in_session(
        self, job: Claimed, seconds: float, kind: type[HeldSession[Any]]
    ) -> AbstractAsyncContextManager[OwnTransaction]:
        """As `own`, for a task that takes a session of that class."""
        ...

    def short(self, job: Claimed, seconds: float) -> AbstractAsyncContextManager[JobTransaction]:
        """One on the way."""
        ...


class Sink(Protocol):
    """Where outcomes go: the recorder."""

    def put(self, job: Claimed, outcome: Outcome) -> None:
        """Take an outcome that is still to be written."""
        ...

    def recorded_by_commit(self, job: Claimed) -> None:
        """Take note of a success that its own commit recorded."""
        ...


class Runner:
    """All runs of one worker."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., ..., Any]],
        transactions: Transactions,
        sink: Sink,
        limits: LimitSettings,
        tenants: TenantSettings,
        concurrency: int,
        observers: Observers,
        middleware: Sequence[Middleware] = (),
        resources: object = None,
        reporter: Reports | None = None,
        freed: Callable[[Claimed], None],
        abandoned: Callable[[], None],
    ) -> None:
        self.runs: dict[int, Run] = {}
        """By id(): a run that was given up on and a later attempt of its job may stand side by side."""
        self.given_up = 0
        """How many of them were given up on."""
        self._tasks = tasks
        self._transactions = transactions
        self._sink = sink
        self._limits = limits
        self._tenants = tenants
        self._observers = observers
        self._freed = freed
        self._abandoned = abandoned
        self._threads = JobThreads(concurrency)
        self._middleware = middleware
        self._resources = resources
        self._reporter = reporter
        self._next_end = math.inf
        """The earliest end of a time limit that the one timer of all runs is set to."""
        self._timer: asyncio.TimerHandle | None = None
        # A timer keeps its context: that of a run would keep its job.
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()

    def start(self, job: Claimed) -> None:
        """Start the job in an asyncio task of its own."""
        run = Run(job)
        job.resources = self._resources
        job.reporter = self._reporter
        self.runs[id(run)] = run
        # Not asyncio.create_task(): it would name the task in a call of its own.
        run.task = self._loop.create_task(self._run(run), name=job.task)

    def stop(self, run: Run, cause: Cause) -> None:
        """End a run: cancel its user code, or its wait for a connection, once. The first cause stands, but a lost lease wins."""
        if run.cause is None or cause is Cause.LEASE_LOST:
            first = run.cause is None
            run.cause = cause
            run.should_stop = True
            if first and run.task is not None and (run.in_user_code or run.waits):
                run.task.cancel()
                if run.in_user_code:
                    run.give_up_in(self._limits.abandon, self._abandon)

    def stop_all(self, cause: Cause) -> None:
        """End every run."""
        for run in list(self.runs.values()):
            self.stop(run, cause)

    def close(self) -> None:
        """Let go of what still runs: threads end with the process, what waits for the database ends now."""
        for run in self.runs.values():
            if run.task is not None and not run.in_user_code:
                run.task.cancel()
        self._threads.close()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, ends: float) -> None:
        if ends < self._next_end:
            if self._timer is not None:
                self._timer.cancel()
            self._next_end = ends
            self._timer = asyncio.get_running_loop().call_at(ends, self._end_overdue, context=self._context)

    def _end_overdue(self) -> None:
        """End what is past its time limit. One timer serves all runs: a timer each costs as much as a short job itself."""
        now = time.monotonic()
        self._next_end, self._timer = math.inf, None
        next_end = math.inf
        for run in list(self.runs.values()):
            if run.ends is not None and not run.ended_by():
                if run.ends <= now:
                    self.stop(run, Cause.TIME_LIMIT)
                else:
                    next_end = min(next_end, run.ends)
        if next_end < math.inf:
            self._set_timer(next_end)

    def _abandon(self, run: Run) -> None:
        """User code that ignores its cancellation: write how it ended; the slot stays taken until it is over.

        One that was cancelled from outside is given up on only after its time limit: until then it may still end by itself,
        and a thread that cannot be cancelled costs no more than its slot.
        """
        if run.in_user_code and run.ended_by():
            self._deliver(run, run.ended())
            rest = 0.0 if run.ends is None else run.ends + self._limits.abandon - time.monotonic()
            if run.cause is Cause.CANCELLED and rest > 0:
                run.give_up_in(rest, self._abandon)
                return
            run.abandoned = True
            self.given_up += 1
            self._observers.emit(JobAbandoned.of(run.job))
            self._abandoned()

    def _deliver(self, run: Run, outcome: Outcome) -> None:
        if run.take():
            self._sink.put(run.job, outcome)

    async def _run(self, run: Run) -> None:
        try:
            try:
                outcome = await self._begin(run)
            except _Ended as ended:
                outcome = ended.outcome
            except BaseException as error:
                # Ended while it waited for a connection; or nobody's plan (a validator that raises KeyError): the job must not
                # stay running.
                outcome = run.raised(error)
            if outcome is not None:
                self._deliver(run, outcome)
        finally:
            if run.timer is not None:
                run.timer.cancel()
            self._free(run)

    def _free(self, run: Run) -> None:
        del self.runs[id(run)]
        if run.job.reporter is not None:
            run.job.reporter.ended(run.job)
        self.given_up -= run.abandoned
        self._freed(run.job)

    def _begin(self, run: Run) -> Awaitable[Outcome | None]:
        """Return what is to be awaited for the outcome; it is None where it is recorded already or nobody's business any more.

        Raises _Ended where user code is not to be called. No coroutine: that costs as much as all that is decided here.
        """
        job = run.job
        task = self._tasks.get(job.task)
        if task is None:
            delay = min(60.0, 2.0 ** min(job.spared, 10)) * (0.5 + random.random() / 2)
            raise _Ended(Released(Reason.UNKNOWN_TASK, f"no task {job.task!r} is registered in this worker", delay))
        definition = run.definition = task.definition
        if job.tenant is None and self._tenants.requires(definition.require_tenant):
            # Enqueued before the task said so.
            raise _Ended(Failed(Reason.ERROR, ErrorText.of(TenantRequired(job.task), with_traceback=False), None))
        try:
            args, kwargs = definition.payload.load(job.payload)
        except InvalidPayload as error:
            # Dead at once, unless the task says otherwise by name: of code of two versions one may read it.
            again = run.delay(error) if InvalidPayload in definition.retry.on else None
            raise _Ended(Failed(Reason.INVALID_PAYLOAD, ErrorText.of(error, with_traceback=False), again)) from None
        holds = definition.holds
        if holds in _IN_TRANSACTION:
            run.limit = definition.timeout or self._limits.transaction_time_limit
            return self._in_transaction(run, definition, args, kwargs)
        run.limit = definition.timeout or self._limits.time_limit
        context = JobContext(job, lambda: self._transactions.short(job, run.left), run.look)
        if holds is _CONTEXT:
            args = (context, *args)
        return self._user_code(run, definition, context, args, kwargs)

    async def _in_transaction(
        self, run: Run, definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Outcome | None:
        run.waits = True
        try:
            async with self._own(run, definition) as own:
                run.waits = False
                outcome = await self._user_code(run, definition, own.face, (own.face, *args), kwargs, own.settle)
                if not isinstance(outcome, Succeeded):
                    raise _Ended(outcome)
                await own.finish(outcome.result)
        except _Ended as ended:
            return ended.outcome
        except NoFreeConnection as error:
            return Released(Reason.NO_CONNECTION, str(error), 0.1 + random.random())
        except LeaseLost:
            if run.take():
                self._observers.emit(JobLost.of(run.job))
            return None
        except TransactionViolation as error:
            cause = error.__cause__
            if isinstance(cause, _Ended) and isinstance(cause.outcome, Failed) and cause.outcome.reason is Reason.VIOLATION:
                return cause.outcome  # user code was told, and its own line stands in there
            return run.failed(error, Reason.VIOLATION)
        except InvalidResult as error:
            return Failed(Reason.INVALID_RESULT, ErrorText.of(error, with_traceback=False), None)
        except psycopg.Error as error:
            return run.failed(error)
        # Otherwise a time-out is on its way: the recorder will find this success in its place, and say so.
        if run.take():
            self._sink.recorded_by_commit(run.job)
        return None

    def _own(self, run: Run, definition: TaskDefinition) -> AbstractAsyncContextManager[OwnTransaction]:
        if definition.session is None:
            return self._transactions.own(run.job, run.limit)
        return self._transactions.in_session(run.job, run.limit, definition.session)

    async def _user_code(
        self,
        run: Run,
        definition: TaskDefinition,
        context: JobContext[Any] | InTransaction[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> Outcome:
        if run.ended_by():
            return run.ended()
        running_job.set(context)
        run.ends = time.monotonic() + run.limit
        self._set_timer(run.ends)
        run.in_user_code = True
        try:
            if self._middleware:
                value = await wrap(self._middleware, context, self._call(run, definition, args, kwargs))()
            elif definition.is_async:
                value = await definition.fn(*args, **kwargs)
            else:
                value = await self._threads.call(run, definition.fn, args, kwargs)
            if settle is not None:
                await settle()
        except BaseException as error:
            return run.raised(error)
        finally:
            run.in_user_code = False
            run.ends = None
            running_job.set(None)
            task = run.task
            while task is not None and task.cancelling():
                task.uncancel()
        if run.cause is not None and (run.saw_stop or run.ended_by(Cause.TIME_LIMIT, Cause.LEASE_LOST)):
            return run.ended()  # what returns because it was asked to stop has not done its work
        try:
            if type(value) not in PLAIN_TYPES and inspect.isawaitable(value):
                raise InvalidResult(definition.name, "the task returned an awaitable; await it in the task")
            return Succeeded(definition.result.dump(value, limit=self._limits.result))
        except InvalidResult as error:
            if inspect.iscoroutine(value):
                value.close()
            return Failed(Reason.INVALID_RESULT, ErrorText.of(error, with_traceback=False), None)

    def _call(self, run: Run, definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallNext:
        if definition.is_async:
            return partial(definition.fn, *args, **kwargs)
        return partial(self._threads.call, run, definition.fn, args, kwargs)


class _Ended(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
