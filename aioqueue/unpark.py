"""Makes jobs ready that wait for a limit: as many as have ended under it, after the commit that recorded their end.

Told by the recorder which jobs have ended and by the claimer which keys have room left; does it in statements of its own, all
that has come up meanwhile in one. What is owed by a process that dies, the sweep of maintenance makes up for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import psycopg

from .claimed import Claimed
from .database import Database
from .events import Observers
from .floor import Floors
from .outage import Outage
from .store import Store

BATCH = 100
"""Keys of one statement at most."""
AHEAD = 100
"""Jobs of one key at most, where those that were let go found another limit full and twice as many are tried next."""


class Unparker:
    """The unparking of one worker."""

    def __init__(
        self, database: Database, store: Store, observers: Observers, floors: Floors, *, ready: Callable[[], None]
    ) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._floors = floors
        self._ready = ready
        self._wanted: Counter[int] = Counter()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.begun = 0
        """How often something was owed so far."""

    def ended(self, job: Claimed) -> None:
        """Take note of an end that is committed: the job's keys have room for one more."""
        if job.keys:
            self._wanted.update(job.keys)
            self._begin()

    def passed(self, keys: Mapping[int, int]) -> None:
        """Take note of room that so many jobs were given and could not use: twice as many others may have it."""
        for key, number in keys.items():
            self._wanted[key] = max(self._wanted[key], min(2 * number, AHEAD))
        self._begin()

    def _begin(self) -> None:
        self.begun += 1
        self._work.set()
        self._idle.clear()

    async def wait_idle(self) -> None:
        """Wait until nothing is owed, nor about to be answered."""
        await self._idle.wait()

    async def run(self) -> None:
        """Unpark what is owed, for ever."""
        outage = Outage(self._observers, "unparker")
        while True:
            await self._work.wait()
            # One turn of the loop, so that jobs that ended together are followed up together.
            await asyncio.sleep(0)
            batch = dict(list(self._wanted.items())[:BATCH])
            for key in batch:
                del self._wanted[key]  # what comes up from here on may have come too late for this statement
            try:
                await self._unpark(batch)
            except psycopg.Error as error:
                self._wanted.update(batch)
                outage.lost(error)
                await outage.pause()
                continue
            outage.over()
            if not self._wanted:
                self._work.clear()
                self._idle.set()

    async def _unpark(self, batch: Mapping[int, int]) -> None:
        losses = self._database.losses
        held, parked = self._floors.held.text(losses), self._floors.parked.text(losses)
        async with self._database.runtime() as conn:
            moved, firsts = await self._store.unpark(conn, batch, held=held, parked=parked)
        self._floors.parked.learn(firsts, losses)
        if moved:
            self._ready()
