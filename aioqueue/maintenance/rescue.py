"""Takes over what dead workers ran: facts of the database only, in batches, by every worker, without a leader."""

from __future__ import annotations

import random
import time

from aioqueue.database import Database
from aioqueue.events import JobsRescued, Observers
from aioqueue.floor import Floors
from aioqueue.store import Store

BATCH = 500
"""Jobs of one dead worker moved in one transaction."""
ORPHANS_EVERY = 60.0
"""Seconds between looks for running jobs whose worker has no row at all; such a look scans live."""


class Rescuer:
    """The rescuing of one worker."""

    def __init__(self, database: Database, store: Store, observers: Observers, floors: Floors) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._floors = floors
        self._next_orphans = 0.0

    async def rescue(self, worker: int) -> int:
        """Move the jobs of every worker that is dead now; the number of jobs moved. Raises psycopg.Error."""
        moved = 0
        seen: set[int] = set()
        while True:
            async with self._database.runtime() as conn:
                found = await self._store.rescue(conn, worker=worker, limit=BATCH, **self._key_floors())
            if found is None:
                return moved
            dead, count, job_ids = found
            moved += count
            if count:
                self._observers.emit(JobsRescued(dead, count, job_ids))
            elif dead in seen:
                # Its rows are locked by somebody, or it was looked at before: the next second sees to it.
                return moved
            seen.add(dead)

    async def rescue_orphans(self) -> int:
        """Now and then, move running jobs whose worker has no row; the number of jobs moved. Raises psycopg.Error."""
        now = time.monotonic()
        if now < self._next_orphans:
            return 0
        self._next_orphans = now + ORPHANS_EVERY * (0.75 + random.random() / 2)
        async with self._database.runtime() as conn:
            moved = await self._store.rescue_orphans(conn, limit=BATCH, **self._key_floors())
        if moved:
            self._observers.emit(JobsRescued(0, moved))
        return moved

    def _key_floors(self) -> dict[str, str]:
        losses = self._database.losses
        return {"held": self._floors.held.text(losses), "parked": self._floors.parked.text(losses)}
