"""Roles for which no policy holds."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination, quoted

BYPASS = Kind(
    "role-bypasses-rls",
    Severity.ERROR,
    "row-level security does not hold for superusers and roles with BYPASSRLS: each of their jobs sees every tenant's rows. "
    "It is advice where no table has a tenant's policy yet",
)


async def look(examination: Examination) -> list[Finding]:
    """Find superusers, BYPASSRLS and members of such among the roles that run jobs."""
    severity = None if examination.tables or examination.strict else Severity.ADVICE
    own = "or run workers as a role of their own (python -m aioqueue migrate --grants ROLE)"
    found = []
    for row in await examination.rows("bypass"):
        role, name = row["role"], quoted(row["role"])
        if row["through"] is not None:
            what = f"role {role} is a member of {row['through']}, which row-level security does not hold for"
            fix = f"REVOKE {quoted(row['through'])} FROM {name};"
        elif row["super"]:
            what, fix = f"role {role} is a superuser", f"ALTER ROLE {name} NOSUPERUSER;"
        else:
            what, fix = f"role {role} has BYPASSRLS", f"ALTER ROLE {name} NOBYPASSRLS;"
        found.append(BYPASS.found(what, fix=f"{fix} {own}", severity=severity))
    return found
