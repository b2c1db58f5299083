"""Turns every error into one line, the fix and an exit code: 1 failed, 2 wrongly called, 3 unhealthy (the schema too).

The traceback is shown with -v only. Every command runs inside `Commands`, which applies this once.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import IO, Any

import click
import psycopg

from aioqueue.errors import (
    AioQueueError,
    ConfigurationError,
    InvalidOption,
    InvalidPayload,
    ResourcesFailed,
    SchemaError,
    TaskDefinitionError,
    TenantRequired,
    UnknownTask,
    UnsafeDatabase,
)
from aioqueue.lines import one_line, printable
from aioqueue.migrate import SchemaLocked
from aioqueue.server import connection_lost

FAILED = 1
USAGE = 2
UNHEALTHY = 3

WRONGLY_CALLED = (ConfigurationError, InvalidOption, InvalidPayload, TaskDefinitionError, TenantRequired, UnknownTask)
POLICY_CHECKS = ("check_enable_rls", "ExecWithCheckOptions")
"""PostgreSQL's functions that refuse a statement because of a policy; unlike their messages, they are never translated."""


@dataclass
class Common:
    """What the options say that every command takes; see options.py."""

    dsn: str | None = None
    schema: str | None = None
    app: str | None = None
    verbose: bool = False
    given: set[str] = field(default_factory=set)
    """Names of those that stand on the command line itself."""


class Failure(click.ClickException):
    """One line on standard error, and an exit code."""

    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(printable(f"error: {self.message}"), file=file, err=True)


class Misuse(Failure):
    """What was asked for cannot be."""

    exit_code = USAGE


class Unhealthy(Failure):
    """The schema is missing, or does not fit."""

    exit_code = UNHEALTHY


def explain(error: BaseException) -> Failure:
    """Return what to print for an error, and the exit code."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = one_line(str(error)) or type(error).__name__
    if isinstance(error, SchemaError):
        return Unhealthy(text)
    if isinstance(error, UnsafeDatabase):
        return Unhealthy(str(error))
    if isinstance(error, TenantRequired):
        return Misuse(f"task {error.task!r} runs for a tenant only: give --tenant")
    if isinstance(error, ResourcesFailed):
        return Failure(f"{text} (-v shows where)")
    if isinstance(error, AioQueueError):
        return Misuse(text) if isinstance(error, WRONGLY_CALLED) else Failure(text)
    if isinstance(error, psycopg.errors.InsufficientPrivilege) and error.diag.source_function in POLICY_CHECKS:
        return Failure(
            f"{text}: a policy stands on the queue's own tables, which must have none; find it with: python -m aioqueue doctor"
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return Failure(
            f"{text}: the owner migrates, a worker's role reads everything, a client's may only enqueue, and show, cancel and "
            "retry jobs by their ids; use the DSN of a role that may, or have the owner run: "
            "python -m aioqueue migrate --grants ROLE (that makes a worker of it; with --as client, a client)"
        )
    if isinstance(error, psycopg.errors.UndefinedObject) and text.startswith("role "):
        return Failure(f"{text}: create it first, as a role that may: CREATE ROLE … LOGIN")
    if isinstance(error, SchemaLocked):
        return Failure(text)
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return Failure(f"{text}: somebody holds a table; nothing was changed, run it again")
    if isinstance(error, psycopg.Error) and connection_lost(error):
        return Failure(f"cannot reach the database: {text}; check --dsn (AIOQUEUE_DSN), and that the server runs")
    if isinstance(error, psycopg.Error):
        return Failure(text)
    return Failure(f"{type(error).__name__}: {text} (-v shows where)")


class Commands(click.Group):
    """A group whose commands fail in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort) as error:
            if isinstance(error, Failure) and error.__cause__ is not None and ctx.ensure_object(Common).verbose:
                traceback.print_exception(error.__cause__)
            raise
        except BrokenPipeError:
            raise  # whoever read has enough, as `head` does: click ends the command quietly, with code 1
        except Exception as error:
            if ctx.ensure_object(Common).verbose:
                traceback.print_exception(error)
            raise explain(error) from error
