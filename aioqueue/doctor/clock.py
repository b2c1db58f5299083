"""Whether this host's clock agrees with the server's."""

from __future__ import annotations

import time

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

SKEW = Kind(
    "clock-skew",
    Severity.WARNING,
    "leases, due times and retries go by the server's clock alone; but ids of jobs carry their maker's time, by which they are "
    "listed and kept, and run_at= and logs are this host's",
)
TOLERATED = 2.0
"""Seconds."""
now = time.time


async def look(examination: Examination) -> list[Finding]:
    """Ask the server for its time; what the question took is not held against anybody."""
    before = now()
    (row,) = await examination.rows("clock")
    after = now()
    ahead = before - row["seconds"] if before > row["seconds"] else min(0.0, after - row["seconds"])
    examination.facts["clock_seconds"] = round((before + after) / 2 - row["seconds"], 3)
    if abs(ahead) <= TOLERATED:
        return []
    where = "ahead of" if ahead > 0 else "behind"
    return [SKEW.found(f"this host's clock is {abs(ahead):.1f} s {where} the server's", fix="timedatectl set-ntp true (on both)")]
