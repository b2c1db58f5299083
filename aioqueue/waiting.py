"""One wait for a job, what its end means, and what a reader of jobs asks for at once; pure. result.py reads and answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from .client_store import EndedJob
from .errors import JobCancelled, JobFailed, ResultInvalid
from .job import Job
from .states import JobState
from .watch import Watched

BATCH = 5_000
"""Jobs of one query at most."""

Key = tuple[UUID, str | None]
"""A job, and the tenant for whom it is read; None: any."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One call of `wait`. Its future is set to the ended job, or to the error that ends the wait."""

    key: Key
    future: asyncio.Future[EndedJob]
    seconds: float | None
    watched: Watched | None = None
    """Set for one that is to be told of each change, not only of the end."""
    read: int = -1
    """The read of all watchers that has answered it."""
    last: bool = False
    """Its time is up: the next read answers, whatever it says."""
    unknown_since: float | None = None


def expired(job_id: UUID, keep: float) -> bool:
    # An unknown job of that age was pruned. A UUIDv7 begins with its milliseconds; the client's clock is good enough for days.
    return job_id.version == 7 and (job_id.int >> 80) / 1000 < time.time() - keep


def result_of(job: Job[Any], ended: EndedJob) -> Any:
    """Return the result of a job that has ended, or raise what `Job.result` does for such an end."""
    if ended.state is JobState.DEAD:
        raise JobFailed(job.id, attempt=ended.attempt or 0, error_type=ended.error_type, error_message=ended.error_message)
    if ended.state is JobState.CANCELLED:
        raise JobCancelled(job.id, ended.message)
    text = "null" if ended.result is None else ended.result
    try:
        return json.loads(text) if job.decode is None else job.decode(text)
    except ValueError as error:
        raise ResultInvalid(job.id, str(error)) from error


def standing(row: EndedJob) -> tuple[object, ...]:
    progress = row.progress
    return row.state, row.stage, row.attempt, progress and (progress.value, progress.message)


def batches(keys: Sequence[Key]) -> Iterator[list[Key]]:
    # A job comes once in a batch: the rows do not say for which tenant they were read.
    while keys:
        batch: dict[UUID, Key] = {}
        rest: list[Key] = []
        for key in keys:
            if key[0] in batch or len(batch) == BATCH:
                rest.append(key)
            else:
                batch[key[0]] = key
        yield list(batch.values())
        keys = rest
