"""Keeps the worker's lease: registers an identity, beats, and says when the lease can no longer be proven.

The local deadline is the moment BEFORE the last accepted beat was sent plus the lease less a sixth: then the worker's jobs
are cancelled, whatever the network and the database do. It is the last loop of a worker to stop.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence

import psycopg

from .clock import clock
from .database import Database
from .events import LeaseLost, Observers
from .outage import Outage
from .settings import LeaseSettings
from .store import Store

WATCH = 1.0
"""Seconds between looks at the clock at most."""


class Heartbeat:
    """The lease of one worker, under one identity after the other."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        *,
        settings: LeaseSettings,
        version: str,
        queues: Sequence[str],
        concurrency: int,
        tasks: Sequence[dict[str, object]],
        connections: Callable[[], int],
        running: Callable[[], int],
        problems: Callable[[], Sequence[str]],
        lost: Callable[[int, str], None],
        over: Callable[[], None],
    ) -> None:
        self.worker = 0
        self._database = database
        self._store = store
        self._observers = observers
        self._settings = settings
        self._version = version
        self._queues = list(queues)
        self._concurrency = concurrency
        self._tasks = list(tasks)
        self._connections = connections
        self._running = running
        self._problems = problems
        self._lost = lost
        self._over = over
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._proven = asyncio.Event()
        self._again = asyncio.Event()
        self._dead = False
        self._doubted = False

    @property
    def proven(self) -> bool:
        """Whether the lease certainly holds now."""
        return self._proven.is_set()

    async def wait_proven(self) -> None:
        """Wait while the lease is in doubt."""
        await self._proven.wait()

    def refused(self, worker: int) -> None:
        """The database says that `worker` is dead: go on under a new identity, unless that has been done."""
        if worker != self.worker:
            return
        self._doubt(f"worker {self.worker} was declared dead")
        self._dead = True
        self._again.set()

    def prove(self) -> None:
        """Beat at once; until it is accepted, the lease is in doubt (the server was restarted or failed over)."""
        self._proven.clear()
        self._again.set()

    def renewed(self, sent: float) -> None:
        """A beat that the guard sent at `sent` was accepted; callable from any thread."""
        self._deadline = max(self._deadline, sent + self._settings.lease * 5 / 6)

    async def register(self) -> None:
        """Write the worker's row under a new random identity. Raises psycopg.Error."""
        worker = secrets.randbits(63)
        sent = clock()
        async with self._database.runtime() as conn:
            await self._store.register_worker(
                conn,
                worker=worker,
                host=socket.gethostname()[:200],
                pid=os.getpid(),
                version=self._version,
                queues=self._queues,
                concurrency=self._concurrency,
                lease=self._settings.lease,
                tasks=self._tasks,
                connections=self._connections(),
            )
        self.worker = worker
        self._dead = False
        self._accepted(sent)

    async def run(self) -> None:
        """Beat for ever; the worker is registered already."""
        outage = Outage(self._observers, "heartbeat")
        while True:
            wait = self._settings.beat_seconds if not outage.under_way else min(1.0, self._settings.beat_seconds / 5)
            await self._pause(wait * (1.0 if not outage.under_way else 0.5 + random.random()))
            if clock() > self._deadline:
                self._doubt("the lease could not be renewed in time")
            try:
                if self._dead:
                    await self.register()
                else:
                    await self._beat()
            except psycopg.Error as error:
                outage.lost(error)
                continue
            outage.over()

    def close(self) -> None:
        """Judge the lease no more: nothing runs."""
        if self._timer is not None:
            self._timer.cancel()

    async def resign(self, seconds: float) -> None:
        """Say that the worker stops, within so many seconds. Raises psycopg.Error."""
        async with self._database.runtime(seconds) as conn:
            await self._store.resign(conn, worker=self.worker)

    async def _beat(self) -> None:
        sent = clock()
        worker = self.worker
        async with self._database.runtime(self._settings.beat_seconds) as conn:
            alive = await self._store.beat(
                conn,
                worker=worker,
                lease=self._settings.lease,
                running=self._running(),
                problems=self._problems(),
            )
        if alive:
            self._accepted(sent)
        else:
            self.refused(worker)

    def _accepted(self, sent: float) -> None:
        self.renewed(sent)
        self._doubted = False
        self._watch_deadline()
        self._proven.set()

    def _watch_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Not in one go: the loop's timers stand still while the machine sleeps, the lease does not.
        wait = min(WATCH, max(0.0, self._deadline - clock()))
        self._timer = asyncio.get_running_loop().call_later(wait, self._overdue)

    def _overdue(self) -> None:
        if clock() < self._deadline:
            self._watch_deadline()
        else:
            self._doubt("the lease could not be renewed in time")
            self._again.set()

    def _end(self) -> None:
        if not self.proven:
            self._over()

    def _doubt(self, reason: str) -> None:
        if not self._doubted:
            self._doubted = True
            self._proven.clear()
            if self._timer is not None:
                self._timer.cancel()
            end = self._deadline + self._settings.lease / 6
            self._timer = asyncio.get_running_loop().call_later(max(0.0, end - clock()), self._end)
            self._observers.emit(LeaseLost(self.worker, reason))
            self._lost(self.worker, reason)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._again.wait()
        except TimeoutError:
            pass
        self._again.clear()
