"""A job's transaction as a savepoint of one that a test has open, on the test's own connection of psycopg.

Begins and ends nothing but savepoints: no COMMIT, and no scrub, which would take from the session what the test has set.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, LiteralString, cast

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.pq import TransactionStatus

from aioqueue.callers.caller import is_a
from aioqueue.claimed import Claimed
from aioqueue.context import HeldSession, JobTransaction
from aioqueue.errors import TransactionViolation
from aioqueue.identity import MARKER, ROLE, Identity
from aioqueue.job_connection import LEFT, JobConnection
from aioqueue.nested import Nesting, OnConnection
from aioqueue.pool_connection import PoolConnection
from aioqueue.settings import Settings
from aioqueue.store import Store
from aioqueue.terms import Terms, refusal_of_end
from aioqueue.transaction import in_short
from aioqueue.violation import check_end

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


class SavepointTransaction:
    """One savepoint, under the terms of a job's transaction, but for its time-outs: those end a session, the test's."""

    face: JobTransaction[Any]
    settle: None = None

    def __init__(self, store: Store, terms: Terms, conn: AsyncConnection[Any]) -> None:
        self._store = store
        self._terms = terms
        self._conn = conn
        self._given: JobConnection
        self._nesting: Nesting
        self._role = ""
        self._handlers: tuple[Any, Any] = (None, None)

    async def begin(self) -> None:
        """SAVEPOINT and the local settings."""
        terms, identity = self._terms, self._terms.identity
        await run_statement(self._conn, f"SAVEPOINT {POINT}")
        values = {**identity.settings, MARKER: terms.marker, "row_security": "on"}
        row = await (await self._store.set_local(self._conn, values)).fetchone()
        if identity.role is not None:
            await self._store.set_role(self._conn, identity.role)
        self._role = "none" if row is None else row[0]
        self._nesting = Nesting(terms.settings.tenants, terms.job, identity, role=self._role, marker=terms.marker)
        # The test's own connection has handlers, in whose place the job's object puts its own.
        self._handlers = self._conn.pgconn.notice_handler, self._conn.pgconn.notify_handler
        # It is no pool's; nothing that is used of it there is a pool's.
        self._given = JobConnection(cast(PoolConnection, self._conn), self._nesting.check)
        self.face = JobTransaction(terms.job, self._given, self._nesting)
        self._nesting.on = OnConnection(self._store, self._given)

    async def finish(self, result: str) -> None:
        """Record success, and release the savepoint. `result` is JSON text. Raises what a job's own transaction does."""
        await self._end("finish", result)

    async def confirm(self) -> None:
        """Check that the job is still this worker's, and release the savepoint."""
        await self._end("confirm")

    async def roll_back(self) -> None:
        """Roll back to the savepoint. Raises TestingError where user code has ended the test's transaction."""
        self._take_back()
        if self._conn.closed or self._conn.info.transaction_status == TransactionStatus.IDLE:
            raise TestingError(
                f"{TransactionViolation.by(LEFT)}: it was the test's, of which nothing can be rolled back any more"
            )
        await run_statement(self._conn, f"ROLLBACK TO SAVEPOINT {POINT}")
        await run_statement(self._conn, f"RELEASE SAVEPOINT {POINT}")

    async def _end(self, statement: str, *result: str) -> None:
        self._take_back()
        check_end(self._conn, self._given, self._nesting, in_use=self._given.in_use)
        terms = self._terms
        expected = terms.expected(self._role, self._conn.info.parameter_status("session_authorization"))
        try:
            if terms.identity.role is not None:
                await self._store.leave_role(self._conn, self._role, seen=ROLE)
            await self._store.execute(self._conn, statement, (*terms.job.fence, expected, *result))
        except psycopg.Error as error:
            raise refusal_of_end(terms.job, error, error.sqlstate, str(error)) from None
        await run_statement(self._conn, f"RELEASE SAVEPOINT {POINT}")

    def _take_back(self) -> None:
        """Take the connection from user code, for good."""
        self._given.kill()
        self.face.detach()
        self._conn.pgconn.notice_handler, self._conn.pgconn.notify_handler = self._handlers


class SavepointTransactions:
    """Opens the transactions of jobs on one connection, which has a transaction open."""

    def __init__(self, store: Store, settings: Settings, conn: AsyncConnection[Any]) -> None:
        self._store = store
        self._settings = settings
        self._conn = conn

    @contextlib.asynccontextmanager
    async def own(self, job: Claimed, seconds: float) -> AsyncIterator[SavepointTransaction]:
        """The one that a task runs in; the caller ends it with `finish`, an exception rolls it back."""
        terms = Terms(job, Identity.of(job, self._settings.tenants), self._settings)
        opened = SavepointTransaction(self._store, terms, self._conn)
        await opened.begin()
        try:
            yield opened
        except BaseException:
            await opened.roll_back()
            raise

    def in_session(
        self, job: Claimed, seconds: float, kind: type[HeldSession[Any]]
    ) -> contextlib.AbstractAsyncContextManager[SavepointTransaction]:
        """None: on_caller.py refuses such a task before it runs."""
        raise TestingError(f"task {job.task!r} takes a session, which has a transaction of its own")

    def short(self, job: Claimed, seconds: float) -> contextlib.AbstractAsyncContextManager[JobTransaction[Any]]:
        """One on the way."""
        return in_short(self.own(job, seconds))


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
