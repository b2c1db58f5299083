"""The tasks of an app, by name, and the decorator that makes one of a function: `app.task`, typed by the first parameter.

What can be wrong with a function and its options is found by definition.py; what a task then is to its user stands in task.py.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, overload

from typing_extensions import TypeVar

from .context import HeldSession, JobContext, JobTransaction
from .definition import TaskDefinition, define
from .errors import TaskDefinitionError, UnknownTask
from .retry import Retry
from .session_factory import FIX
from .settings import DEFAULT_QUEUE
from .task import Enqueuer, Task

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=HeldSession[Any])
Opened = TypeVar("Opened", default=Any)
"""The type of the resources that an app's workers open; Any where nobody says."""


class TaskDecorator(Protocol[Opened]):  # pyright: ignore[reportInvalidTypeVarUse] - for mypy it is invariant
    """What `app.task(…)` returns: it makes a task of a function."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[JobTransaction[Opened], P], Awaitable[R]], /
    ) -> Task[Concatenate[JobTransaction[Opened], P], P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[S, P], Awaitable[R]], /) -> Task[Concatenate[S, P], P, R]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[JobContext[Opened], P], Awaitable[R]], /
    ) -> Task[Concatenate[JobContext[Opened], P], P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> Task[P, P, R]: ...
    @overload
    def __call__(
        self, fn: Callable[Concatenate[JobContext[Opened], P], R], /
    ) -> Task[Concatenate[JobContext[Opened], P], P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, P, R]: ...


class TaskRegistry(Enqueuer, Generic[Opened]):
    """The tasks of an app, by name; the app inherits it, and so is what its tasks enqueue with."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., ..., Any]] = {}

    @property
    def tasks(self) -> Mapping[str, Task[..., ..., Any]]:
        """All registered tasks by name; read-only."""
        return types.MappingProxyType(self._tasks)

    def get(self, name: str) -> Task[..., ..., Any]:
        """Return the task of that name. Raises UnknownTask."""
        task = self._tasks.get(name)
        if task is None:
            raise UnknownTask(name, self._tasks)
        return task

    @overload
    def task(
        self, fn: Callable[Concatenate[JobTransaction[Opened], P], Awaitable[R]], /
    ) -> Task[Concatenate[JobTransaction[Opened], P], P, R]: ...
    @overload
    def task(self, fn: Callable[Concatenate[S, P], Awaitable[R]], /) -> Task[Concatenate[S, P], P, R]: ...
    @overload
    def task(
        self, fn: Callable[Concatenate[JobContext[Opened], P], Awaitable[R]], /
    ) -> Task[Concatenate[JobContext[Opened], P], P, R]: ...
    @overload
    def task(self, fn: Callable[P, Awaitable[R]], /) -> Task[P, P, R]: ...
    @overload
    def task(self, fn: Callable[Concatenate[JobContext[Opened], P], R], /) -> Task[Concatenate[JobContext[Opened], P], P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = ...,
        queue: str = ...,
        priority: int = ...,
        retry: Retry | None = ...,
        timeout: timedelta | float | None = ...,
        max_running: int | None = ...,
        max_running_per_key: int | None = ...,
        require_tenant: bool | None = ...,
    ) -> TaskDecorator[Opened]: ...
    def task(
        self,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        retry: Retry | None = None,
        timeout: timedelta | float | None = None,
        max_running: int | None = None,
        max_running_per_key: int | None = None,
        require_tenant: bool | None = None,
    ) -> Any:
        """Register a function as a task: `@app.task` or `@app.task(queue="mail")`.

        The default name is `module.function`. `timeout` limits one attempt (seconds or a timedelta; None: the
        worker's limit). `max_running` limits how many of its jobs run at once, over all workers, `max_running_per_key`
        how many of one `.options(key=…)`. `require_tenant`: its jobs must have a tenant (True), or are for all of
        them and may have none (False); otherwise the app's TenantSettings decide. Raises TaskDefinitionError for a
        function that cannot be a task, and for a name that is taken.
        """

        def register(function: Callable[..., Any]) -> Task[..., ..., Any]:
            if isinstance(function, Task):
                raise TaskDefinitionError(f"{function.name!r} is a task already; register the plain function, under another name")
            return self._register(
                define(
                    function,
                    name=name,
                    queue=queue,
                    priority=priority,
                    retry=retry,
                    timeout=timeout,
                    max_running=max_running,
                    max_running_per_key=max_running_per_key,
                    require_tenant=require_tenant,
                )
            )

        return register if fn is None else register(fn)

    @property
    def has_sessions(self) -> bool:
        """Whether there is something to make the sessions with that a JobSession task takes."""
        return False

    def _register(self, definition: TaskDefinition) -> Task[..., ..., Any]:
        if definition.session is not None and not self.has_sessions:
            raise TaskDefinitionError(
                f"task {definition.name!r} takes a JobSession, but the app has no factory of sessions: {FIX}"
            )
        taken = self._tasks.get(definition.name)
        if taken is not None:
            code = inspect.unwrap(taken.definition.fn).__code__
            raise TaskDefinitionError(
                f"task {definition.name!r}: the name is taken by {code.co_filename}:{code.co_firstlineno}; "
                "give one of them another name: @app.task(name='…')"
            )
        task: Task[..., ..., Any] = Task(definition, self)
        self._tasks[definition.name] = task
        return task
