"""A task as the user holds it: the typed face that calls or enqueues a function.

What a task is stands in definition.py, how a function becomes one in registry.py. Nothing here talks to a database: `Task`
passes its jobs on to the app, by the `Enqueuer` protocol.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import NoneType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel

from .definition import TaskDefinition
from .errors import InvalidPayload
from .job import Job
from .new_jobs import NewJobs
from .options import Options

F = ParamSpec("F")
P = ParamSpec("P")
R = TypeVar("R")

PART, MOST_PARTS = 1000, 50
"""Jobs of `enqueue_many` that are sent together at least, and how many such parts there are at most: more would be more
subtransactions than a snapshot has room for."""

Payload = BaseModel | Mapping[str, Any] | tuple[Any, ...]
"""One job of `enqueue_many`: the model, a mapping with the payload's keys, or positional arguments."""


class Enqueuer(Protocol):
    """What a task needs of the app."""

    @property
    @abstractmethod
    def payload_limit(self) -> int:
        """Bytes of a payload's JSON."""
        raise NotImplementedError

    @abstractmethod
    async def enqueue_jobs(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        """Write the jobs and those of the parts after them, all of them or none; give them the tenant that they get.

        Nothing is written where the parts raise instead of being made.
        """
        raise NotImplementedError

    @abstractmethod
    def enqueue_jobs_sync(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        """Do as `enqueue_jobs` on a connection that blocks."""
        raise NotImplementedError

    @abstractmethod
    def handle(self, job_id: UUID, decode: Callable[[str], Any] | None, tenant: str | None, *, on: object | None) -> Job[Any]:
        """Make the handle of a job; `on` as in its enqueue."""
        raise NotImplementedError


class BoundTask(Generic[P, R]):
    """A task with options for the jobs that it makes; see `Task.options`."""

    __slots__ = ("_definition", "_enqueuer", "_on", "_options")

    def __init__(self, definition: TaskDefinition, enqueuer: Enqueuer, options: Options, on: object | None) -> None:
        self._definition = definition
        self._enqueuer = enqueuer
        self._on = on
        self._options = replace(
            options,
            queue=options.queue or definition.queue,
            priority=definition.priority if options.priority is None else options.priority,
            max_attempts=options.max_attempts or definition.retry.max_attempts,
        )

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one job with these options; see `Task.enqueue`."""
        return await self._send_one(self._called(args, kwargs))

    async def enqueue_many(self, payloads: Iterable[Payload]) -> list[Job[R]]:
        """Enqueue many jobs with these options; see `Task.enqueue_many`."""
        handles: list[Job[R]] = []
        parts = self._parts(payloads, handles)
        for first in parts:
            await self._enqueuer.enqueue_jobs(first, parts, on=self._on)
        return handles

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one job on a connection or session that blocks, which `on` names; see `Task.enqueue_sync`."""
        jobs = self._options.jobs(self._definition.name, [self._called(args, kwargs)])
        self._enqueuer.enqueue_jobs_sync(jobs, on=self._on)
        return self._handles(jobs)[0]

    def enqueue_many_sync(self, payloads: Iterable[Payload]) -> list[Job[R]]:
        """Enqueue many jobs, all or none, on a connection or session that blocks; payloads as in `Task.enqueue_many`."""
        handles: list[Job[R]] = []
        parts = self._parts(payloads, handles)
        for first in parts:
            self._enqueuer.enqueue_jobs_sync(first, parts, on=self._on)
        return handles

    async def enqueue_payload(self, payload: Payload) -> Job[R]:
        """Enqueue one job with these options, of a payload in one of the forms of `enqueue_many`."""
        return await self._send_one(self._dump(payload))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return self._definition.payload.dump(args, kwargs, limit=self._enqueuer.payload_limit)

    async def _send_one(self, payload: str) -> Job[R]:
        jobs = self._options.jobs(self._definition.name, [payload])
        await self._enqueuer.enqueue_jobs(jobs, on=self._on)
        return self._handles(jobs)[0]

    def _parts(self, payloads: Iterable[Payload], handles: list[Job[R]]) -> Iterator[NewJobs]:
        """Make the jobs part by part; who asks for the next has sent the one before, whose handles are made then."""
        if isinstance(payloads, (BaseModel, Mapping, str, bytes)):
            raise InvalidPayload(self._definition.name, f"expected a list of payloads, got {payloads!r:.80}")
        payloads = list(payloads)
        size, total = max(PART, -(-len(payloads) // MOST_PARTS)), len(payloads)
        for start in range(0, total, size):
            dumped = self._dumped(payloads[start : start + size], start)
            jobs = self._options.jobs(self._definition.name, dumped, total=None if total <= size else 0 if start else total)
            yield jobs
            handles += self._handles(jobs)

    def _dumped(self, payloads: Sequence[Payload], start: int) -> list[str]:
        together = self._dumped_together(payloads)
        if together is not None:
            return together
        dumped = []
        for number, payload in enumerate(payloads, start):
            try:
                dumped.append(self._dump(payload))
            except InvalidPayload as error:
                raise InvalidPayload(error.task, f"number {number} (from 0): {error.reason}") from None
        return dumped

    def _dumped_together(self, payloads: Sequence[Payload]) -> list[str] | None:
        if len(payloads) < 2 or any(issubclass(kind, tuple) for kind in set(map(type, payloads))):
            return None
        return self._definition.payload.dump_values(payloads, limit=self._enqueuer.payload_limit)

    def _dump(self, payload: Payload) -> str:
        limit = self._enqueuer.payload_limit
        if isinstance(payload, tuple):
            return self._definition.payload.dump(payload, {}, limit=limit)
        if isinstance(payload, (str, bytes, int, float, list, NoneType)):
            expected = "expected a tuple of arguments, a mapping of them or the payload's model"
            raise InvalidPayload(self._definition.name, f"{expected}, got {type(payload).__name__}")
        return self._definition.payload.dump_value(payload, limit=limit)

    def _handles(self, jobs: NewJobs) -> list[Job[R]]:
        decode = self._definition.result.load
        return [self._enqueuer.handle(job_id, decode, jobs.tenant, on=self._on) for job_id in jobs.ids]


class Task(Generic[F, P, R]):
    """A registered function. F are its own parameters, P those of its payload, R what a job's result is.

    Calling it runs the plain function and enqueues nothing; the context, if it has one, is yours to give. The
    call is always awaited: a `def` task then runs in place, in the caller's thread.
    """

    def __init__(self, definition: TaskDefinition, enqueuer: Enqueuer) -> None:
        self.definition = definition
        self._enqueuer = enqueuer
        self._plain: BoundTask[P, R] = BoundTask(definition, enqueuer, Options(), None)
        functools.update_wrapper(self, definition.fn)

    @property
    def name(self) -> str:
        """The name under which jobs of this task are stored."""
        return self.definition.name

    def __call__(self, *args: F.args, **kwargs: F.kwargs) -> Awaitable[R]:
        if self.definition.is_async:
            running: Awaitable[R] = self.definition.fn(*args, **kwargs)
            return running
        return _run_plain(self.definition.fn, args, kwargs)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one job and return its handle.

        The job exists once this returns, or, with `on` and inside a job's own transaction, once that commits:
        such a job takes its tenant from there. Raises InvalidPayload, AppNotOpen, TransactionAborted,
        DuplicateJob. When cancelled, the job may or may not have been written.
        """
        return await self._plain.enqueue(*args, **kwargs)

    async def enqueue_many(self, payloads: Iterable[Payload]) -> list[Job[R]]:
        """Enqueue many jobs, all or none, and return their handles in the same order.

        A payload is the model (of a task with one model), a mapping with the payload's keys, or a tuple of
        positional arguments. Raises as `enqueue` does; InvalidPayload says which one.
        """
        return await self._plain.enqueue_many(payloads)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one job from code that does not await: `task.options(on=session).enqueue_sync(…)`.

        `on` is needed: a psycopg Connection, an SQLAlchemy Session or Connection, a Django connection, whose transaction the
        job joins. An open app is not. Raises as `enqueue` does. Nothing but enqueuing is there for such code.
        """
        return self._plain.enqueue_sync(*args, **kwargs)

    def options(
        self,
        *,
        tenant: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        delay: timedelta | float | None = None,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        key: str | None = None,
        on: object | None = None,
    ) -> BoundTask[P, R]:
        """Choose options for jobs of this task: `await task.options(tenant="42").enqueue(…)`.

        `delay` (seconds or a timedelta) counts from the database's now; `run_at` needs a time zone.
        `priority` is −2 to 2, higher runs first. Of jobs with the same `key` no more run at once than the task's
        `max_running_per_key`. `on` is the connection or session whose transaction the job
        joins, or the app, to leave the running job's transaction and tenant. Raises InvalidOption.
        """
        return self.bound(
            Options.of(
                tenant=tenant, queue=queue, priority=priority, delay=delay, run_at=run_at, max_attempts=max_attempts, key=key
            ),
            on=on,
        )

    def bound(self, options: Options, *, on: object | None) -> BoundTask[P, R]:
        """Choose options that were checked already."""
        return BoundTask(self.definition, self._enqueuer, options, on)

    def __repr__(self) -> str:
        return f"Task({self.name!r})"


async def _run_plain(fn: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    return fn(*args, **kwargs)
