"""Whether the connections that the living workers may take fit what the server, the database and their roles allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

BUDGET = Kind(
    "connection-budget",
    Severity.WARNING,
    "once all of them are in use, connections are refused, to the web processes first: 'remaining connection slots are "
    "reserved'. It is an error where the workers alone need more than there are",
)
USUAL = 6
"""Connections of a worker that does not say how many it takes: the default pool, a listener, a guard."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, and the two parts of what counts towards it: what workers may take, and what others have now."""

    name: str
    limit: int
    need: int
    others: int
    fix: str


async def look(examination: Examination) -> list[Finding]:
    """Add up what all living workers may take, and hold it against every limit."""
    rows = await examination.rows("connections", usual=USUAL)
    limits = _limits(rows)
    examination.facts["connections"] = {
        "workers": sum(row["workers"] for row in rows),
        "need": sum(row["need"] for row in rows),
        "others": limits[0].others,
        "limits": {limit.name: limit.limit for limit in limits},
    }
    found = []
    for limit in limits:
        if limit.need and limit.need + limit.others > limit.limit:
            what = (
                f"the living workers need up to {limit.need} connections, others have {limit.others} now, "
                f"{limit.name} allows {limit.limit}"
            )
            alone = limit.need > limit.limit
            found.append(BUDGET.found(what, fix=limit.fix, severity=Severity.ERROR if alone else None))
    return found


def _limits(rows: list[dict[str, Any]]) -> list[Limit]:
    """Return the limits there are, the server's first. A worker's own sessions are among its need, and not others'."""
    fewer = "fewer workers, PoolSettings(size=) smaller, or a pooler; else"
    limits = [
        Limit(
            "the server",
            rows[0]["connections"] - rows[0]["reserved"],
            sum(row["need"] for row in rows),
            sum(max(0, row["everywhere"] - row["need"]) for row in rows),
            f"{fewer} ALTER SYSTEM SET max_connections = …; and a restart",
        )
    ]
    if rows[0]["database_limit"] >= 0:
        limits.append(
            Limit(
                f"database {rows[0]['database']}",
                rows[0]["database_limit"],
                sum(row["need"] for row in rows),
                sum(max(0, row["here"] - row["need"]) for row in rows),
                f"{fewer} ALTER DATABASE {rows[0]['database']} CONNECTION LIMIT …;",
            )
        )
    limits += [
        Limit(
            f"role {row['role']}",
            row["role_limit"],
            row["need"],
            max(0, row["everywhere"] - row["need"]),
            f"{fewer} ALTER ROLE {row['quoted_role']} CONNECTION LIMIT …;",
        )
        for row in rows
        if row["role_limit"] is not None and row["role_limit"] >= 0 and row["need"]
    ]
    return limits
