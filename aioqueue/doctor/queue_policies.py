"""Policies on the queue's own tables."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

POLICY = Kind(
    "policy-on-queue",
    Severity.ERROR,
    "the queue's functions run as its owner, for whom a policy either does not hold, so that it protects nothing, or hides the "
    "jobs, so that the queue looks empty; what a tenant may see of the queue is decided by these functions",
)


async def look(examination: Examination) -> list[Finding]:
    """Find policies, and row-level security that is on, on the queue's own tables."""
    found = []
    for row in await examination.rows("queue_policies"):
        off = f"ALTER TABLE {row['name']} DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;"
        state = "on" if row["enabled"] else "off"
        if row["policy"] is None:
            found.append(
                POLICY.found(f"row-level security is on for the queue's table {row['table']}, without a policy", fix=off)
            )
        else:
            what = f"policy {row['policy']} stands on the queue's table {row['table']} (row-level security is {state})"
            found.append(
                POLICY.found(what, fix=f"DROP POLICY {row['quoted']} ON {row['name']}; {off if row['enabled'] else ''}".rstrip())
            )
    return found
