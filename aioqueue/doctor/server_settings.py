"""Settings of the server that hurt a queue."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

IDLE = Kind(
    "idle-in-transaction",
    Severity.ADVICE,
    "a session that somebody leaves open in a transaction keeps its locks, and VACUUM from its work, until somebody ends it; "
    "aioqueue's own transactions have a limit each",
)


async def look(examination: Examination) -> list[Finding]:
    """Find settings that hurt."""
    (row,) = await examination.rows("server_settings")
    if row["idle_in_transaction"]:
        return []
    fix = "ALTER SYSTEM SET idle_in_transaction_session_timeout = '10min'; SELECT pg_reload_conf();"
    return [IDLE.found("idle_in_transaction_session_timeout is off", fix=fix)]
