"""Jobs that are to be written: those of one enqueue, and how the server's functions take them.

They differ in id and payload only, and are kept as lists of these: an object for each would cost as much as to check its payload.
"""

from __future__ import annotations

import itertools
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
    def parameters(self) -> tuple[str | None, ...]:
        """What sql/functions/enqueue_alike.sql takes: ids, payloads, one a line, and options."""
        return (
            f"{{{','.join([f'{job_id.int:032x}' for job_id in self.ids])}}}",
            "\n".join(self.payloads),
            self.task,
            self.tenant,
            self.queue,
            None if self.priority is None else str(self.priority),
            None if self.delay is None else f"{self.delay:f}",
            None if self.run_at is None else self.run_at.isoformat(),
            None if self.max_attempts is None else str(self.max_attempts),
            self.key,
            None if self.total is None else str(self.total),
        )


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
