"""Further policies that open a tenant table."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

OPENS = Kind(
    "policy-opens-table",
    Severity.ERROR,
    "permissive policies are joined by OR: one that does not ask for the tenant opens the table to what it allows. Rows that are "
    "meant for everybody belong into the condition of the tenant's policy",
)


async def look(examination: Examination) -> list[Finding]:
    """Find permissive policies on tenant tables that do not read the tenant setting."""
    found = []
    for row in await examination.rows("extra_policies"):
        table, policy = row["table"], row["policy"]
        what = f"policy {policy} on tenant table {table} allows role {row['role']} {row['command']} where ({row['allows']})"
        fix = f"DROP POLICY {policy} ON {table}; or make it AS RESTRICTIVE, or TO other roles"
        found.append(OPENS.found(what, fix=fix))
    return found
