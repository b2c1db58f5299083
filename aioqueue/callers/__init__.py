"""What `on=` takes: one module for each library, all of the shape in `caller.py`; a value's own library recognises it.

Nothing here imports a library of the caller's: a value of its classes can exist only if the caller has imported it. Nothing
begins, commits or retries.
"""

from __future__ import annotations

from aioqueue.context import JobTransaction
from aioqueue.errors import InvalidOption

from . import asyncpg, django, psycopg, sqlalchemy
from .caller import AsyncCaller, SyncCaller

LIBRARIES = (psycopg, asyncpg, sqlalchemy, django)
ASYNCHRONOUS = "a psycopg AsyncConnection, an asyncpg Connection, an SQLAlchemy AsyncSession or AsyncConnection"
SYNCHRONOUS = "a psycopg Connection, an SQLAlchemy Session or Connection, a Django connection"


def recognise(on: object) -> AsyncCaller | SyncCaller | None:
    """Return what to write with on the caller's connection or session; None for a value that no library recognises."""
    return next((caller for library in LIBRARIES if (caller := library.recognise(on)) is not None), None)


def async_caller(on: object) -> AsyncCaller:
    """Return what to write with on a connection or session that is awaited, or in a job's transaction. Raises InvalidOption."""
    caller = recognise(on.connection if isinstance(on, JobTransaction) else on)
    if isinstance(caller, AsyncCaller):
        return caller
    if caller is None:
        raise InvalidOption("on", f"expected {ASYNCHRONOUS}, a JobTransaction or the app, got {_name(on)}")
    raise InvalidOption("on", f"{_name(on)} blocks: use enqueue_sync(…) with it, or give {ASYNCHRONOUS}")


def sync_caller(on: object | None) -> SyncCaller:
    """Return what to write with on a connection or session that blocks. Raises InvalidOption."""
    caller = recognise(on)
    if isinstance(caller, SyncCaller):
        return caller
    if on is None:
        raise InvalidOption("on", f"enqueue_sync writes with your connection only: .options(on=…) with {SYNCHRONOUS}")
    if caller is None:
        raise InvalidOption("on", f"expected {SYNCHRONOUS}, got {_name(on)}")
    raise InvalidOption("on", f"{_name(on)} is awaited: use 'await ….enqueue(…)' with it, or give {SYNCHRONOUS}")


def _name(on: object) -> str:
    cls = type(on)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


__all__ = ["AsyncCaller", "SyncCaller", "async_caller", "recognise", "sync_caller"]
