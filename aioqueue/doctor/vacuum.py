"""Whether the queue's tables are vacuumed."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination, spell

OFF = Kind(
    "autovacuum-off",
    Severity.WARNING,
    "every job leaves dead rows: without VACUUM the tables grow without end, and the age of the oldest transaction with them",
)
DEAD = Kind(
    "dead-rows",
    Severity.WARNING,
    "autovacuum is far behind: it is held back (see horizon-held), too slow, or too few of its workers run",
)
MANY = 100_000
"""Dead rows of one table, more than it has living ones, from which on VACUUM is behind; autovacuum comes at 20,000."""


async def look(examination: Examination) -> list[Finding]:
    """Find tables that are not vacuumed, or too late."""
    rows = await examination.rows("vacuum")
    examination.facts["dead_rows"] = {
        row["table"]: {"dead": row["dead"], "living": row["living"], "vacuumed_seconds_ago": row["seconds"]}
        for row in rows
        if row["dead"]
    }
    found = []
    if rows and not rows[0]["server"]:
        fix = "ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf();"
        found.append(OFF.found("autovacuum is off on this server", fix=fix))
    for row in rows:
        table = row["table"]
        if row["off"]:
            fix = f"ALTER TABLE {table} RESET (autovacuum_enabled);"
            found.append(OFF.found(f"autovacuum is off for the queue's table {table}", fix=fix))
        if (row["dead"] or 0) > max(MANY, row["living"] or 0):
            last = "never vacuumed" if row["seconds"] is None else f"last vacuumed {spell(row['seconds'])} ago"
            what = f"table {table} has {row['dead']:,} dead rows and {row['living']:,} living ones, {last}"
            found.append(DEAD.found(what, fix=f"end what holds the horizon, then VACUUM {table};"))
    return found
