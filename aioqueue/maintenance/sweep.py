"""Makes parked jobs ready that have room and that nobody has unparked; one process at a time does it, whichever comes first.

Most ends are followed up at once, by unpark.py. Where no worker could (a ready job that was cancelled, a process that died in
between, a loop that is blocked), or not at that moment, this does: within a second where jobs are known to be parked.
"""

from __future__ import annotations

import random
import time

from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.limit_store import HIGHEST_KEY, LOWEST_KEY
from aioqueue.store import Store

SOON = 1.0
"""Seconds between sweeps while jobs are parked."""
EVERY = 10.0
"""Seconds between sweeps while none is known to be; the first at a worker's start, which may have brought other limits."""
SHARE = 100
"""A sweep that took t seconds is not repeated before this many times t."""
BATCH = 1000
"""Jobs made ready in one transaction."""
STEPS = 20
"""Steps of one sweep, each over 50 keys, at most; the next sweep begins at another key."""


class Sweeper:
    """The sweeping of one worker."""

    def __init__(self, database: Database, store: Store, floors: Floors) -> None:
        self._database = database
        self._store = store
        self._floors = floors
        self._next = self._earliest = self._seen = 0.0

    async def sweep(self) -> int:
        """Now and then, settle what limits are new and sweep; the number of jobs made ready. Raises psycopg.Error."""
        began = time.monotonic()
        if began < (self._earliest if self._floors.parked_at >= self._seen else self._next):
            return 0
        try:
            async with self._database.runtime() as conn:
                await self._store.settle_limits(conn, wait=False)
            total = await self._sweep()
            self._seen = began
            return total
        finally:
            # Also when it fails: what takes too long must not be begun again at once.
            now = time.monotonic()
            rest = now + SHARE * (now - began)
            chance = 0.75 + random.random() / 2
            self._earliest = max(began + SOON * chance, rest)
            self._next = max(began + EVERY * chance, rest)

    async def _sweep(self) -> int:
        start = random.randrange(LOWEST_KEY, HIGHEST_KEY)
        total = steps = 0
        for after, upto in ((start, HIGHEST_KEY), (LOWEST_KEY, start)):
            last: int | None = after
            while last is not None and steps < STEPS:
                moved, last = await self._step(last, upto)
                if last is not None or moved < 0:  # another that is at it has found some, perhaps
                    self._floors.parked_at = time.monotonic()
                if moved < 0:
                    return total
                total += moved
                steps += 1
        return total

    async def _step(self, after: int, upto: int) -> tuple[int, int | None]:
        total, again, last = 0, False, None
        while True:
            losses = self._database.losses
            held, parked = self._floors.held.text(losses), self._floors.parked.text(losses)
            async with self._database.runtime() as conn:
                moved, found = await self._store.sweep_parked(
                    conn, limit=BATCH, again=again, after=after, upto=upto, held=held, parked=parked
                )
            if moved < 0:
                return (total or -1), None
            last = last if again else found
            total += moved
            if moved < BATCH:
                return total, last
            again = True
