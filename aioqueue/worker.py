"""Composes one worker from its steps, and stops them in order; holds no policy of its own.

    Worker.run
    ├── Heartbeat    beats; the last to stop                      renew.py
    ├── Recorder x2  outcomes in batches                          record.py
    ├── Maintenance  tick, promote, rescue                        maintenance/
    ├── Guard        a thread: watches this loop                  guard.py
    ├── Claimer      free slots + wake-up or poll → claim         claim.py
    └── a job each   an asyncio task of its own                   run.py, transaction.py

The listener and the notifier belong to the app (app.py), which lends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID

import anyio
import psycopg

from .attempt import Cause
from .claim import Claimer, Lanes
from .database import Database
from .events import Observers, WorkerStarted, WorkerStopped, WorkerStopping
from .floor import Floors
from .guard import Guard
from .job import Claimed
from .listen import Kind
from .maintenance.service import Maintenance
from .record import Recorder, encode
from .renew import Heartbeat
from .run import Runner
from .settings import DEFAULT_QUEUE, Settings, WorkerSettings, parse_queues
from .store import LOWEST_ID, Store
from .task import Task
from .transaction import JobTransactions
from .version import VERSION

STANDSTILL = 5.0
"""Seconds beyond the poll interval after which a claim loop that has not turned counts as stuck."""
LAST_WRITES = 5.0
"""Seconds a stopping worker waits for commits and outcomes that the database does not take."""
LAST_WORD = 1.0
"""Seconds that its other last statements may take, each."""
RECORDERS = 2
"""Writes of outcomes in flight at once."""


class WakeUps(Protocol):
    """The app's side of wake-ups: hints out, hints in."""

    @property
    def listening(self) -> bool:
        """Whether LISTEN is in force."""
        ...

    def hint(self, kind: Kind) -> None:
        """Say that there may be work, or that jobs have ended."""
        ...

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be work."""
        ...

    def off_ready(self, callback: Callable[[], None]) -> None:
        """Stop calling back."""
        ...


class Slots:
    """Where claimed jobs run: the runner, seen by the claimer."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.runner: Runner
        self.recorder: Recorder
        self.guard: Guard
        self._freed = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()
        """Set while nothing runs, abandoned jobs apart."""

    @property
    def free(self) -> int:
        """Jobs that could be started now."""
        return max(0, self.concurrency - len(self.runner.runs))

    async def wait_free(self) -> None:
        """Wait until one could be started."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()

    def start(self, job: Claimed) -> None:
        """Start a claimed job."""
        self.empty.clear()
        self.runner.start(job)

    @property
    def busy(self) -> int:
        """Jobs that run, those apart that were given up on."""
        return sum(not run.abandoned for run in self.runner.runs.values())

    def freed(self) -> None:
        """A run is over, or was given up on."""
        self._freed.set()
        if not self.busy:
            self.empty.set()

    def known(self) -> Sequence[UUID]:
        """Every claimed job of this process that is not recorded yet."""
        return [*(run.job.job_id for run in self.runner.runs.values()), *self.recorder.jobs(), *self.guard.jobs()]


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
        worker: WorkerSettings,
        grace: float,
        standalone: bool,
        started: asyncio.Event,
    ) -> None:
        self._database = database
        self._observers = observers
        self._wake_ups = wake_ups
        self._settings = settings
        self._worker_settings = worker
        self._grace = grace
        self._standalone = standalone
        self.abandoned = 0
        """Jobs that ignored their cancellation; a standalone worker stops then, an embedded one claims nothing more."""
        self.unwritten = 0
        """Outcomes that the database did not take before the worker had to stop; others run these jobs again."""
        self._give_up = asyncio.Event()
        queues = parse_queues(worker.queues)
        if not queues:
            queues = dict.fromkeys([DEFAULT_QUEUE, *sorted({t.definition.queue for t in tasks.values()})], 1)
        self.queues = tuple(queues)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self.started = started
        """Set once the worker has its row and claims."""

        lanes = Lanes(queues)
        floors = Floors(lanes.all(), LOWEST_ID, suspects=lanes.suspects())
        slots = self._slots = Slots(worker.concurrency)
        recorder = self._recorder = slots.recorder = Recorder(
            database,
            store,
            observers,
            capacity=max(1000, 4 * worker.concurrency),
            recorded=lambda: wake_ups.hint("done"),
            ready=self._ready,
        )
        runner = self._runner = slots.runner = Runner(
            tasks=tasks,
            transactions=JobTransactions(database, store, settings, committed=lambda: wake_ups.hint("ready")),
            sink=recorder,
            limits=settings.limits,
            concurrency=worker.concurrency,
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
            tasks=[
                {
                    "name": name,
                    "queue": task.definition.queue,
                    "priority": task.definition.priority,
                    "max_attempts": task.definition.retry.max_attempts,
                }
                for name, task in tasks.items()
            ],
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
            rescued=self._rescued,
            cancel=self._cancel,
            restarted=self.heartbeat.prove,
        )
        self._claimer = Claimer(
            database,
            store,
            observers,
            settings=worker,
            lanes=lanes,
            floors=floors,
            lease=self.heartbeat,
            slots=slots,
            wait_room=recorder.wait_room,
            put=recorder.put,
            claimed=self._maintenance.wake,
        )
        self._guard = slots.guard = Guard(
            database.conninfo,
            store,
            observers,
            lease=settings.lease,
            limits=settings.limits,
            heartbeat=self.heartbeat,
            runs=lambda: list(runner.runs.values()),
            sink=recorder,
            encode=lambda job, outcome: encode(job, outcome).text,
        )

    @property
    def running(self) -> int:
        """Jobs that run now."""
        return len(self._runner.runs)

    def problems(self) -> list[str]:
        """Say what keeps the worker from its work now; empty when all is well."""
        found = []
        if not self.started.is_set():
            found.append("the worker has not started yet")
        elif not self.heartbeat.proven:
            found.append("the lease is in doubt: no beat was accepted in time")
        if self.abandoned:
            found.append(f"{self.abandoned} jobs ignored their cancellation; the worker claims nothing more")
        elif self._stopping.is_set():
            found.append("the worker is stopping")
        stands = time.monotonic() - self._claimer.turned
        if stands > STANDSTILL + self._worker_settings.poll and not self._claimer.waits_for_slots:
            found.append(f"the claim loop has not turned for {stands:.0f} s")
        if self._recorder.refused:
            found.append(f"the database refuses {self._recorder.refused} outcomes; they are tried again")
        if not self._wake_ups.listening:
            found.append("the listener is not connected: work is found by polling only")
        return found

    def stop(self, *, hurry: bool = False) -> None:
        """Ask the worker to stop: drain for the grace period; `hurry` ends what runs now and hands it back, spared."""
        self._stopping.set()
        if hurry:
            self._hurry.set()

    async def run(self) -> None:
        """Work until `stop()`, until nothing is ready (drain), or until this task is cancelled; then stop in order.

        Whatever way it ends, claiming stops first, jobs have the grace period, outcomes are recorded, the heartbeat goes
        last. Raises psycopg.OperationalError when the database cannot be reached at the start.
        """
        await self.heartbeat.register()
        async with asyncio.TaskGroup() as group:
            beats = group.create_task(self.heartbeat.run(), name="aioqueue heartbeat")
            records = [group.create_task(self._recorder.run(), name="aioqueue recorder") for _ in range(RECORDERS)]
            upkeep = group.create_task(self._maintenance.run(), name="aioqueue maintenance")
            claims = group.create_task(self._claimer.run(), name="aioqueue claimer")
            self._guard.start()
            self._wake_ups.on_ready(self._wake)
            self._observers.emit(WorkerStarted(self.heartbeat.worker, self.queues, self._worker_settings.concurrency))
            self.started.set()
            try:
                await self._wait_stop(claims)
            finally:
                self._wake_ups.off_ready(self._wake)
                # An enclosing anyio scope would cancel again at every await; the stop is bounded by its own limits.
                with anyio.CancelScope(shield=True):
                    written = await self._drain(claims)
                    for loop in (*records, upkeep, beats):
                        loop.cancel()
                    await asyncio.wait([*records, upkeep, beats])
                    await self._guard.stop()
                    self.heartbeat.close()
                    if written:
                        with contextlib.suppress(psycopg.Error):
                            await self.heartbeat.resign(LAST_WORD)
                    self._runner.close()
        self._observers.emit(WorkerStopped(self.heartbeat.worker))

    async def _wait_stop(self, claims: asyncio.Task[None]) -> None:
        if not self._worker_settings.drain:
            await _first_of(self._stopping, self._give_up)
            claims.cancel()
            await self._stopping.wait()
            return
        drained = asyncio.Event()
        watch = asyncio.create_task(self._watch_drained(drained))
        try:
            await _first_of(self._stopping, drained)
        finally:
            watch.cancel()

    async def _watch_drained(self, drained: asyncio.Event) -> None:
        while not drained.is_set():
            await self._slots.empty.wait()
            await self._recorder.wait_idle()
            # What ran may have enqueued more. The claim that is under way now may be too old to see it, the next is not.
            for _ in range(2):
                self._claimer.found_nothing.clear()
                self._claimer.wake()
                await self._claimer.found_nothing.wait()
            if not self.running:
                drained.set()

    async def _drain(self, claims: asyncio.Task[None]) -> bool:
        """Stop claiming, let the jobs end, end those that do not, write what became of them; whether all was written."""
        claims.cancel()
        await asyncio.wait([claims])
        await self._claimer.settle(LAST_WORD)
        self._observers.emit(WorkerStopping(self.heartbeat.worker, self.running, self._grace))
        await self._wait_empty(self._grace, unless=self._hurry)
        if self._slots.busy:
            self._runner.stop_all(Cause.INTERRUPTED)
            await self._wait_empty(LAST_WRITES)
            # User code has the abandon limit; what only waits for the database does not.
            if any(run.in_user_code for run in self._runner.runs.values()):
                await self._wait_empty(max(0.0, self._settings.limits.abandon + 1.0 - LAST_WRITES))
        try:
            async with asyncio.timeout(LAST_WRITES):
                await self._guard.wait_written()
                await self._recorder.wait_idle()
        except TimeoutError:
            self.unwritten = self._recorder.pending + len(self._guard.jobs())
            return False
        return True

    async def _wait_empty(self, seconds: float, *, unless: asyncio.Event | None = None) -> None:
        """Wait until nothing runs, at most so long; a set event ends the wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _first_of(self._slots.empty, *([] if unless is None else [unless]))

    def _job_abandoned(self) -> None:
        self.abandoned += 1
        self._slots.freed()
        self._give_up.set()
        if self._standalone:
            self.stop()

    def _lease_lost(self, worker: int, _reason: str) -> None:
        for run in list(self._runner.runs.values()):
            if run.job.worker == worker:
                self._runner.stop(run, Cause.LEASE_LOST)

    def _cancel(self, job_ids: Sequence[UUID]) -> None:
        wanted = set(job_ids)
        for run in list(self._runner.runs.values()):
            if run.job.job_id in wanted:
                self._runner.stop(run, Cause.CANCELLED)

    def _wake(self) -> None:
        self._claimer.wake()
        self._maintenance.wake()

    def _ready(self) -> None:
        self._claimer.wake()
        self._wake_ups.hint("ready")

    def _rescued(self) -> None:
        self._ready()
        self._wake_ups.hint("done")  # some may be dead now

    def _lease_over(self) -> None:
        # Whoever takes the jobs over may start them from now on: what still runs here must not reach the database.
        self._database.sever_jobs()


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
