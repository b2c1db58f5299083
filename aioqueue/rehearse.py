"""Runs a worker's statements on a new connection once, without effect: what comes first there waits for no plans.

A server process plans what a function does when it first does it: ten milliseconds for the first claim of each connection, which
an idle worker's pick-up would show. Decides nothing, and fails nothing: what is not rehearsed is slower once.
"""

from __future__ import annotations

import contextlib
from typing import Any

from psycopg import AsyncConnection

from .claimed import Claimed
from .maintenance_store import UNIX_EPOCH, LaneQuestion
from .store import LOWEST_ID, LaneScan, Store

NOBODY = 0
"""No worker's identity: those are drawn from 63 bits."""
IMPATIENT = (
    "SELECT pg_catalog.set_config('lock_timeout', '20ms', true),"
    " pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)"
)
"""Whoever holds a table of ours would keep the connection from those that need another, or none; and who sets a limit would wait
for us while user code blocks the loop in between."""


class Rehearsal:
    """Of one schema; called with each new connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._job = Claimed(NOBODY, LOWEST_ID, 0, 0, 0, 0, None, "", "", 0, 0, "", UNIX_EPOCH)

    async def __call__(self, conn: AsyncConnection[Any]) -> None:
        """Claim nothing, record nothing, ask about a lane that is empty. Raises nothing but a cancellation."""
        start = (0, LOWEST_ID)
        with contextlib.suppress(Exception):  # also an answer that another version of the schema gives
            async with conn.transaction(force_rollback=True):
                await conn.execute(IMPATIENT)
                await self._store.claim(conn, worker=NOBODY, lanes=[LaneScan(0, start, 1)], limit=0)
                await self._store.record(conn, worker=NOBODY, succeeded=[self._job], results=["null"])
                await self._store.tick(conn, worker=NOBODY, questions=[LaneQuestion(0, 0, start, 0)], due_to=UNIX_EPOCH)
