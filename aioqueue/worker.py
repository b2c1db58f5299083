"""One worker: starts its steps and ends them in order; holds no policy of its own.

    Worker.run
    ├── Heartbeat    beats; the last to stop                      renew.py
    ├── Recorder x2  outcomes in batches                          record.py
    ├── Unparker     jobs that wait for a limit                   unpark.py
    ├── Maintenance  tick, promote, rescue, sweep                 maintenance/
    ├── Pruner       partitions of id time: made ahead, dropped   maintenance/prune.py
    ├── Reporter     how far jobs are                             report.py
    ├── Guard        a thread: watches this loop                  guard.py
    ├── Claimer      free slots + wake-up or poll → claim         claim.py, one_claim.py
    └── a job each   an asyncio task of its own                   run.py, user_code.py

What the steps have of each other stands in steps.py. A loop that fails is started again (keep.py). How the worker stops stands in
stop.py, what a user holds of it in running.py.
The listener and the notifier belong to the app (services.py), which lends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import anyio
import psycopg

from .database import Database
from .doctor.start import check_start
from .events import Observers, WorkerStarted, WorkerStopped
from .keep import keep_running
from .listen import Hints
from .middleware import Middleware
from .patience import once_reached
from .rehearse import Rehearsal
from .session_factory import EngineSession
from .settings import Settings, WorkerSettings
from .steps import Steps
from .stop import LAST_WORD, Stop
from .store import Store
from .task import Task

STANDSTILL = 5.0
"""Seconds beyond the poll interval after which a claim loop that has not turned counts as stuck."""
RECORDERS = 2
"""Writes of outcomes in flight at once."""


class WakeUps(Protocol):
    """The app's side of wake-ups."""

    @property
    def listening(self) -> bool:
        """Whether LISTEN is in force, or cannot be."""
        ...

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be work."""
        ...

    def off_ready(self, callback: Callable[[], None]) -> None:
        """Stop calling back."""
        ...


class Worker:
    """One worker: its row, its loops, its runs. Made by `AioQueue.worker()`; run once."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        wake_ups: WakeUps,
        tasks: Mapping[str, Task[..., ..., Any]],
        settings: Settings,
        *,
        hints: Hints,
        worker: WorkerSettings,
        middleware: Sequence[Middleware],
        resources: object,
        grace: float,
        standalone: bool,
        started: asyncio.Event,
    ) -> None:
        self._database = database
        self._observers = observers
        self._wake_ups = wake_ups
        self._settings = worker
        self._standalone = standalone
        self._start_timeout = settings.pool.start_timeout
        self._refusal: str | None = None
        """Why the database cannot be reached, while the start waits for it."""
        self.abandoned = 0
        """Jobs that ignored their cancellation; a standalone worker stops then, an embedded one claims nothing more."""
        self.started = started
        """Set once the worker has its row and claims."""
        steps = self._steps = Steps(
            database,
            store,
            observers,
            tasks,
            settings,
            hints=hints,
            worker=worker,
            middleware=middleware,
            resources=resources,
            problems=self.problems,
            abandoned=self._job_abandoned,
        )
        self.heartbeat = steps.heartbeat
        self.slots = steps.slots
        """Where its jobs run, with what runs them and writes their outcomes."""
        self._stop = Stop(
            steps.slots,
            steps.claimer,
            observers,
            limits=settings.limits,
            grace=grace,
            drain=worker.drain,
            worker=lambda: steps.heartbeat.worker,
            hand_back_unknown=steps.one_claim.hand_back_unknown,
        )

        self._check: Callable[[EngineSession | None], Awaitable[object]] = lambda engine: check_start(
            database, store, observers, settings.tenants, engine
        )
        sessions = next((t.definition.session for t in tasks.values() if t.definition.session is not None), None)
        self._check_sessions: Callable[[], Awaitable[EngineSession]] | None = (
            None if sessions is None else lambda: sessions.opener.check(database, store, settings)
        )
        self._rehearse = Rehearsal(store)

    @property
    def unwritten(self) -> int:
        """Outcomes that the database did not take before the worker had to stop; others run these jobs again."""
        return self._stop.unwritten

    @property
    def running(self) -> int:
        """Jobs that run now."""
        return len(self._steps.runner.runs)

    def problems(self) -> list[str]:
        """Say what keeps the worker from its work now; empty when all is well."""
        found = []
        if not self.started.is_set():
            why = self._refusal
            found.append("the worker has not started yet" if why is None else f"cannot reach the database: {why}")
        elif not self.heartbeat.proven:
            found.append("the lease is in doubt: no beat was accepted in time")
        if self.abandoned:
            found.append(f"{self.abandoned} jobs ignored their cancellation; the worker claims nothing more")
        elif self._stop.begun:
            found.append("the worker is stopping")
        claimer, refused = self._steps.claimer, self._steps.recorder.refused
        stands = time.monotonic() - claimer.turned
        if not found and stands > STANDSTILL + self._settings.poll and not claimer.waits_for_slots:
            found.append(f"the claim loop has not turned for {stands:.0f} s")
        if refused:
            found.append(f"the database refuses {refused} outcomes; they are tried again")
        if not self._wake_ups.listening:
            found.append("the listener is not connected: work is found by polling only")
        return found

    def stop(self, *, hurry: bool = False) -> None:
        """Ask the worker to stop: drain for the grace period; `hurry` ends what runs now and hands it back, spared."""
        self._stop.ask(hurry=hurry)

    async def run(self) -> None:
        """Work until `stop()`, until nothing is ready (drain), or until this task is cancelled; then stop in order.

        Whatever way it ends, claiming stops first, jobs have the grace period, outcomes are recorded, the heartbeat goes
        last. A second cancellation would break into that: see running.py. Raises psycopg.OperationalError when the database
        cannot be reached within `PoolSettings.start_timeout`, UnsafeDatabase when it would not keep tenants apart
        (doctor/start.py).
        """
        await once_reached(self._start, self._start_timeout, self._note_refusal)
        steps = self._steps
        claims = [_keep(steps.claimer.run, "claimer"), _keep(steps.claimer.run_second, "second claim")]
        loops = [
            *self.start_writing(),
            _keep(steps.maintenance.run, "maintenance"),
            _keep(steps.pruner.run, "pruner"),
            _keep(steps.heartbeat.run, "heartbeat"),
        ]
        written = False
        try:
            steps.guard.start()
            self._wake_ups.on_ready(steps.wake)
            self._observers.emit(WorkerStarted(steps.heartbeat.worker, steps.queues, self._settings.concurrency))
            self.started.set()
            await self._stop.wait()
        finally:
            self._wake_ups.off_ready(steps.wake)
            # An enclosing anyio scope would cancel again at every await; the stop is bounded by its own limits.
            with anyio.CancelScope(shield=True):
                try:
                    written = await self._stop.carry_out(claims)
                finally:
                    await self._end(loops, resign=written)
        self._observers.emit(WorkerStopped(steps.heartbeat.worker))

    def start_writing(self) -> list[asyncio.Task[None]]:
        """Start the loops that write what becomes of jobs, and what follows from that."""
        return [
            *(_keep(self._steps.recorder.run, "recorder") for _ in range(RECORDERS)),
            _keep(self._steps.unparker.run, "unparker"),
            _keep(self._steps.reporter.run, "reporter"),
        ]

    async def _start(self) -> None:
        await self._check(None if self._check_sessions is None else await self._check_sessions())
        if not self._database.pooler:
            self._database.rehearse = self._rehearse
            async with self._database.runtime() as conn:
                await self._rehearse(conn)
        await self.heartbeat.register()

    def _note_refusal(self, error: str) -> None:
        self._refusal = error

    async def _end(self, loops: Sequence[asyncio.Task[None]], *, resign: bool) -> None:
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
        await self._steps.guard.stop()
        await self._steps.reporter.clear(LAST_WORD)
        self.heartbeat.close()
        if resign:
            with contextlib.suppress(psycopg.Error):
                await self.heartbeat.resign(LAST_WORD)
        self._steps.runner.close()

    def _job_abandoned(self) -> None:
        self.abandoned += 1
        self.slots.freed()
        self._stop.claim_no_more()
        if self._standalone:
            self.stop()


def _keep(run: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(keep_running(run, name), name=f"aioqueue {name}")
