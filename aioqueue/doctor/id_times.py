"""What stands in the DEFAULT partitions that should not: jobs with ids of a wrong clock, or too much of anything."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination, spell

AHEAD = Kind(
    "ids-of-the-future",
    Severity.WARNING,
    "a job's id carries the time of the clock where it was enqueued, by which ended jobs are dropped: these stand in the DEFAULT "
    "partition and are deleted one by one",
)
LARGE = Kind(
    "default-partition-large",
    Severity.ADVICE,
    "while the DEFAULT partitions are larger than 64 MB no ranges are made, since each would read them whole with its locks in "
    "hand: ended jobs are deleted one by one instead of dropped, for which VACUUM has to clean up",
)
CAP = 10_001
"""Jobs that are counted; shown as 10,000+."""
LIMIT = 64 * 1024 * 1024
"""Bytes of DEFAULT up to which make_ranges attaches (sql/functions/make_ranges.sql, p_scan)."""


async def look(examination: Examination) -> list[Finding]:
    """Look at the DEFAULT partitions."""
    (row,) = await examination.rows("id_times", cap=CAP)
    examination.facts["default_partition_bytes"] = row["bytes"]
    found = []
    if row["jobs"]:
        number = f"{CAP - 1:,}+" if row["jobs"] >= CAP else f"{row['jobs']:,}"
        found.append(
            AHEAD.found(
                f"{number} jobs have ids of times to come, the last one {spell(row['ahead'])} ahead",
                fix="set the clock of the hosts that enqueue (NTP); the jobs themselves run, and are deleted when they are due",
            )
        )
    if (row["bytes"] or 0) > LIMIT:
        found.append(
            LARGE.found(
                f"the DEFAULT partitions have {row['bytes'] / 1024 / 1024:,.0f} MB",
                fix="python -m aioqueue migrate makes the ranges whatever it takes; where nothing is deleted "
                "(RetentionSettings(succeeded=None)) it is as it must be",
            )
        )
    return found
