"""Composes one worker from its steps, and ends them in order; holds no policy of its own.

    Worker.run
    ├── Heartbeat    beats; the last to stop                      renew.py
    ├── Recorder x2  outcomes in batches                          record.py
    ├── Unparker     jobs that wait for a limit                   unpark.py
    ├── Maintenance  tick, promote, rescue, sweep                 maintenance/
    ├── Pruner       partitions of id time: made ahead, dropped   maintenance/prune.py
    ├── Reporter     how far jobs are                             report.py
    ├── Guard        a thread: watches this loop                  guard.py
    ├── Claimer      free slots + wake-up or poll → claim         claim.py, ask.py
    └── a job each   an asyncio task of its own                   run.py, user_code.py

A loop that fails is started again (keep.py). How the worker stops stands in stop.py, what a user holds of it in running.py.
The listener and the notifier belong to the app (services.py), which lends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

import anyio
import psycopg

from .ask import Asker
from .attempt import Cause
from .claim import Claimer
from .database import Database
from .doctor.start import check_start
from .events import Observers, WorkerStarted, WorkerStopped
from .floor import Floors
from .guard import Guard
from .keep import keep_running
from .lanes import Lanes
from .listen import Hints
from .maintenance.prune import Pruner
from .maintenance.service import Maintenance
from .middleware import Middleware
from .outcome import Cancelled, Reason, Released
from .patience import once_reached
from .pending import encode
from .record import Recorder
from .rehearse import Rehearsal
from .renew import Heartbeat
from .report import Reporter
from .run import Runner
from .session_factory import EngineSession, connections_of
from .settings import DEFAULT_QUEUE, Settings, WorkerSettings, parse_queues
from .slots import Slots
from .stop import LAST_WORD, Stop
from .store import LOWEST_ID, Store
from .task import Task
from .transaction import JobTransactions
from .unpark import Unparker
from .version import VERSION

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
        self._hints = hints
        self._settings = worker
        self._standalone = standalone
        self._start_timeout = settings.pool.start_timeout
        self._refusal: str | None = None
        """Why the database cannot be reached, while the start waits for it."""
        self.abandoned = 0
        """Jobs that ignored their cancellation; a standalone worker stops then, an embedded one claims nothing more."""
        queues = parse_queues(worker.queues)
        if not queues:
            queues = dict.fromkeys([DEFAULT_QUEUE, *sorted({t.definition.queue for t in tasks.values()})], 1)
        self.queues = tuple(queues)
        self.started = started
        """Set once the worker has its row and claims."""

        self._check: Callable[[EngineSession | None], Awaitable[object]] = lambda engine: check_start(
            database, store, observers, settings.tenants, engine
        )
        sessions = next((t.definition.session for t in tasks.values() if t.definition.session is not None), None)
        self._check_sessions: Callable[[], Awaitable[EngineSession]] | None = (
            None if sessions is None else lambda: sessions.opener.check(database, store, settings)
        )
        self._rehearse = Rehearsal(store)
        factory = None if sessions is None else settings.session
        lanes = Lanes(queues)
        floors = Floors(lanes.all(), LOWEST_ID, suspects=lanes.suspects())
        slots = self._slots = Slots(worker.concurrency)
        unparker = self._unparker = slots.unparker = Unparker(database, store, observers, floors, ready=self._ready)
        recorder = self._recorder = slots.recorder = Recorder(
            database,
            store,
            observers,
            capacity=max(1000, 4 * worker.concurrency),
            hints=hints,
            ready=self._ready,
            ended=unparker.ended,
        )
        reporter = self._reporter = Reporter(database, store, observers, reported=lambda: hints.hint("progress"))
        runner = self._runner = slots.runner = Runner(
            tasks=tasks,
            transactions=JobTransactions(database, store, settings, hint=hints.hint),
            sink=recorder,
            limits=settings.limits,
            tenants=settings.tenants,
            concurrency=worker.concurrency,
            middleware=middleware,
            resources=resources,
            reporter=reporter,
            observers=observers,
            freed=slots.freed,
            abandoned=self._job_abandoned,
        )
        self.heartbeat = Heartbeat(
            database,
            store,
            observers,
            settings=settings.lease,
            version=VERSION,
            queues=list(queues),
            concurrency=worker.concurrency,
            tasks=[task.definition.as_registered(settings.tenants) for task in tasks.values()],
            connections=lambda: database.of_worker + (0 if factory is None else connections_of(factory, worker.concurrency)),
            running=lambda: len(runner.runs),
            problems=self.problems,
            lost=self._lease_lost,
            over=self._lease_over,
        )
        self._maintenance = Maintenance(
            database,
            store,
            observers,
            floors,
            settings=worker,
            lease=settings.lease,
            worker=lambda: self.heartbeat.worker,
            ready=self._ready,
            look=self._look,
            rescued=self._rescued,
            cancel=self._cancel,
            restarted=self.heartbeat.prove,
        )
        self._pruner = Pruner(database, store, observers, settings.retention)
        asker = Asker(
            database,
            store,
            observers,
            lanes=lanes,
            floors=floors,
            lease=self.heartbeat,
            known=slots.known,
            put=recorder.put,
            claimed=self._maintenance.wake,
            passed=unparker.passed,
        )
        self._claimer = Claimer(
            database,
            asker,
            settings=worker,
            lanes=lanes,
            floors=floors,
            lease=self.heartbeat,
            slots=slots,
            wait_room=recorder.wait_room,
        )
        self._guard = slots.guard = Guard(
            database.own_conninfo,
            store,
            observers,
            lease=settings.lease,
            limits=settings.limits,
            heartbeat=self.heartbeat,
            runs=lambda: list(runner.runs.values()),
            sink=recorder,
            encode=lambda job, outcome: encode(job, outcome).text,
        )
        self._stop = Stop(
            slots,
            self._claimer,
            observers,
            limits=settings.limits,
            grace=grace,
            drain=worker.drain,
            worker=lambda: self.heartbeat.worker,
        )

    @property
    def unwritten(self) -> int:
        """Outcomes that the database did not take before the worker had to stop; others run these jobs again."""
        return self._stop.unwritten

    @property
    def running(self) -> int:
        """Jobs that run now."""
        return len(self._runner.runs)

    @property
    def slots(self) -> Slots:
        """Where its jobs run, with what runs them and writes their outcomes."""
        return self._slots

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
        stands = time.monotonic() - self._claimer.turned
        if not found and stands > STANDSTILL + self._settings.poll and not self._claimer.waits_for_slots:
            found.append(f"the claim loop has not turned for {stands:.0f} s")
        if self._recorder.refused:
            found.append(f"the database refuses {self._recorder.refused} outcomes; they are tried again")
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
        claims = [_keep(self._claimer.run, "claimer"), _keep(self._claimer.run_second, "second claim")]
        loops = [
            *self.start_writing(),
            _keep(self._maintenance.run, "maintenance"),
            _keep(self._pruner.run, "pruner"),
            _keep(self.heartbeat.run, "heartbeat"),
        ]
        written = False
        try:
            self._guard.start()
            self._wake_ups.on_ready(self._wake)
            self._observers.emit(WorkerStarted(self.heartbeat.worker, self.queues, self._settings.concurrency))
            self.started.set()
            await self._stop.wait()
        finally:
            self._wake_ups.off_ready(self._wake)
            # An enclosing anyio scope would cancel again at every await; the stop is bounded by its own limits.
            with anyio.CancelScope(shield=True):
                try:
                    written = await self._stop.carry_out(claims)
                finally:
                    await self._end(loops, resign=written)
        self._observers.emit(WorkerStopped(self.heartbeat.worker))

    def start_writing(self) -> list[asyncio.Task[None]]:
        """Start the loops that write what becomes of jobs, and what follows from that."""
        return [
            *(_keep(self._recorder.run, "recorder") for _ in range(RECORDERS)),
            _keep(self._unparker.run, "unparker"),
            _keep(self._reporter.run, "reporter"),
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
        await self._guard.stop()
        await self._reporter.clear(LAST_WORD)
        self.heartbeat.close()
        if resign:
            with contextlib.suppress(psycopg.Error):
                await self.heartbeat.resign(LAST_WORD)
        self._runner.close()

    def _job_abandoned(self) -> None:
        self.abandoned += 1
        self._slots.freed()
        self._stop.claim_no_more()
        if self._standalone:
            self.stop()

    def _lease_lost(self, worker: int, _reason: str) -> None:
        not_ours = Released(Reason.INTERRUPTED, "its worker could not renew its lease")
        self._slots.give_up(not_ours, lambda job: job.worker == worker)
        for run in list(self._runner.runs.values()):
            if run.job.worker == worker:
                self._runner.stop(run, Cause.LEASE_LOST)

    def _cancel(self, job_ids: Sequence[UUID]) -> None:
        wanted = set(job_ids)
        self._slots.give_up(Cancelled("cancelled before it ran"), lambda job: job.job_id in wanted)
        for run in list(self._runner.runs.values()):
            if run.job.job_id in wanted:
                self._runner.stop(run, Cause.CANCELLED)

    def _wake(self) -> None:
        self._claimer.wake()
        self._maintenance.wake()

    def _look(self) -> None:
        self._claimer.wake()

    def _ready(self) -> None:
        self._claimer.wake()
        self._hints.hint("ready")

    def _rescued(self) -> None:
        self._ready()
        self._hints.hint("done")  # some may be dead now

    def _lease_over(self) -> None:
        # Whoever takes the jobs over may start them from now on: what still runs here must not reach the database.
        self._database.sever_jobs()


def _keep(run: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(keep_running(run, name), name=f"aioqueue {name}")
