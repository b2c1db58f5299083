"""Whether notifications come through, how fast, and whether the server's queue of them drains."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import psycopg
from psycopg import AsyncConnection

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

LOST = Kind(
    "notify-lost",
    Severity.WARNING,
    "without notifications jobs start, and waiters are woken, with the next look only, a second later by default",
)
SLOW = Kind(
    "notify-slow",
    Severity.WARNING,
    "notifications are sent at commit, one transaction of the server after the other: somebody else's NOTIFY in long or many "
    "transactions makes all of them wait",
)
FULL = Kind(
    "notify-queue-fills",
    Severity.WARNING,
    "a session that has done LISTEN and stays in one transaction keeps the server's queue of notifications from draining; once "
    "it is full, every NOTIFY fails, and the transaction with it",
)
PATIENCE = 5.0
"""Seconds that a notification may take before it counts as lost."""
TOLERATED = 0.5
"""Seconds that it may take."""
USED = 0.1
"""Share of the queue in use from which on it does not drain."""


async def look(examination: Examination) -> list[Finding]:
    """Send a notification to ourselves by way of a second connection, and look at the queue."""
    found = []
    if examination.listen is not None:
        seconds, what = None, f"a notification did not come within {PATIENCE:g} s"
        try:
            listener = await examination.listen()
        except psycopg.OperationalError as error:
            what = f"nobody can listen: {' '.join(str(error).split())}"
        else:
            async with listener:
                seconds = await round_trip(listener, examination.conn)
        examination.facts["notify_seconds"] = None if seconds is None else round(seconds, 4)
        if seconds is None:
            fix = "listen on the same database without a pooler in between: AioQueue(listen_dsn=…), AIOQUEUE_LISTEN_DSN"
            found.append(LOST.found(what, fix=fix))
        elif seconds > TOLERATED:
            fix = "find who waits: SELECT * FROM pg_locks WHERE locktype = 'object' AND classid = 'pg_database'::regclass;"
            found.append(SLOW.found(f"a notification took {seconds:.1f} s", fix=fix))
    (row,) = await examination.rows("notifications")
    if row["used"] > USED:
        what = f"{row['used']:.0%} of the server's queue of notifications are in use"
        fix = "SELECT pg_terminate_backend(…) of the session in horizon-held, or the oldest one in pg_stat_activity, that listens"
        found.append(FULL.found(what, fix=fix))
    return found


async def round_trip(listener: AsyncConnection[Any], sender: AsyncConnection[Any]) -> float | None:
    """Seconds that a notification takes from one connection to the other; None: it has not come."""
    channel = f"aioqueue_doctor_{secrets.token_hex(8)}"
    await listener.execute(f"LISTEN {channel}".encode())
    try:
        async with asyncio.timeout(PATIENCE):
            sent = time.perf_counter()
            await sender.execute("SELECT pg_catalog.pg_notify(%s, '')", [channel])
            async for _ in listener.notifies(timeout=PATIENCE, stop_after=1):
                return time.perf_counter() - sent
    except TimeoutError:
        pass
    finally:
        await listener.execute(f"UNLISTEN {channel}".encode())
    return None
