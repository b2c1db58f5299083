"""The one loop of maintenance: a tick, then whatever it showed to be due. Any number of workers run it side by side."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from uuid import UUID

import psycopg

from aioqueue.database import Database
from aioqueue.events import Observers
from aioqueue.floor import Floors
from aioqueue.maintenance_store import Tick
from aioqueue.outage import Outage
from aioqueue.settings import LeaseSettings, WorkerSettings
from aioqueue.store import Store

from .promote import Promoter
from .rescue import Rescuer
from .sweep import Sweeper
from .tick import Ticker


class Maintenance:
    """The maintenance of one worker."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        floors: Floors,
        *,
        settings: WorkerSettings,
        lease: LeaseSettings,
        worker: Callable[[], int],
        ready: Callable[[], None],
        look: Callable[[], None],
        rescued: Callable[[], None],
        cancel: Callable[[Sequence[UUID]], None],
        restarted: Callable[[], None],
    ) -> None:
        self._database = database
        self._observers = observers
        self._floors = floors
        self._settings = settings
        self._lease = lease
        self._worker = worker
        self._ready = ready
        self._look = look
        self._rescued = rescued
        self._cancel = cancel
        self._ticker = Ticker(database, store, floors, worker=worker, restarted=restarted)
        self._promoter = Promoter(database, store, observers)
        self._rescuer = Rescuer(database, store, observers, floors)
        self._sweeper = Sweeper(database, store, floors)
        self._busy = asyncio.Event()
        self._next_rescue = 0.0
        self._went_back = False

    def wake(self) -> None:
        """Jobs were claimed, enqueued or cancelled: tick soon, whatever the pause."""
        self._busy.set()

    async def run(self) -> None:
        """Tick and do what is due, for ever."""
        outage = Outage(self._observers, "maintenance")
        pause = 0.0
        while True:
            asked = await self._wait(pause)
            try:
                async with self._database.in_turn(asked=asked):
                    pause = await self._once()
            except psycopg.Error as error:
                outage.lost(error)
                pause = 0.5 + random.random()
                self._busy.clear()
                continue
            outage.over()

    async def _wait(self, seconds: float) -> bool:
        """Wait, at the busy pace as soon as something is claimed; whether anything was."""
        asked = True
        if self._busy.is_set():
            await asyncio.sleep(min(seconds, self._settings.tick))
        else:
            try:
                async with asyncio.timeout(seconds):
                    await self._busy.wait()
            except TimeoutError:
                asked = False
            else:
                await asyncio.sleep(self._settings.tick)
        self._busy.clear()
        return asked

    async def _once(self) -> float:
        """One round; returns the seconds until the next."""
        tick = await self._ticker.tick()
        went_back, self._went_back = self._went_back, self._floors.take_lowered()
        if self._went_back or self._floors.suspect_ready:
            # Every worker sees both by itself. The hint of a job that came below the floor came too soon, and of a suspect
            # nobody gives another when the one before it has ended.
            self._look()
        if tick.cancelled:
            self._cancel(tick.cancelled)
        if tick.next_due is not None and tick.next_due <= tick.clock and await self._promoter.promote(self._ticker.due_from()):
            self._ready()
        now = time.monotonic()
        if now >= self._next_rescue:
            self._next_rescue = now + self._lease.rescue_interval
            moved = await self._rescuer.rescue(self._worker()) if tick.losses else 0
            if moved + await self._rescuer.rescue_orphans():
                self._rescued()
        if await self._sweeper.sweep():
            self._ready()
        if self._went_back and not went_back:
            return 0.0  # claims walk over what was taken since then, until the next tick
        if not self._floors.at_rest:
            return self._settings.tick
        return self._idle_pause(tick)

    def _idle_pause(self, tick: Tick) -> float:
        # A dead worker gives no hint, so a longer poll does not make the looks for one rarer.
        longest = min(self._settings.poll, self._lease.rescue_interval)
        next_due: datetime | None = tick.next_due
        if next_due is None or next_due <= tick.clock:
            return longest
        return min(longest, (next_due - tick.clock).total_seconds() + 0.001)
