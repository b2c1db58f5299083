"""Tenant tables where row-level security is off, or does not hold for a role that runs jobs, or can be gone round."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

OFF = Kind(
    "rls-off",
    Severity.ERROR,
    "a policy without ENABLE ROW LEVEL SECURITY does nothing: row_security_active() is false, and every tenant's rows are seen",
)
OWNER = Kind(
    "owner-without-force",
    Severity.ERROR,
    "policies do not hold for a table's owner, nor for members of it, unless row-level security is forced",
)
TRUNCATE = Kind(
    "truncate-granted",
    Severity.ERROR,
    "no policy stops a TRUNCATE: one tenant's job could delete every tenant's rows",
)


async def look(examination: Examination) -> list[Finding]:
    """Find tenant tables that are open to a role that runs jobs."""
    off: dict[str, Finding] = {}
    found = []
    for row in await examination.rows("tenant_tables"):
        table, role = row["table"], row["role"]
        if not row["enabled"]:
            fix = f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;"
            off[table] = OFF.found(f"table {table} has policies, but row-level security is off", fix=fix)
        if row["free"]:
            owns = "owns" if row["owner"] == role else f"is a member of {row['owner']}, which owns"
            fix = f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY;"
            found.append(OWNER.found(f"role {role} {owns} table {table}, where row-level security is not forced", fix=fix))
        if row["truncates"]:
            fix = f"REVOKE TRUNCATE ON {table} FROM {', '.join(row['truncates'])};"
            found.append(TRUNCATE.found(f"role {role} may TRUNCATE table {table}", fix=fix))
    return [*off.values(), *found]
