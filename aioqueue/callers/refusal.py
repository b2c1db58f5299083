"""What the server said when it refused a statement, whatever error the caller's library has made of it.

What enqueues, cancels and retries are refused with is given aioqueue's own errors here; all else passes as it came.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

from aioqueue.errors import DuplicateJob, InvalidOption, RetryRefused, SchemaError, TenantRequired, TransactionAborted

ABORTED, TAKEN, INVALID, HOMELESS = "25P02", "23505", "22023", "AQ004"
"""SQLSTATEs of a refused enqueue: the transaction is aborted, the id is taken, an option is invalid, it needs a tenant."""
MISSING = "3F000"
"""SQLSTATE of an enqueue on the caller's connection in a database that has no such schema."""
TOO_OLD = "42883"
"""SQLSTATE of an enqueue on the caller's connection in a database whose schema has no such function yet."""
NOT_ENDED = "55000"
"""SQLSTATE of a refused retry: the job is neither dead nor cancelled."""


class Refusal(NamedTuple):
    """The server's answer."""

    sqlstate: str
    message: str
    """The first line of its message."""


def refusal(error: BaseException) -> Refusal | None:
    """Find the driver's error in this one or below it; None where the server has said nothing."""
    found: Refusal | None = None
    below: BaseException | None = error
    while below is not None:
        # psycopg and asyncpg say sqlstate, psycopg2 pgcode; SQLAlchemy and Django wrap these.
        state = getattr(below, "sqlstate", None) or getattr(below, "pgcode", None)
        if isinstance(state, str):
            said = getattr(getattr(below, "diag", None), "message_primary", None) or getattr(below, "message", None) or below
            found = Refusal(state, str(said).partition("\n")[0])
        below = getattr(below, "orig", None) or below.__cause__
    return found


@contextlib.contextmanager
def translated_retry(job_id: UUID) -> Iterator[None]:
    """Give the refusal to run a job again an error of its own."""
    try:
        yield
    except Exception as error:
        said = refusal(error)
        if said is None or said.sqlstate != NOT_ENDED:
            raise
        raise RetryRefused(job_id, said.message) from None


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Give what the server refuses aioqueue's own errors, whichever library tells of it; all else passes."""
    try:
        yield
    except Exception as error:
        said = refusal(error)
        state = "" if said is None else said.sqlstate
        if said is not None and state == TOO_OLD and "enqueue_alike(" in said.message:
            raise SchemaError("the schema is older than this code: as its owner, run python -m aioqueue migrate") from error
        if said is not None and state == MISSING:
            raise SchemaError(
                f"{said.message} in this database: as the role that is to own it, run python -m aioqueue migrate"
            ) from error
        if said is None or state not in (ABORTED, TAKEN, INVALID, HOMELESS):
            raise
        if state == ABORTED:
            raise TransactionAborted from None
        if state == INVALID:
            raise InvalidOption("job", said.message) from None
        homeless = re.search(r"task (.+) runs for a tenant only", said.message)
        if homeless is not None:
            raise TenantRequired(homeless[1]) from None
        # sql/functions/same_jobs.sql says which id is taken.
        taken = re.search(r"job id ([0-9a-f-]{36}) ", said.message)
        if taken is None:
            raise
        raise DuplicateJob(UUID(taken[1])) from error
