"""The terms of a job's transaction, whatever library holds it: what is set when it begins, and what must be so at its end.

Also what became of a COMMIT that had no answer. Begins and ends no transaction: open_transaction.py does, with psycopg, and
session_transaction.py, with SQLAlchemy.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Mapping
from functools import lru_cache

import psycopg

from .claimed import Claimed
from .database import Database
from .errors import InvalidResult, LeaseLost, TransactionViolation
from .identity import MARKER, ROLE, Identity
from .pooler import CLIENT_CHECK
from .settings import Settings
from .store import REFUSED, Store
from .transaction_store import NOT_OWNED, VIOLATION, pairs

HAS_TRANSACTION_TIMEOUT = 170000
_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()
"""No two transactions have the same marker. It is no secret: user code may read it."""
MISCONFIGURED = ("22", "42")
"""Classes of SQLSTATE of a beginning that no other connection would make better: a role or setting that cannot be had."""


@lru_cache(maxsize=100)
def _limits(seconds: float, lease: float, rollback: float, server_version: int) -> Mapping[str, str]:
    limit = f"{max(1, int(seconds * 1000))}ms"
    values = {
        "row_security": "on",
        "statement_timeout": limit,
        "lock_timeout": limit,
        # It ends the session: the net below the cancellation, so a little later than that.
        "idle_in_transaction_session_timeout": f"{int((min(lease, seconds) + rollback) * 1000)}ms",
    }
    if server_version >= HAS_TRANSACTION_TIMEOUT:
        values["transaction_timeout"] = f"{int((seconds + rollback) * 1000)}ms"
    return values


@lru_cache(maxsize=100)
def _common(role: str, user: str | None, user_role: str | None) -> str:
    """Return the settings that one job after the other is to leave as they are; `user_role`: the one that user code has."""
    values = {"row_security": "on", "role": role}
    if user is not None:
        values["session_authorization"] = user
    if user_role is not None:
        values[ROLE] = user_role
    return pairs(values)


class Terms:
    """Those of one transaction of one job."""

    __slots__ = ("identity", "job", "marker", "settings")

    def __init__(self, job: Claimed, identity: Identity, settings: Settings) -> None:
        self.job = job
        self.identity = identity
        self.settings = settings
        self.marker = f"{job.worker}:{job.attempt}:{_PROCESS}:{next(_numbers)}"

    def local_settings(self, seconds: float, *, server_version: int, foreign: bool = False) -> dict[str, str]:
        """What is set for the transaction, before anything else; `seconds` is what is left of the job's time limit.

        `foreign`: the server's session has not begun with the runtime's values: it is the application's, or a pooler's.
        """
        limits = _limits(seconds, self.settings.lease.lease, self.settings.limits.rollback, server_version)
        values = {**self.identity.settings, MARKER: self.marker, **limits}
        if foreign:
            values |= CLIENT_CHECK
        return values

    def expected(self, role: str, user: str | None) -> str:
        """Every setting that must be at the end as it was at the beginning, as finish and confirm take them.

        `role` and `user` are those that it began under.
        """
        own = pairs({**self.identity.settings, MARKER: self.marker})
        return f"{own[:-1]},{_common(role, user, self.identity.role)[1:]}"


def refusal_of_end(job: Claimed, error: Exception, sqlstate: str | None, message: str, *, of_result: bool = True) -> Exception:
    """Return what the server's refusal to end a job's transaction means; the error itself where it means nothing of ours.

    `of_result`: it may be the result that is refused for what is in it.
    """
    if sqlstate == NOT_OWNED:
        return LeaseLost(job.job_id)
    if sqlstate == VIOLATION:
        return TransactionViolation(message.partition("\n")[0])
    if of_result and (sqlstate or "")[:2] in REFUSED:
        return InvalidResult(job.task, f"PostgreSQL refuses it: {message}")
    return error


async def read_back(database: Database, store: Store, settings: Settings, job: Claimed) -> str:
    """Ask what became of a COMMIT without an answer, for as long as a lease can last; 'unknown' if nobody answers.

    Raises LeaseLost where the job is somebody else's by now.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + settings.lease.lease
    while True:
        try:
            async with database.runtime() as conn:
                found = await store.read_back(conn, job)
        except psycopg.Error:
            if loop.time() > give_up:
                # Nobody has said that the job is lost, and a worker that comes back in time still has it: the attempt
                # counts as failed, and the recorder's fenced write finds out, for as long as that takes.
                return "unknown"
            await asyncio.sleep(0.1 + random.random())
        else:
            if found == "lost":
                raise LeaseLost(job.job_id)
            return found
