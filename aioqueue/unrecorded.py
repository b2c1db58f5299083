"""What it means that an outcome was not recorded: the server is away for now, it refuses what is in it, or it has it already.

Reads only; record.py decides what becomes of the outcome.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import AsyncConnection

from .pending import Pending
from .server import connection_lost
from .store import REFUSED, Store

LOOK_BACK = 50
"""Attempts of a job among which one without an answer is looked for."""


def passes(error: psycopg.Error) -> bool:
    """Whether the same write may be taken a moment later: the server is away, or it lost to others (deadlock, lock_timeout)."""
    state = error.sqlstate or ""
    return connection_lost(error) or state.startswith("40") or state == "55P03"


def refuses_content(error: Exception) -> bool:
    """Whether it is what is in an outcome that the database, or the way to it, refuses."""
    return isinstance(error, psycopg.DataError | UnicodeError) or str(getattr(error, "sqlstate", None))[:2] in REFUSED


async def look_up(store: Store, conn: AsyncConnection[Any], pending: Pending) -> str | None:
    """Return what an attempt without a row became if it was written already: by a write without an answer, or its commit.

    None: it is no longer this worker's.
    """
    job = pending.job
    if await store.read_back(conn, job) == "succeeded":
        return "succeeded"
    attempts = await store.list_attempts(conn, job.job_id, limit=LOOK_BACK)
    if (job.attempt, job.worker, pending.reason) not in {(a["attempt"], a["worker"], a["reason"]) for a in attempts}:
        return None
    status = await store.job_status(conn, job.job_id)
    return pending.state if status is None or status.attempt != job.attempt else str(status.state)
