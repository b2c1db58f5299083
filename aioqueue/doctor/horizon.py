"""Who keeps VACUUM from removing dead rows."""

from __future__ import annotations

from typing import Any

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination, spell

HELD = Kind(
    "horizon-held",
    Severity.WARNING,
    "while anybody may still need them, dead rows cannot be removed: tables grow, and other scans walk over them. Claims do not "
    "slow down under it. It is advice for the first minute, and 100,000 transactions",
)
LONG_SECONDS = 60.0
FAR_BACK = 100_000
"""Transactions since, from which on a holder is a warning however short it is there."""


async def look(examination: Examination) -> list[Finding]:
    """Find sessions, prepared transactions, replication slots and standbys that hold the xmin horizon."""
    rows = await examination.rows("horizon")
    if any(row["kind"] == "session" and row["seconds"] is None for row in rows):
        examination.unseen.append(
            "since when other roles' sessions hold the horizon, and what they do: GRANT pg_read_all_stats TO the role that looks"
        )
    return [_found(row) for row in rows]


def _found(row: dict[str, Any]) -> Finding:
    back = f"holds the horizon {row['back']:,} transactions back"
    since = "" if row["seconds"] is None else f" for {spell(row['seconds'])}"
    name = row["name"]
    match row["kind"]:
        case "session":
            by = f"session {name} of role {row['who']}{_place(row)}"
            what = f"{by}, {row['state'] or 'in a transaction'}{since}, {back}"
            fix = f"SELECT pg_terminate_backend({name});"
            if row["state"] == "active":
                fix = f"SELECT pg_cancel_backend({name});"
        case "prepared":
            what = f"prepared transaction {name!r} of role {row['who']}, prepared{since}, {back}"
            literal = name.replace("'", "''")
            fix = f"ROLLBACK PREPARED '{literal}'; or COMMIT PREPARED '{literal}';"
        case "slot":
            what = f"{row['who']} replication slot {name}, {row['state']}, {back}"
            literal = name.replace("'", "''")
            fix = f"SELECT pg_drop_replication_slot('{literal}');"
            if row["state"] == "active":
                fix = "end the long query on that standby, or set hot_standby_feedback = off there"
        case _:
            what = f"standby {name} of role {row['who']}{_place(row)}, by hot_standby_feedback, {back}"
            fix = "end the long query on that standby, or set hot_standby_feedback = off there"
    # An active slot and a standby are as old as their connection, not as what they hold.
    age = None if row["kind"] in ("slot", "standby") else row["seconds"]
    long = (age is not None and age >= LONG_SECONDS) or row["back"] >= FAR_BACK or row["state"] == "inactive"
    return HELD.found(what, fix=fix, severity=None if long else Severity.ADVICE)


def _place(row: dict[str, Any]) -> str:
    parts = [part for part in (row["application"], row["address"] and f"from {row['address']}") if part]
    return f" ({', '.join(parts)})" if parts else ""
