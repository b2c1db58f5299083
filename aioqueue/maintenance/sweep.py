"""Makes parked jobs ready that have room and that nobody has unparked; one process at a time does it, whichever comes first."""

from __future__ import annotations

import random
import time

from aioqueue.database import Database
from aioqueue.store import Store

EVERY = 10.0
"""Seconds between sweeps; the first at a worker's start, which may have brought other limits."""
SHARE = 100
"""A sweep that took t seconds is not repeated before this many times t."""
BATCH = 1000
"""Jobs made ready in one transaction."""


class Sweeper:
    """The sweeping of one worker."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        self._next = 0.0

    async def sweep(self) -> int:
        """Now and then, settle what limits are new and sweep; the number of jobs made ready. Raises psycopg.Error."""
        began = time.monotonic()
        if began < self._next:
            return 0
        self._next = began + EVERY * (0.75 + random.random() / 2)
        total = 0
        async with self._database.runtime() as conn:
            await self._store.settle_limits(conn, wait=False)
        moved = BATCH
        while moved == BATCH:
            async with self._database.runtime() as conn:
                moved = await self._store.sweep_parked(conn, limit=BATCH, lifted=total > 0)
            total += max(moved, 0)
        self._next = max(self._next, time.monotonic() + SHARE * (time.monotonic() - began))
        return total
