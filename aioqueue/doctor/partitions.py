"""Partitions of tenant tables, and what these are partitions of, that a role may use directly without a policy."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

PARTITION = Kind(
    "partition-without-policy",
    Severity.ERROR,
    "only the policies of the table that a statement names are applied: the same rows are open by another name",
)


async def look(examination: Examination) -> list[Finding]:
    """Find relations that hold a tenant table's rows and are open to a role that runs jobs."""
    if len(examination.related) == len(examination.tables):
        return []
    found = []
    for row in await examination.rows("partitions"):
        table = row["table"]
        what = (
            f"role {row['role']} may use {table}, which has no policy for the tenant, though "
            + (f"{row['parent']}, a part of which it is, has one" if row["parent"] else "its partitions have one")
        )  # fmt: skip
        fix = f"REVOKE ALL ON {table} FROM {row['who']}; or ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; with the same policy"
        found.append(PARTITION.found(what, fix=fix))
    return found
