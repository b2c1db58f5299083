"""A job's transaction as a savepoint of one that a test has open, on the test's own connection of psycopg.

Begins and ends nothing but savepoints: no COMMIT, and no scrub, which would take from the session what the test has set.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, LiteralString, cast

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.pq import TransactionStatus

from aioqueue.callers.caller import is_a
from aioqueue.context import JobTransaction
from aioqueue.database import Database
from aioqueue.errors import InvalidResult, LeaseLost, TransactionViolation
from aioqueue.identity import MARKER, ROLE, Identity
from aioqueue.job import Claimed
from aioqueue.job_connection import LEFT, JobConnection
from aioqueue.nested import Nesting, OnConnection
from aioqueue.open_transaction import OpenTransaction
from aioqueue.pooler import PoolConnection
from aioqueue.settings import Settings
from aioqueue.store import NOT_OWNED, REFUSED, VIOLATION, Store
from aioqueue.transaction import JobTransactions

from .ran import TestingError

POINT = "aioqueue_job"


async def run_statement(conn: AsyncConnection[Any], statement: LiteralString) -> None:
    """Run a statement whatever cursors the connection makes."""
    await AsyncCursor(conn).execute(statement)


async def psycopg_connection(on: Any) -> AsyncConnection[Any]:
    """Return psycopg's connection that the test's transaction is open on. Raises TestingError where there is none."""
    conn = on
    if is_a(on, "sqlalchemy.ext.asyncio", "AsyncSession"):
        await on.flush()  # as before each of the session's own queries
        conn = await on.connection()
    if is_a(conn, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        conn = (await conn.get_raw_connection()).driver_connection
    if not isinstance(conn, AsyncConnection):
        raise TestingError(
            "run_job(on=…) needs a transaction of psycopg, also below SQLAlchemy (postgresql+psycopg): a job's transaction is "
            f"one. With {type(conn).__module__}, commit, and use run_job without on, on a database of the test's own"
        )
    if conn.info.transaction_status != TransactionStatus.INTRANS:
        raise TestingError(
            f"run_job(on=…) needs a connection with an open transaction; this one is {conn.info.transaction_status.name}. "
            "Without one, use run_job without on"
        )
    return conn


class SavepointTransaction(OpenTransaction):
    """One savepoint, under the terms of a job's transaction, but for its time-outs: those end a session, the test's."""

    async def begin(self, seconds: float) -> None:
        """SAVEPOINT and the local settings."""
        values = {**self._identity.settings, MARKER: self._terms.marker, "row_security": "on"}
        await run_statement(self._conn, f"SAVEPOINT {POINT}")
        row = await (await self._store.set_local(self._conn, values)).fetchone()
        if self._identity.role is not None:
            await self._store.set_role(self._conn, self._identity.role)
        self._role = "none" if row is None else row[0]
        self._nesting = Nesting(self._settings.tenants, self._job, self._identity, role=self._role, marker=self._terms.marker)
        # The test's own connection has handlers, which the job's object would take for its own.
        self._handlers = self._conn.pgconn.notice_handler, self._conn.pgconn.notify_handler
        self._given = JobConnection(self._conn, self._nesting.check)
        self.face = JobTransaction(self._job, self._given, self._nesting)
        self._nesting.on = OnConnection(self._store, self._given)

    async def _end(self, statement: str, *result: str) -> BaseException | None:
        self._check_status()
        self._put_back_handlers()
        try:
            if self._identity.role is not None:
                await self._store.leave_role(self._conn, self._role, seen=ROLE)
            await self._store.execute(self._conn, statement, (*self._job.fence, json.dumps(self._expected), *result))
        except psycopg.Error as error:
            if error.sqlstate == NOT_OWNED:
                raise LeaseLost(self._job.job_id) from None
            if error.sqlstate == VIOLATION:
                raise TransactionViolation(str(error).partition("\n")[0]) from None
            if (error.sqlstate or "")[:2] in REFUSED:
                raise InvalidResult(self._job.task, f"PostgreSQL refuses it: {error}") from None
            raise
        await run_statement(self._conn, f"RELEASE SAVEPOINT {POINT}")
        self._ended = True
        return None

    async def abort(self, error: BaseException) -> None:
        """Roll back to the savepoint. Raises TestingError where user code has ended the test's transaction."""
        if self._ended:
            return
        self._ended = True
        self._take_back()
        self._put_back_handlers()
        if self._conn.closed or self._conn.info.transaction_status == TransactionStatus.IDLE:
            raise TestingError(f"{LEFT}: it was the test's; nothing of it can be rolled back any more") from error
        await run_statement(self._conn, f"ROLLBACK TO SAVEPOINT {POINT}")
        await run_statement(self._conn, f"RELEASE SAVEPOINT {POINT}")

    async def release(self) -> None:
        """Leave the connection to the test."""

    def _put_back_handlers(self) -> None:
        self._conn.pgconn.notice_handler, self._conn.pgconn.notify_handler = self._handlers


class SavepointTransactions(JobTransactions):
    """Opens the transactions of jobs on one connection, which has a transaction open."""

    def __init__(self, database: Database, store: Store, settings: Settings, conn: AsyncConnection[Any]) -> None:
        super().__init__(database, store, settings, hint=lambda _kind: None)
        # It is no pool's; nothing that is used of it here is a pool's.
        self._conn = cast(PoolConnection, conn)

    async def _begin(self, job: Claimed, seconds: float, wait: float | None) -> OpenTransaction:
        identity = Identity.of(job, self._settings.tenants)
        opened = SavepointTransaction(self._store, self._database, self._settings, job, identity, self._conn)
        await opened.begin(seconds)
        return opened


@contextlib.asynccontextmanager
async def put_back(conn: AsyncConnection[Any], store: Store, names: list[str]) -> AsyncIterator[None]:
    """Put settings and the role back after the block as they were before it, as far as the transaction goes."""
    names = [*names, MARKER, ROLE, "row_security", "role"]
    before = await (await store.get_settings(conn, names)).fetchone() or ()
    yield
    values = {name: value or "" for name, value in zip(names, before, strict=True)}
    role = values.pop("role")
    await store.set_role(conn, role)
    await store.set_local(conn, values)
