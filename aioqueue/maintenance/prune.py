"""Makes the partitions of the time to come, and drops those whose jobs ended longer ago than they are kept.

A loop of its own beside the tick, since a look at an old partition may take seconds. Any number of workers run it; one at a
time does the work, and whoever meets an open transaction gives way and comes back.
"""

from __future__ import annotations

import asyncio
import random

import psycopg

from aioqueue.database import Database
from aioqueue.events import JobsPruned, Observers, logger
from aioqueue.server import connection_lost
from aioqueue.settings import RetentionSettings
from aioqueue.store import Store

AHEAD = 2
"""Ranges made before their time begins."""
EVERY = 60.0
"""Seconds between looks, jittered; the first comes after one too, so that short-lived workers leave it to others."""
AGAIN, LATER = 5.0, 300.0
"""Seconds until another try for locks that an open transaction held: the first, doubling, at most."""
SCAN = 60.0
"""Seconds that a look at a partition may take."""
BATCH = 1000
"""Jobs deleted one by one in a transaction."""
FOR_EVER = 1e10
"""Seconds that stand for no limit."""


class Pruner:
    """The pruning of one worker."""

    def __init__(self, database: Database, store: Store, observers: Observers, settings: RetentionSettings) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._settings = settings

    async def run(self) -> None:
        """Look after the partitions, for ever; what fails is said once, until it is done."""
        pause = EVERY
        failed = False
        while True:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            try:
                await self.prune()
            except psycopg.errors.LockNotAvailable:
                pause = AGAIN if pause == EVERY else min(2 * pause, LATER)
                continue
            except psycopg.Error as error:
                # An outage is the other loops' to report.
                if not failed and not connection_lost(error):
                    logger.warning("ended jobs could not be deleted, which is tried again: %s: %s", type(error).__name__, error)
                    failed = True
            else:
                failed = False
            pause = EVERY

    async def prune(self) -> int:
        """Make and drop what is due now; the number of jobs deleted.

        Raises psycopg.errors.LockNotAvailable where an open transaction stands in the way: what was done until then stays.
        """
        if self._settings.succeeded is None:
            return 0
        keep = min(self._settings.succeeded_seconds, FOR_EVER), min(self._settings.unsuccessful_seconds, FOR_EVER)
        total = 0
        try:
            while await self._make_range():
                pass
            while (count := await self._prune_range(*keep)) is not None:
                total += count
            while True:
                async with self._database.runtime() as conn:
                    count = await self._store.prune_default(conn, succeeded=keep[0], unsuccessful=keep[1], limit=BATCH)
                total += count
                if count < BATCH:
                    return total
        finally:
            if total:
                self._observers.emit(JobsPruned(total))

    async def _make_range(self) -> int:
        async with self._database.in_turn(), self._database.runtime() as conn:
            return await self._store.make_ranges(conn, width=self._settings.width, ahead=AHEAD)

    async def _prune_range(self, succeeded: float, unsuccessful: float) -> int | None:
        async with self._database.runtime(SCAN) as conn, conn.transaction():
            await self._store.set_local(conn, {"statement_timeout": f"{SCAN:.0f}s"})
            return await self._store.prune_range(conn, succeeded=succeeded, unsuccessful=unsuccessful)
