"""What `on=` takes: one module for each library, all of the shape in `caller.py`; a value's own library recognises it.

Nothing here imports a library of the caller's: a value of its classes can exist only if the caller has imported it. Nothing
begins, commits or retries.
"""

from __future__ import annotations

from . import asyncpg, django, psycopg, sqlalchemy
from .caller import AsyncCaller, SyncCaller

LIBRARIES = (psycopg, asyncpg, sqlalchemy, django)
ASYNCHRONOUS = "a psycopg AsyncConnection, an asyncpg Connection, an SQLAlchemy AsyncSession or AsyncConnection"
SYNCHRONOUS = "a psycopg Connection, an SQLAlchemy Session or Connection, a Django connection"


def recognise(on: object) -> AsyncCaller | SyncCaller | None:
    """Return what to write with on the caller's connection or session; None for a value that no library recognises."""
    return next((caller for library in LIBRARIES if (caller := library.recognise(on)) is not None), None)


__all__ = ["ASYNCHRONOUS", "SYNCHRONOUS", "AsyncCaller", "SyncCaller", "recognise"]
