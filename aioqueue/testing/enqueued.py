"""What a test finds enqueued, and what of it is what it expects; the message of an assertion says where they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal
from uuid import UUID

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from aioqueue.task import Task

READ = """
SELECT coalesce(pg_catalog.json_agg(x ORDER BY x.id), '[]')::text FROM (
  SELECT id, task, queue, priority, tenant, state, attempt, run_at, payload FROM aioqueue.jobs ORDER BY id DESC LIMIT 10000) x
"""
SHOWN = 20
"""Jobs that a message shows at most."""


class _Any(Enum):
    ANY = "any"


ANY: Final = _Any.ANY
Given = Literal[_Any.ANY]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """One job as it was asked for; `state` and `attempt` say what has become of it meanwhile."""

    id: UUID
    task: str
    queue: str
    priority: int
    tenant: str | None
    payload: Any
    """As JSON."""
    state: str
    attempt: int

    def __str__(self) -> str:
        tenant = "" if self.tenant is None else f" tenant={self.tenant!r}"
        return f"{self.task}{tenant} queue={self.queue!r} {self.state} payload={json.dumps(self.payload, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a test expects of a job; what it does not name may be anything."""

    task: str | None
    payload: Any = ANY
    """As JSON."""
    whole: bool = False
    """Whether the payload is all of it; otherwise it is the keys that matter."""
    facts: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task[..., ..., Any] | None, name: str | None, payload: object, facts: Mapping[str, object]) -> Wanted:
        """Make it of what the test has given. A mapping names some keys; a model or a tuple of arguments is the whole payload."""
        given = {key: value for key, value in facts.items() if value is not ANY}
        if payload is ANY:
            return cls(name, facts=given)
        if isinstance(payload, tuple) and task is not None:
            dumped = task.definition.payload.dump(payload, {}, limit=2**30)
            return cls(name, json.loads(dumped), True, given)
        if isinstance(payload, BaseModel) and task is not None:
            return cls(name, json.loads(task.definition.payload.dump_value(payload, limit=2**30)), True, given)
        return cls(name, to_jsonable_python(payload), not isinstance(payload, Mapping), given)

    def differences(self, job: Enqueued) -> list[str]:
        """Say what of the job is not as expected; the task apart, which stands in its line."""
        found = [
            f"{name}: expected {value!r}, got {getattr(job, name)!r}"
            for name, value in self.facts.items()
            if getattr(job, name) != value
        ]
        if self.payload is ANY or self.payload == job.payload:
            return found
        if not isinstance(self.payload, dict) or not isinstance(job.payload, dict):
            return [*found, f"payload: expected {self.payload!r}, got {job.payload!r}"]
        for key, value in self.payload.items():
            if key not in job.payload:
                found.append(f"payload[{key!r}]: expected {value!r}, got none")
            elif job.payload[key] != value:
                found.append(f"payload[{key!r}]: expected {value!r}, got {job.payload[key]!r}")
        if self.whole:
            found += [
                f"payload[{key!r}]: expected none, got {job.payload[key]!r}" for key in job.payload.keys() - self.payload.keys()
            ]
        return found

    def matches(self, job: Enqueued) -> bool:
        """Whether the job is as expected."""
        return self.task in (None, job.task) and not self.differences(job)

    def __str__(self) -> str:
        parts = [self.task or "any task", *(f"{name}={value!r}" for name, value in self.facts.items())]
        if self.payload is not ANY:
            parts.append(f"payload={json.dumps(self.payload, ensure_ascii=False)}" + ("" if self.whole else " (these keys)"))
        return " ".join(parts)


def parse(text: str) -> list[Enqueued]:
    """Read what READ answers."""
    names = ("task", "queue", "priority", "tenant", "payload", "state", "attempt")
    return [Enqueued(id=UUID(row["id"]), **{name: row[name] for name in names}) for row in json.loads(text)]


def report(wanted: Wanted, expected: str, found: Sequence[Enqueued], jobs: Sequence[Enqueued], hint: str) -> str:
    """Compose the message of an assertion that does not hold: the nearest jobs first, each with what is different."""

    def distance(job: Enqueued) -> tuple[bool, int]:
        return wanted.task not in (None, job.task), len(wanted.differences(job))

    lines = [f"expected {expected} enqueued, found {len(found)}: {wanted}"]
    lines.append("no job is there" if not jobs else "1 job is there:" if len(jobs) == 1 else f"{len(jobs)} jobs are there:")
    for job in sorted(jobs, key=distance)[:SHOWN]:
        lines.append(f"  {'=' if job in found else '-'} {job}")
        if wanted.task in (None, job.task):
            lines += [f"      {difference}" for difference in wanted.differences(job)]
    if len(jobs) > SHOWN:
        lines.append(f"  … and {len(jobs) - SHOWN} more")
    if hint:
        lines.append(hint)
    return "\n".join(lines)
