"""Middleware: what runs around every task of an app, in the asyncio task and the transaction of its job.

One shape, `async def middleware(ctx, call_next)`; user_code.py calls it. Knows nothing of outcomes: what it returns and raises
counts as the task's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .context import JobContext, JobTransaction
from .errors import ConfigurationError

CallNext: TypeAlias = Callable[[], Awaitable[Any]]
"""Runs the task, or the next middleware around it; returns what that returns."""
Middleware: TypeAlias = Callable[[JobContext[Any] | JobTransaction[Any], CallNext], Awaitable[Any]]
"""Runs around a task: `async def middleware(ctx: JobFacts, call_next: CallNext) -> Any: return await call_next()`.

`ctx` is what the task is given, a JobSession too where tasks take one.
"""


def check_middleware(middleware: Iterable[Middleware]) -> tuple[Middleware, ...]:
    """Return them, or raise ConfigurationError for what is no async function of two arguments."""
    if callable(middleware):
        raise ConfigurationError(f"middleware: expected a list of async functions, got {_name(middleware)}")
    checked = tuple(middleware)
    for one in checked:
        if not inspect.iscoroutinefunction(one) and not inspect.iscoroutinefunction(getattr(type(one), "__call__", None)):  # noqa: B004 - an object with an async __call__
            raise ConfigurationError(f"middleware: expected 'async def middleware(ctx, call_next)', got {_name(one)}")
        try:
            inspect.signature(one).bind(None, None)
        except TypeError:
            raise ConfigurationError(f"middleware: {_name(one)} must take two arguments: (ctx, call_next)") from None
    return checked


def _name(given: object) -> str:
    name = getattr(given, "__qualname__", None)
    code = getattr(given, "__code__", None)
    where = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return repr(given) if name is None else f"{name.replace('<locals>.', '')}{where}"


def wrap(middleware: Sequence[Middleware], ctx: Any, call: CallNext) -> CallNext:
    """Put the middleware around a call, the first outermost."""
    for one in reversed(middleware):
        call = functools.partial(one, ctx, call)
    return call
