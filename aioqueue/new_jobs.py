"""Jobs that are to be written: those of one enqueue, and how the server's functions take them.

They differ in id and payload only, and are kept as lists of these: an object for each would cost as much as to check its payload.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID


@dataclass(slots=True, kw_only=True)
class NewJobs:
    """The jobs of one enqueue, validated, in their order; payloads are JSON text. Not frozen, which costs several times as much.

    `delay` is in seconds and counted by the database's clock; it excludes `run_at`. An option that is None is taken from the
    database's table of tasks, then from the defaults.
    """

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

    @property
    def parameters(self) -> tuple[str, str, str]:
        """What sql/functions/enqueue_alike.sql takes: options, ids, and payloads, one a line."""
        facts = {
            "task": self.task,
            "queue": self.queue,
            "priority": self.priority,
            "tenant": self.tenant,
            "delay": self.delay,
            "run_at": None if self.run_at is None else self.run_at.isoformat(),
            "max_attempts": self.max_attempts,
            "key": self.key,
            "total": self.total,
        }
        options = json.dumps({name: value for name, value in facts.items() if value is not None}, ensure_ascii=False)
        ids = ",".join([f"{job_id.int:032x}" for job_id in self.ids])
        return options, f"{{{ids}}}", "\n".join(self.payloads)


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
