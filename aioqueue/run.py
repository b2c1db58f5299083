"""Runs claimed jobs, each in an asyncio task of its own, ends them (time limit, cancel, lost lease, stop), hands on the outcome.

How user code is called stands in user_code.py, what an exception means in attempt.py. User code is cancelled once, by
`task.cancel()`, and only while it runs; what ignores that is given up on.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .attempt import Cause, Run
from .claimed import Claimed, Reports
from .events import JobAbandoned, Observers
from .middleware import Middleware
from .outcome import Outcome
from .settings import LimitSettings, TenantSettings
from .task import Task
from .threads import JobThreads
from .user_code import Ended, Transactions, UserCode


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
        self._sink = sink
        self._limits = limits
        self._observers = observers
        self._freed = freed
        self._abandoned = abandoned
        self._threads = JobThreads(concurrency)
        self._user_code = UserCode(
            tasks=tasks,
            transactions=transactions,
            limits=limits,
            tenants=tenants,
            observers=observers,
            middleware=middleware,
            threads=self._threads,
            set_timer=self._set_timer,
            recorded_by_commit=sink.recorded_by_commit,
        )
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
                outcome = await self._user_code.begin(run)
            except Ended as ended:
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
