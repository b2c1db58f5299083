"""Jobs that are to be written: those of one enqueue, and how the server's functions take them.

They differ in id and payload only, and are kept as lists of these: an object for each would cost as much as to check its payload.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import overload
from uuid import UUID

from .job import NewJob


@dataclass(slots=True, kw_only=True)
class NewJobs(Sequence[NewJob]):
    """The jobs of one enqueue, in their order; the rest of the fields as in NewJob."""

    task: str
    ids: Sequence[UUID]
    payloads: Sequence[str]
    queue: str | None = None
    priority: int | None = None
    tenant: str | None = None
    delay: float | None = None
    run_at: datetime | None = None
    max_attempts: int | None = None
    key: str | None = None
    total: int | None = None
    """Of a part: how many jobs it and the parts after it are, 0 of all but the first; None: this is all."""

    def joined(self, parts: Iterable[NewJobs]) -> NewJobs:
        """Make one of a first part and the parts after it."""
        every = [self, *parts]
        ids, payloads = [job_id for part in every for job_id in part.ids], [text for part in every for text in part.payloads]
        return replace(self, ids=ids, payloads=payloads, total=None) if len(every) > 1 else self

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, which: int) -> NewJob: ...
    @overload
    def __getitem__(self, which: slice) -> list[NewJob]: ...
    def __getitem__(self, which: int | slice) -> NewJob | list[NewJob]:
        if isinstance(which, slice):
            return list(self._jobs(self.ids[which], self.payloads[which]))
        return next(self._jobs([self.ids[which]], [self.payloads[which]]))

    def __iter__(self) -> Iterator[NewJob]:
        return self._jobs(self.ids, self.payloads)

    def _jobs(self, ids: Iterable[UUID], payloads: Iterable[str]) -> Iterator[NewJob]:
        for job_id, payload in zip(ids, payloads, strict=True):
            yield NewJob(
                id=job_id,
                task=self.task,
                payload=payload,
                queue=self.queue,
                priority=self.priority,
                tenant=self.tenant,
                delay=self.delay,
                run_at=self.run_at,
                max_attempts=self.max_attempts,
                key=self.key,
            )

    @property
    def parameters(self) -> tuple[str, str, str]:
        """What sql/functions/enqueue_alike.sql takes: options, ids, and payloads, one a line."""
        ids = ",".join([f"{job_id.int:032x}" for job_id in self.ids])
        options = _options_json(self) if self.total is None else _options_json(self, total=self.total)
        return options + "}", f"{{{ids}}}", "\n".join(self.payloads)


class Parts:
    """A first part and those after it, each made once, however often they are read; an error in making one is met each time."""

    def __init__(self, first: NewJobs, others: Iterable[NewJobs]) -> None:
        self._made = [first]
        self._others = iter(others)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[NewJobs]:
        for number in itertools.count():
            if number == len(self._made):
                if self._error is not None:
                    raise self._error
                try:
                    self._made.append(next(self._others))
                except StopIteration:
                    return
                except Exception as error:
                    self._error = error
                    raise
            yield self._made[number]


def _options_json(of: NewJob | NewJobs, **more: object) -> str:
    facts = {
        "task": of.task,
        "queue": of.queue,
        "priority": of.priority,
        "tenant": of.tenant,
        "delay": of.delay,
        "run_at": None if of.run_at is None else of.run_at.isoformat(),
        "max_attempts": of.max_attempts,
        "key": of.key,
        **more,
    }
    return json.dumps({name: value for name, value in facts.items() if value is not None}, ensure_ascii=False)[:-1]


def new_job_json(job: NewJob) -> str:
    """Return the job as enqueue_many takes it; the payload is JSON text already and is put in as it is."""
    return f'{_options_json(job, id=str(job.id))}, "payload": {job.payload}}}'


def jobs_json(jobs: Iterable[NewJob]) -> str:
    """Return the jobs, of whatever tasks and options, as sql/functions/enqueue_many.sql takes them."""
    return "[" + ",".join(map(new_job_json, jobs)) + "]"
