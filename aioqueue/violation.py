"""Whether a task has broken its job's transaction on psycopg: looked at before the end, or read from what the server refuses.

Says it in words, and sends nothing: open_transaction.py ends transactions. What the server's refusal means whatever library
holds them, terms.py says; what may not be done in a session, session_guard.py.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus, TransactionStatus

from .claimed import Claimed
from .errors import TransactionViolation
from .job_connection import LEFT, JobConnection
from .nested import Nesting
from .terms import refusal_of_end

# The members of an enum are looked up by code in Python: for each job that would show.
IN_TRANSACTION, IN_ERROR, ACTIVE = int(TransactionStatus.INTRANS), int(TransactionStatus.INERROR), int(TransactionStatus.ACTIVE)
NO_PIPELINE = int(PipelineStatus.OFF)


def check_end(conn: AsyncConnection[Any], given: JobConnection, nesting: Nesting, *, in_use: bool) -> None:
    """Raise what keeps a job's transaction from ending as a success; user code has nothing of it any more.

    `in_use`: whether a statement of it was under way when it was taken back.
    """
    if given.left:
        raise TransactionViolation.by(LEFT)
    if given.closed_by_user:
        raise TransactionViolation.by("it closed its connection")
    if conn.closed:
        raise psycopg.OperationalError("the connection of the job's transaction was lost")
    if conn.pgconn.pipeline_status != NO_PIPELINE:
        raise TransactionViolation.by("it left a pipeline() block open")
    status = conn.pgconn.transaction_status
    if in_use or status == ACTIVE:
        raise TransactionViolation.by(
            "it ended while a statement was under way in it, in another task or thread "
            "that was not awaited, or a COPY or stream() that was not read to its end"
        )
    if status == IN_ERROR:
        raise TransactionViolation(
            "a statement failed in the job's transaction and the task went on: let the error out, or put what may fail "
            "into a savepoint (async with tx.connection.transaction())"
        )
    if status != IN_TRANSACTION:
        raise TransactionViolation.by(f"it left the connection {TransactionStatus(status).name}")
    if nesting.broken is not None:
        raise nesting.broken
    if given.open_blocks:
        raise TransactionViolation.by("it left a transaction() block open")


def is_gone(error: psycopg.Error) -> bool:
    """Whether one of the runtime's statements is not prepared any more, rather than one that a trigger has executed by name."""
    return isinstance(error, psycopg.errors.InvalidSqlStatementName) and error.diag.context is None


def refusal_of_commit(job: Claimed, error: psycopg.Error, *, of_user: bool) -> Exception:
    """Return what it means that the transaction cannot commit; `of_user`: what failed is of the user's own statements."""
    if of_user and not is_gone(error):
        return error
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return TransactionViolation.by("the role it changed to (SET ROLE) may not end it")
    if is_gone(error):
        return TransactionViolation.by(
            "it deallocated what the connection had prepared (DEALLOCATE, where the driver does not see it)"
        )
    return refusal_of_end(job, error, error.sqlstate, str(error))
