"""The steps of one worker, made and wired to each other: what one has for another, and whom what it says concerns.

Starts none of them and ends none; worker.py does. Holds no policy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from .attempt import Cause
from .claim import Claimer
from .database import Database
from .events import Observers
from .floor import Floors
from .guard import Guard
from .lanes import Lanes
from .listen import Hints
from .maintenance.prune import Pruner
from .maintenance.service import Maintenance
from .middleware import Middleware
from .one_claim import OneClaim
from .outcome import Cancelled, Reason, Released
from .pending import encode
from .record import Recorder
from .renew import Heartbeat
from .report import Reporter
from .run import Runner
from .session_factory import connections_of
from .settings import DEFAULT_QUEUE, Settings, WorkerSettings, parse_queues
from .slots import Slots
from .store import LOWEST_ID, Store
from .task import Task
from .transaction import JobTransactions
from .unpark import Unparker
from .version import VERSION


class Steps:
    """Those of one worker."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        tasks: Mapping[str, Task[..., ..., Any]],
        settings: Settings,
        *,
        hints: Hints,
        worker: WorkerSettings,
        middleware: Sequence[Middleware],
        resources: object,
        problems: Callable[[], list[str]],
        abandoned: Callable[[], None],
    ) -> None:
        """`problems` says what keeps the worker from its work; `abandoned` is told of each job that ignored its cancellation."""
        self._database = database
        self._hints = hints
        queues = parse_queues(worker.queues)
        if not queues:
            queues = dict.fromkeys([DEFAULT_QUEUE, *sorted({t.definition.queue for t in tasks.values()})], 1)
        self.queues = tuple(queues)
        factory = settings.session if any(t.definition.session is not None for t in tasks.values()) else None
        lanes = Lanes(queues)
        floors = Floors(lanes.all(), LOWEST_ID, suspects=lanes.suspects())
        slots = self.slots = Slots(worker.concurrency)
        unparker = self.unparker = slots.unparker = Unparker(database, store, observers, floors, ready=self._ready)
        recorder = self.recorder = slots.recorder = Recorder(
            database,
            store,
            observers,
            capacity=max(1000, 4 * worker.concurrency),
            hints=hints,
            ready=self._ready,
            ended=unparker.ended,
        )
        reporter = self.reporter = Reporter(database, store, observers, reported=lambda: hints.hint("progress"))
        runner = self.runner = slots.runner = Runner(
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
            abandoned=abandoned,
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
            problems=problems,
            lost=self._lease_lost,
            over=self._lease_over,
        )
        self.maintenance = Maintenance(
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
        self.pruner = Pruner(database, store, observers, settings.retention)
        one_claim = self.one_claim = OneClaim(
            database,
            store,
            observers,
            lanes=lanes,
            floors=floors,
            lease=self.heartbeat,
            known=slots.known,
            put=recorder.put,
            claimed=self.maintenance.wake,
            passed=unparker.passed,
        )
        self.claimer = Claimer(
            database,
            one_claim,
            settings=worker,
            lanes=lanes,
            floors=floors,
            lease=self.heartbeat,
            slots=slots,
            wait_room=recorder.wait_room,
        )
        self.guard = slots.guard = Guard(
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

    def wake(self) -> None:
        """There may be work: look soon."""
        self.claimer.wake()
        self.maintenance.wake()

    def _lease_lost(self, worker: int, _reason: str) -> None:
        not_ours = Released(Reason.INTERRUPTED, "its worker could not renew its lease")
        self.slots.give_up(not_ours, lambda job: job.worker == worker)
        for run in list(self.runner.runs.values()):
            if run.job.worker == worker:
                self.runner.stop(run, Cause.LEASE_LOST)

    def _cancel(self, job_ids: Sequence[UUID]) -> None:
        wanted = set(job_ids)
        self.slots.give_up(Cancelled("cancelled before it ran"), lambda job: job.job_id in wanted)
        for run in list(self.runner.runs.values()):
            if run.job.job_id in wanted:
                self.runner.stop(run, Cause.CANCELLED)

    def _look(self) -> None:
        self.claimer.wake()

    def _ready(self) -> None:
        self.claimer.wake()
        self._hints.hint("ready")

    def _rescued(self) -> None:
        self._ready()
        self._hints.hint("done")  # some may be dead now

    def _lease_over(self) -> None:
        # Whoever takes the jobs over may start them from now on: what still runs here must not reach the database.
        self._database.sever_jobs()
