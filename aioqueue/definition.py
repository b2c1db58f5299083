"""The definition of a task: a function and its options, checked, with the codecs of payload and result.

Whatever can be wrong with a function is refused here, where it is registered, and not where its jobs run.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from .context import HeldSession, JobContext, JobTransaction
from .errors import TaskDefinitionError
from .job import PRIORITIES
from .payload import PayloadCodec
from .result_codec import ResultCodec
from .retry import Retry, check_delay
from .settings import DEFAULT_QUEUE, TenantSettings, check_name
from .signature import read_signature


class Holds(Enum):
    """What a task holds while it runs; its first parameter's annotation says so."""

    TRANSACTION = "transaction"
    SESSION = "session"
    CONTEXT = "context"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefinition:
    """All that is known of a task; `timeout` is in seconds, None means the worker's limit."""

    name: str
    queue: str
    priority: int
    retry: Retry
    timeout: float | None
    holds: Holds
    is_async: bool
    payload: PayloadCodec
    result: ResultCodec
    fn: Callable[..., Any]
    max_running: int | None = None
    """Jobs of it that run at once, over all workers; None: as many as there are."""
    max_running_per_key: int | None = None
    """The same for jobs of one key."""
    require_tenant: bool | None = None
    """Whether its jobs must have a tenant; None: as the app's TenantSettings say."""
    session: type[HeldSession[Any]] | None = None
    """JobSession, or the subclass that it takes; None: it takes none."""

    def as_registered(self, tenants: TenantSettings) -> dict[str, object]:
        """Return what a worker writes of it into the table of tasks, for enqueues that leave options out and for limits."""
        return {
            "name": self.name,
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.retry.max_attempts,
            "require_tenant": tenants.requires(self.require_tenant),
            "max_running": self.max_running,
            "max_running_per_key": self.max_running_per_key,
        }


def define(
    fn: Callable[..., Any],
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    retry: Retry | None = None,
    timeout: timedelta | float | None = None,
    max_running: int | None = None,
    max_running_per_key: int | None = None,
    require_tenant: bool | None = None,
) -> TaskDefinition:
    """Check a function and its options, and make a task of them. Raises TaskDefinitionError."""
    _check_function(fn)
    if name is None:
        name = _default_name(fn)
    policy: object = Retry() if retry is None else retry
    try:
        check_name("name", name)
        check_name("queue", queue)
        check_priority(priority)
    except (TypeError, ValueError) as error:
        raise TaskDefinitionError(f"task {name!r}: {error}") from None
    if not isinstance(policy, Retry):
        raise TaskDefinitionError(f"task {name!r}: retry: expected a Retry, got {policy!r}")
    if require_tenant not in (None, True, False):
        raise TaskDefinitionError(f"task {name!r}: require_tenant: expected True, False or None, got {require_tenant!r}")
    parameters, returned = read_signature(fn, task=name)
    is_async = inspect.iscoroutinefunction(fn)
    holds, session = _read_holds(parameters, is_async=is_async, task=name)
    return TaskDefinition(
        name=name,
        queue=queue,
        priority=priority,
        retry=policy,
        timeout=_read_timeout(timeout, task=name),
        holds=holds,
        is_async=is_async,
        payload=PayloadCodec(parameters if holds is Holds.NOTHING else parameters[1:], task=name),
        result=ResultCodec(returned, task=name),
        fn=fn,
        max_running=_read_limit("max_running", max_running, task=name),
        max_running_per_key=_read_limit("max_running_per_key", max_running_per_key, task=name),
        require_tenant=require_tenant,
        session=session,
    )


def _check_function(fn: object) -> None:
    if not inspect.isfunction(fn):
        raise TaskDefinitionError(f"expected a function (def or async def), got {fn!r}; write a function that calls it")
    inner = inspect.unwrap(fn)
    where = f"task {fn.__qualname__!r}"
    if any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in (fn, inner)):
        raise TaskDefinitionError(f"{where}: a generator function cannot be a task; return a list instead of yielding")
    if inspect.iscoroutinefunction(inner) and not inspect.iscoroutinefunction(fn):
        raise TaskDefinitionError(
            f"{where}: an async function inside a decorator that is a plain def; make the wrapper async def"
        )


def _default_name(fn: Callable[..., Any]) -> str:
    if "<lambda>" in fn.__qualname__:
        raise TaskDefinitionError("a lambda has no name that lasts; give it one: name='…'")
    module = fn.__module__
    if module == "__main__":
        # The name that the module has where a worker imports it, so that both mean the same task.
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is not None:
            module = main.__spec__.name if main.__spec__ else module
        elif isinstance(file := getattr(main, "__file__", None), str):
            module = Path(file).stem
    return f"{module}.{fn.__qualname__.replace('<locals>.', '')}"


def check_priority(priority: object) -> int:
    """Return a priority, or raise ValueError with what is wrong with it."""
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in PRIORITIES:
        raise ValueError(f"priority: expected a whole number from -2 to 2 (runs first), got {priority!r}")
    return priority


def _read_timeout(timeout: object, *, task: str) -> float | None:
    if timeout is None:
        return None
    try:
        seconds = check_delay(timeout)
    except ValueError as error:
        raise TaskDefinitionError(f"task {task!r}: timeout: {error}") from None
    if seconds <= 0:
        raise TaskDefinitionError(f"task {task!r}: timeout: must be more than 0 s, got {timeout!r}")
    return seconds


def _read_limit(option: str, limit: object, *, task: str) -> int | None:
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < 2**31:
        raise TaskDefinitionError(f"task {task!r}: {option}: expected a whole number of at least 1, got {limit!r}")
    return limit


def _read_holds(parameters: list[inspect.Parameter], *, is_async: bool, task: str) -> tuple[Holds, type[HeldSession[Any]] | None]:
    holds = Holds.NOTHING
    session: type[HeldSession[Any]] | None = None
    for number, parameter in enumerate(parameters):
        annotation = parameter.annotation
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        if number == 0 and parameter.kind is not parameter.KEYWORD_ONLY:
            given = typing.get_origin(annotation) or annotation  # JobContext[Resources] is a JobContext
            if given is JobTransaction:
                holds = Holds.TRANSACTION
            elif given is JobContext:
                holds = Holds.CONTEXT
            elif isinstance(given, type) and issubclass(given, HeldSession) and hasattr(given, "opener"):
                holds, session = Holds.SESSION, given
            elif _is_session(given):
                raise TaskDefinitionError(
                    f"task {task!r}: a job's session is a JobSession: from aioqueue.contrib.sqlalchemy import JobSession, "
                    f"and put '{parameter.name}: JobSession' first in place of {_shown(annotation)}"
                )
            elif _takes_context(annotation):
                raise TaskDefinitionError(
                    f"task {task!r}: a first parameter of type {_shown(annotation)} could be a context, and "
                    "type checkers take it for one; give it a definite type, or put 'ctx: JobContext' first"
                )
        if (number or holds is Holds.NOTHING) and _mentions_context(annotation):
            raise TaskDefinitionError(
                f"task {task!r}: parameter {parameter.name!r} is {_shown(annotation)}; JobContext, "
                "JobTransaction or JobSession is the first parameter, positional, and exactly that"
            )
    if holds in (Holds.TRANSACTION, Holds.SESSION) and not is_async:
        raise TaskDefinitionError(f"task {task!r}: a def task runs in a thread and cannot use the transaction; make it async def")
    return holds, session


def _is_session(annotation: object) -> bool:
    """Whether it is a session of SQLAlchemy's, or what one of these could be given as."""
    found = (
        getattr(sys.modules.get(module), name, None)
        for module, name in (("sqlalchemy.ext.asyncio", "AsyncSession"), ("sqlalchemy.orm", "Session"))
    )
    return isinstance(annotation, type) and any(isinstance(kind, type) and issubclass(annotation, kind) for kind in found)


def _shown(annotation: object) -> str:
    return getattr(annotation, "__qualname__", None) or str(annotation)


def _members(annotation: object) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _takes_context(annotation: object) -> bool:
    """Whether the type takes a context too: then checkers drop the parameter from `enqueue`."""
    for member in _members(annotation):
        if member is Any:
            return True
        given = typing.get_origin(member) or member
        try:
            if isinstance(given, type) and (issubclass(JobContext, given) or issubclass(JobTransaction, given)):
                return given not in (JobContext, JobTransaction)
        except TypeError:  # a protocol that is not for issubclass
            continue
    return False


def _mentions_context(annotation: object) -> bool:
    given = typing.get_origin(annotation) or annotation
    if isinstance(given, type) and issubclass(given, (JobContext, JobTransaction, HeldSession)):
        return True
    return any(_mentions_context(part) for part in typing.get_args(annotation))
