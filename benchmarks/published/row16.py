"""A steady stream of jobs beside long analytic queries: the mixed workload of a database vendor's write-up."""

from __future__ import annotations

from .stage import Stage, Verdict

TITLE = "800 jobs/s beside three overlapping 120 s analytic queries"
PUBLISHED = "a queue of the usual design: 155,000 jobs behind, 300 ms lock times, 383,000 dead rows"


async def run(_stage: Stage) -> Verdict:
    """Say why it is not run here."""
    return Verdict(
        waiting="the mixed workload runs 15 minutes at a fixed rate, and is a benchmark of its own that is not built yet"
    )
