"""A pooler in transaction mode between this process and the server."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

POOLER = Kind(
    "pooler",
    Severity.ADVICE,
    "through a pooler in transaction mode nobody can listen: jobs start, and waiters are woken, with the next look only, a "
    "second later by default. All else holds",
)


async def look(examination: Examination) -> list[Finding]:
    """Say that there is a pooler, where nothing leads past it."""
    if not examination.pooler or examination.listen is not None:
        return []
    fix = "give wake-ups a direct way: AioQueue(listen_dsn=…), AIOQUEUE_LISTEN_DSN or --listen-dsn"
    return [POOLER.found("a pooler in transaction mode stands between, and there is no listen_dsn", fix=fix)]
