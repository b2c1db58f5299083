"""Makes scheduled jobs ready once they are due; one process at a time does it, whichever comes first."""

from __future__ import annotations

from datetime import datetime

from aioqueue.database import Database
from aioqueue.events import JobsPromoted, Observers
from aioqueue.store import Store

BATCH = 1000
"""Jobs promoted in one transaction."""


class Promoter:
    """The promoting of one worker."""

    def __init__(self, database: Database, store: Store, observers: Observers) -> None:
        self._database = database
        self._store = store
        self._observers = observers

    async def promote(self, due_from: datetime) -> int:
        """Promote everything that is due now; the number promoted. Raises psycopg.Error."""
        total = 0
        while True:
            async with self._database.runtime() as conn:
                count = await self._store.promote(conn, due_from=due_from, limit=BATCH)
            if count > 0:
                total += count
                self._observers.emit(JobsPromoted(count))
            if count < BATCH:
                return total
