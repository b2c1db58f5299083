"""Jobs that nobody runs: a dead worker's, of a queue that nobody serves, of a task that nobody knows. `status` says these too."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination, spell

DEAD = Kind(
    "dead-worker-holds-jobs",
    Severity.WARNING,
    "a worker that died keeps its running jobs until a living one takes them over, and none does",
)
UNSERVED = Kind(
    "queue-unserved",
    Severity.WARNING,
    "jobs of a queue run only where a worker serves that queue, by -q or by the tasks that it knows",
)
UNKNOWN = Kind(
    "task-unknown",
    Severity.WARNING,
    "a job whose task a worker does not know is put back, for one that does: after a deploy that has not reached every worker, "
    "or when a task was renamed",
)
CAP = 10_001
"""Rows of one lane that are looked at; shown as 10000+."""
SECONDS = 60
"""Jobs that are ready for longer, in a queue that no living worker serves, are a finding."""

Rows = Iterable[dict[str, Any]]


async def look(examination: Examination) -> list[Finding]:
    """Read the queues, the workers and the unknown tasks, and judge them."""
    conn, store = examination.conn, examination.store
    workers = await store.list_workers(conn, cap=CAP)
    lanes = await store.count_lanes(conn, cap=CAP)
    return judge(workers, lanes, await store.count_unknown_tasks(conn, cap=CAP))


def judge(workers: Rows, lanes: Rows, unknown: Rows) -> list[Finding]:
    """Say which jobs nobody runs."""
    workers = list(workers)
    found = [
        DEAD.found(
            f"worker {_place(worker)} is dead and still holds {_count(worker['holds'])} jobs",
            fix="a living worker takes them over, start one: python -m aioqueue worker -A …",
        )
        for worker in workers
        if worker["dead"] and worker["holds"]
    ]
    served = {queue for worker in workers if not worker["dead"] for queue in worker["queues"]}
    oldest: dict[str, float] = {}
    for lane in lanes:
        if lane["ready"] and lane["queue"] not in served and (lane["oldest_ready_seconds"] or 0) > SECONDS:
            oldest[lane["queue"]] = max(oldest.get(lane["queue"], 0.0), lane["oldest_ready_seconds"])
    found += [
        UNSERVED.found(
            f"queue {queue!r}: jobs ready for {spell(seconds)}, and no living worker serves it",
            fix=f"start one: python -m aioqueue worker -A … -q {shlex.quote(f'{queue}:1' if ':' in queue else queue)}",
        )
        for queue, seconds in oldest.items()
    ]
    found += [
        UNKNOWN.found(
            f"task {row['task']!r}: {_count(row['jobs'])} jobs wait, no worker that claimed them knows it",
            fix="start a worker whose app has it: python -m aioqueue worker -A …",
        )
        for row in unknown
    ]
    return found


def _count(number: int) -> str:
    return f"{CAP - 1}+" if number >= CAP else str(number)


def _place(worker: dict[str, Any]) -> str:
    return str(worker["id"]) if worker["host"] is None else f"{worker['host']}:{worker['pid']}"
