"""What a test has asked to go wrong: errors instead of a task, the death of a worker at a point. Two middleware do it.

One is inside of the application's own middleware, where a task's error would come from; one is outside of it, and sees what
becomes of the attempt. How a worker dies stands in engine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, get_args
from uuid import UUID

from aioqueue.context import JobContext, JobTransaction
from aioqueue.middleware import CallNext, Middleware
from aioqueue.task import BoundTask, Task

from .ran import TestingError

CrashPoint = Literal["after_claim", "after_commit", "before_record", "after_record"]
"""Where a worker dies on a job's way: claim → run → record. `after_commit`: of a transaction that the job opened on the way, or,
of a task that takes one, the commit that records it.
"""

AnyTask = Task[..., ..., Any] | str
Error = BaseException | type[BaseException]


def task_name(task: AnyTask | BoundTask[..., Any], known: Mapping[str, object]) -> str:
    """Return the name of a task. Raises TestingError for one that the app does not have."""
    name = task if isinstance(task, str) else getattr(task, "name", None)
    if name not in known:
        raise TestingError(
            f"expected a task of the app or its name, got {task!r}; its tasks: {', '.join(sorted(known)) or 'none'}"
        )
    return str(name)


class WorkerDied(BaseException):
    """Ends user code of a worker that a test has let die."""


class Faults:
    """The faults of one test that are still to come, and what has gone wrong so far."""

    def __init__(self, die: Callable[[int], Awaitable[None]]) -> None:
        self._die = die
        self._errors: dict[str, list[Error]] = {}
        self._crashes: list[tuple[CrashPoint, str | None]] = []
        self.raised: dict[tuple[UUID, int], BaseException] = {}
        """By job and attempt: what came out of the task."""
        self.expected: set[tuple[UUID, int]] = set()
        """The attempts that were made to fail."""

    @property
    def crashes(self) -> bool:
        """Whether a worker is still to die."""
        return bool(self._crashes)

    def around(self, middleware: Sequence[Middleware]) -> tuple[Middleware, ...]:
        """Return the application's middleware, with the faults outside and inside of it."""
        return (self.outside, *middleware, self.inside)

    def fail_next(self, task: str, error: Error, times: int) -> None:
        """Let the next attempts of the task raise the error."""
        if times < 1:
            raise TestingError(f"times: at least 1, got {times}")
        self._errors.setdefault(task, []).extend([error] * times)

    def crash_at(self, point: CrashPoint, task: str | None, times: int) -> None:
        """Let the worker die at the point, of the next attempts (of the task)."""
        if point not in get_args(CrashPoint):
            raise TestingError(f"expected one of {', '.join(get_args(CrashPoint))}, got {point!r}")
        if times < 1:
            raise TestingError(f"times: at least 1, got {times}")
        crash: tuple[CrashPoint, str | None] = (point, task)
        self._crashes.extend([crash] * times)

    def left(self) -> list[str]:
        """Say what has not happened."""
        errors = [f"fail_next({task!r}, …) {len(found)} times" for task, found in self._errors.items() if found]
        return errors + [f"crash_worker_at({point!r})" + (f" of {task}" if task else "") for point, task in self._crashes]

    def take(self, point: CrashPoint, task: str) -> bool:
        """Whether the worker dies at this point now; then it is no longer to come."""
        for crash in self._crashes:
            if crash[0] == point and crash[1] in (None, task):
                self._crashes.remove(crash)
                return True
        return False

    async def inside(self, ctx: JobContext[Any] | JobTransaction[Any], call_next: CallNext) -> Any:
        """Raise what is to be raised, instead of the task."""
        errors = self._errors.get(ctx.task)
        if errors:
            error = errors.pop(0)
            self.expected.add((ctx.job_id, ctx.attempt))
            raise error() if isinstance(error, type) else error
        return await call_next()

    async def outside(self, ctx: JobContext[Any] | JobTransaction[Any], call_next: CallNext) -> Any:
        """Let the worker die where it is to, and take note of what the task raises."""
        if self.take("after_claim", ctx.task):
            await self._kill(ctx)
        if isinstance(ctx, JobContext):
            ctx._open = self._watched(ctx, ctx._open)
        try:
            value = await call_next()
        except (WorkerDied, asyncio.CancelledError):
            raise
        except BaseException as error:
            self.raised[ctx.job_id, ctx.attempt] = error
            raise
        if self.take("before_record", ctx.task):
            await self._kill(ctx, stop=False)
        return value

    def _watched(
        self, ctx: JobContext[Any], opens: Callable[[], AbstractAsyncContextManager[JobTransaction[Any]]]
    ) -> Callable[[], AbstractAsyncContextManager[JobTransaction[Any]]]:
        @contextlib.asynccontextmanager
        async def watched() -> AsyncIterator[JobTransaction[Any]]:
            async with opens() as tx:
                yield tx
            if self.take("after_commit", ctx.task):
                await self._kill(ctx)

        return watched

    async def _kill(self, ctx: JobContext[Any] | JobTransaction[Any], *, stop: bool = True) -> None:
        self.expected.add((ctx.job_id, ctx.attempt))
        await self._die(ctx.worker)
        if stop:
            raise WorkerDied
