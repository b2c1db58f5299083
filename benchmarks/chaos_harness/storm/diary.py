"""Reads what the workers noted of their runs: starts without a claim of their own, runs of one job at the same time, breaches."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from .fleet import Fleet, Life
from .model import Storm
from .tasks import UNCANCELLABLE


@dataclass
class Execution:
    """One run of a task's function."""

    life: Life
    job: UUID
    attempt: int
    task: str
    start: float
    end: float


def read(storm: Storm, fleet: Fleet) -> list[Execution]:
    """Every run there was. One without an end lasted until its process ended."""
    found: list[Execution] = []
    for life in fleet.lives():
        runs: dict[tuple[UUID, int], Execution] = {}
        for line in life.diary.read_text().splitlines():
            word, job, attempt, at, task = line.split()
            key = (UUID(job), int(attempt))
            match word:
                case "start" if key in runs:
                    storm.fault(f"one process ran attempt {attempt} of job {job} twice")
                case "start":
                    runs[key] = Execution(life, *key, task, float(at), life.ended)
                case "end":
                    runs[key].end = float(at)
                case _:
                    storm.fault(f"{task} {job}, attempt {attempt}: a transaction of another tenant, see {life.diary.name}")
        found += runs.values()
    return found


def judge(storm: Storm, fleet: Fleet, executions: list[Execution]) -> Counter[str]:
    """Check that no claim was run twice, and no job by two at once but where a lost lease allows it; count those."""
    overlaps: Counter[str] = Counter()
    by_job: defaultdict[UUID, list[Execution]] = defaultdict(list)
    for execution in executions:
        by_job[execution.job].append(execution)
    for job, runs in by_job.items():
        runs.sort(key=lambda run: run.start)
        if len({run.attempt for run in runs}) < len(runs):
            storm.fault(f"an attempt of job {job} ran twice: {[(r.attempt, r.life.log.name) for r in runs]}")
        if [run.attempt for run in runs] != sorted(run.attempt for run in runs):
            storm.counts["claims that started after a later claim's"] += 1
        for before, after in pairwise(runs):
            if before.end <= after.start:
                continue
            cause = fleet.excuse(before.life, before.start, after.start)
            kind = "could not be cancelled" if before.task in UNCANCELLABLE else "waited"
            overlaps[f"{cause}, the first {kind}"] += 1
            # Held still, a process cannot cancel; without the database, it does so before its lease ends.
            if cause is None or (cause not in ("stop", "starved") and before.task not in UNCANCELLABLE):
                storm.fault(
                    f"{before.task} {job}: attempt {after.attempt} in {after.life.log.name} began"
                    f" {before.end - after.start:.2f} s before attempt {before.attempt} in {before.life.log.name} ended ({cause})"
                )
    return overlaps
