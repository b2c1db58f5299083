"""Views over tenant tables that read them as somebody else than the job."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

VIEW = Kind(
    "view-without-invoker",
    Severity.ERROR,
    "a view without security_invoker reads its tables as its owner: where no policy holds for that role, every tenant's rows are "
    "seen through it; where one does (the table is forced), only that keeps tenants apart, and the finding is advice",
)
MATERIALIZED = Kind(
    "materialized-view",
    Severity.ERROR,
    "a materialized view keeps the rows that its owner saw, of every tenant, and no policy can be put on it",
)


async def look(examination: Examination) -> list[Finding]:
    """Find such views among those that a role that runs jobs may use."""
    if not examination.related:
        return []
    found = []
    for row in await examination.rows("views"):
        view, table = row["view"], row["opened"] or row["table"]
        if row["materialized"]:
            if row["open"]:
                what = f"role {row['role']} may read materialized view {view} over tenant table {table}"
                found.append(MATERIALIZED.found(what, fix=f"REVOKE ALL ON {view} FROM {row['who']};"))
            continue
        reads = "for whom no policy holds there" if row["open"] else "for whom policies hold there as long as they are forced"
        what = f"role {row['role']} may use view {view}, which reads tenant table {table} as {row['owner']}, {reads}"
        fix = f"ALTER VIEW {view} SET (security_invoker = true);"
        found.append(VIEW.found(what, fix=fix, severity=None if row["open"] else Severity.ADVICE))
    return found
