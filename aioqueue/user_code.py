"""Calls the user code of one run: payload → context → function → an Outcome, in the transaction that the task takes, if any.

Records nothing but the success of a job with a transaction of its own, which its commit records. Runs begin and end in run.py,
what an exception means is decided in attempt.py.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol

import psycopg

from .attempt import Cause, Run
from .claimed import Claimed
from .context import HeldSession, InTransaction, JobContext, JobTransaction, running_job
from .database import NoFreeConnection
from .definition import Holds, TaskDefinition
from .errors import InvalidPayload, InvalidResult, LeaseLost, TenantRequired, TransactionViolation
from .events import JobLost, Observers
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


class Ended(Exception):
    """User code is not called, or what it did is undone: the outcome is there already."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class UserCode:
    """The tasks of one worker, as its runs call them."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., ..., Any]],
        transactions: Transactions,
        limits: LimitSettings,
        tenants: TenantSettings,
        observers: Observers,
        middleware: Sequence[Middleware],
        threads: JobThreads,
        set_timer: Callable[[float], None],
        recorded_by_commit: Callable[[Claimed], None],
    ) -> None:
        """`set_timer` is told when the time limit of a run will be over, by time.monotonic()."""
        self._tasks = tasks
        self._transactions = transactions
        self._limits = limits
        self._tenants = tenants
        self._observers = observers
        self._middleware = middleware
        self._threads = threads
        self._set_timer = set_timer
        self._recorded_by_commit = recorded_by_commit

    def begin(self, run: Run) -> Awaitable[Outcome | None]:
        """Return what is to be awaited for the outcome; it is None where it is recorded already or nobody's business any more.

        Raises Ended where user code is not to be called. No coroutine: that costs as much as all that is decided here.
        """
        job = run.job
        task = self._tasks.get(job.task)
        if task is None:
            delay = min(60.0, 2.0 ** min(job.spared, 10)) * (0.5 + random.random() / 2)
            raise Ended(Released(Reason.UNKNOWN_TASK, f"no task {job.task!r} is registered in this worker", delay))
        definition = run.definition = task.definition
        if job.tenant is None and self._tenants.requires(definition.require_tenant):
            # Enqueued before the task said so.
            raise Ended(Failed(Reason.ERROR, ErrorText.of(TenantRequired(job.task), with_traceback=False), None))
        try:
            args, kwargs = definition.payload.load(job.payload)
        except InvalidPayload as error:
            # Dead at once, unless the task says otherwise by name: of code of two versions one may read it.
            again = run.delay(error) if InvalidPayload in definition.retry.on else None
            raise Ended(Failed(Reason.INVALID_PAYLOAD, ErrorText.of(error, with_traceback=False), again)) from None
        holds = definition.holds
        if holds in _IN_TRANSACTION:
            run.limit = definition.timeout or self._limits.transaction_time_limit
            return self._in_transaction(run, definition, args, kwargs)
        run.limit = definition.timeout or self._limits.time_limit
        context = JobContext(job, lambda: self._transactions.short(job, run.left), run.look)
        if holds is _CONTEXT:
            args = (context, *args)
        return self._call(run, definition, context, args, kwargs)

    async def _in_transaction(
        self, run: Run, definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Outcome | None:
        run.waits = True
        try:
            async with self._own(run, definition) as own:
                run.waits = False
                outcome = await self._call(run, definition, own.face, (own.face, *args), kwargs, own.settle)
                if not isinstance(outcome, Succeeded):
                    raise Ended(outcome)
                await own.finish(outcome.result)
        except Ended as ended:
            return ended.outcome
        except NoFreeConnection as error:
            return Released(Reason.NO_CONNECTION, str(error), 0.1 + random.random())
        except LeaseLost:
            if run.take():
                self._observers.emit(JobLost.of(run.job))
            return None
        except TransactionViolation as error:
            cause = error.__cause__
            if isinstance(cause, Ended) and isinstance(cause.outcome, Failed) and cause.outcome.reason is Reason.VIOLATION:
                return cause.outcome  # user code was told, and its own line stands in there
            return run.failed(error, Reason.VIOLATION)
        except InvalidResult as error:
            return Failed(Reason.INVALID_RESULT, ErrorText.of(error, with_traceback=False), None)
        except psycopg.Error as error:
            return run.failed(error)
        # Otherwise a time-out is on its way: the recorder will find this success in its place, and say so.
        if run.take():
            self._recorded_by_commit(run.job)
        return None

    def _own(self, run: Run, definition: TaskDefinition) -> AbstractAsyncContextManager[OwnTransaction]:
        if definition.session is None:
            return self._transactions.own(run.job, run.limit)
        return self._transactions.in_session(run.job, run.limit, definition.session)

    async def _call(
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
                value = await wrap(self._middleware, context, self._innermost(run, definition, args, kwargs))()
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

    def _innermost(self, run: Run, definition: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallNext:
        if definition.is_async:
            return partial(definition.fn, *args, **kwargs)
        return partial(self._threads.call, run, definition.fn, args, kwargs)
