"""A job's transactions: opened with the tenant set locally, ended by a fenced statement and COMMIT in one trip, then scrubbed.

Three round trips beside the user's own (DESIGN.md, "A job's own transaction"). Decides nothing about outcomes: it raises,
and run.py turns that into one. User code is cancelled elsewhere; here nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncTransaction
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import TupleRow
from psycopg.transaction import OutOfOrderTransactionNesting

from .context import JobTransaction, current_job
from .database import Database, NoFreeConnection, deadline
from .errors import InvalidResult, LeaseLost, TransactionViolation
from .job import Claimed
from .settings import Settings
from .store import NOT_OWNED, REFUSED, VIOLATION, Store

logger = logging.getLogger("aioqueue")

MARKER = "aioqueue_job.marker"
LEFT = "the task broke its transaction: it ended it by itself (COMMIT or ROLLBACK in SQL)"
HAS_TRANSACTION_TIMEOUT = 170000


class OpenTransaction:
    """One begun transaction of a job on one connection; ended by `finish`, `confirm` or `abort`, whichever comes first."""

    def __init__(
        self, store: Store, database: Database, settings: Settings, job: Claimed, conn: AsyncConnection[TupleRow]
    ) -> None:
        self.face = JobTransaction(job, conn)
        self._store = store
        self._database = database
        self._settings = settings
        self._job = job
        self._conn = conn
        self._marker = f"{job.worker}:{job.attempt}:{secrets.token_hex(8)}"
        self._transaction = AsyncTransaction(conn)
        self._ended = False
        self._saved = (conn.row_factory, conn.cursor_factory, conn.server_cursor_factory, conn.prepare_threshold)
        self._modes = (conn.isolation_level, conn.read_only, conn.deferrable)

    async def begin(self, seconds: float) -> None:
        """BEGIN and the local settings, in one round trip; `seconds` is what is left of the job's time limit."""
        limit = f"{max(1, int(seconds * 1000))}ms"
        rollback = self._settings.limits.rollback
        values = {
            self._settings.tenants.setting: self._job.tenant or "",
            MARKER: self._marker,
            "row_security": "on",
            "statement_timeout": limit,
            "lock_timeout": limit,
            # It ends the session: the net below the cancellation, so a little later than that.
            "idle_in_transaction_session_timeout": f"{int((min(self._settings.lease.lease, seconds) + rollback) * 1000)}ms",
        }
        if self._conn.info.server_version >= HAS_TRANSACTION_TIMEOUT:
            values["transaction_timeout"] = f"{int((seconds + rollback) * 1000)}ms"
        async with deadline(self._conn, self._settings.pool.deadline), self._conn.pipeline():
            await self._transaction.__aenter__()
            await self._store.set_local(self._conn, values)

    async def finish(self, result: str) -> None:
        """Record success and commit, together. `result` is JSON text.

        Raises LeaseLost, TransactionViolation, or the psycopg.Error with which the server refused: nothing was committed
        then. Returns only when it is committed, also when COMMIT's answer was lost and had to be read back.
        """
        error = await self._end(
            lambda: self._store.finish(
                self._conn, self._job, marker=self._marker, setting=self._settings.tenants.setting, result=result
            )
        )
        if error is not None and await self._read_back() != "succeeded":
            raise error

    async def confirm(self) -> None:
        """Check that the job is still this worker's, and commit; raises as `finish` does."""
        error = await self._end(
            lambda: self._store.confirm(self._conn, self._job, marker=self._marker, setting=self._settings.tenants.setting)
        )
        if error is not None:
            raise error

    async def _end(self, send: Callable[[], Awaitable[None]]) -> BaseException | None:
        """Send the last statement, COMMIT and the scrub; an error returned (not raised) leaves open whether COMMIT was good."""
        self._check_status()
        self._restore()
        try:
            async with deadline(self._conn, self._settings.pool.deadline), self._conn.pipeline():
                await send()
                await self._transaction.__aexit__(None, None, None)
                await self._store.scrub(self._conn)
        except OutOfOrderTransactionNesting:
            raise TransactionViolation("the task broke its transaction: it left a transaction() block open") from None
        except psycopg.Error as error:
            if error.sqlstate == NOT_OWNED:
                raise LeaseLost(self._job.job_id) from None
            if error.sqlstate == VIOLATION:
                raise TransactionViolation(str(error).partition("\n")[0]) from None
            if not self._conn.closed and self._conn.info.transaction_status == TransactionStatus.INERROR:
                if isinstance(error, psycopg.errors.InsufficientPrivilege):
                    raise TransactionViolation(
                        "the task broke its transaction: the role it changed to (SET ROLE) may not end it"
                    ) from None
                if (error.sqlstate or "")[:2] in REFUSED:
                    raise InvalidResult(self._job.task, f"PostgreSQL refuses it: {error}") from None
                raise
            self._ended = True
            self.face.detach()
            self._database.lost(error)
            await self._conn.close()
            # Only after a good COMMIT is the tail reached: then the outcome stands.
            return None if "scrub()" in (error.diag.context or "") else error
        self._ended = True
        await self._give_back()
        return None

    def _check_status(self) -> None:
        if self._conn.closed:
            raise psycopg.OperationalError("the connection of the job's transaction was lost")
        if self._conn.pgconn.pipeline_status != PipelineStatus.OFF:
            raise TransactionViolation("the task broke its transaction: it left a pipeline() block open")
        status = self._conn.info.transaction_status
        if status == TransactionStatus.INERROR:
            raise TransactionViolation(
                "a statement failed in the job's transaction and the task went on: let the error out, or put what may fail "
                "into a savepoint (async with tx.connection.transaction())"
            )
        if status == TransactionStatus.IDLE:
            raise TransactionViolation(LEFT)
        if status != TransactionStatus.INTRANS:
            raise TransactionViolation(f"the task broke its transaction: it left the connection {status.name} (a COPY?)")

    async def left(self) -> bool:
        """Whether user code ended it by itself (and perhaps began another): then nothing can undo what it wrote."""
        if self._ended or self._conn.closed or self._conn.pgconn.pipeline_status != PipelineStatus.OFF:
            return False
        status = self._conn.info.transaction_status
        if status != TransactionStatus.INTRANS:
            return status == TransactionStatus.IDLE
        self._restore()
        try:
            async with deadline(self._conn, self._settings.limits.rollback):
                return await self._store.get_setting(self._conn, MARKER) != self._marker
        except psycopg.Error:
            return False

    async def _read_back(self) -> str:
        """Ask what became of a COMMIT without an answer, for as long as a lease can last; 'unknown' if nobody answers."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.lease.lease
        while True:
            try:
                async with self._database.runtime() as conn:
                    found = await self._store.read_back(conn, self._job)
            except psycopg.Error:
                if loop.time() > give_up:
                    # Nobody has said that the job is lost, and a worker that comes back in time still has it: the attempt
                    # counts as failed, and the recorder's fenced write finds out, for as long as that takes.
                    return "unknown"
                await asyncio.sleep(0.1 + random.random())
            else:
                if found == "lost":
                    raise LeaseLost(self._job.job_id)
                return found

    async def abort(self, error: BaseException) -> None:
        """Roll back and scrub, within the rollback limit, or close the connection. Raises nothing but a cancellation."""
        if self._ended:
            return
        self._ended = True
        self.face.detach()
        try:
            if not self._conn.closed and not isinstance(error, TransactionViolation):
                async with deadline(self._conn, self._settings.limits.rollback):
                    if self._transaction.status is AsyncTransaction.Status.ACTIVE:
                        await self._transaction.__aexit__(type(error), error, error.__traceback__)
                    if self._conn.info.transaction_status != TransactionStatus.IDLE:
                        await self._conn.rollback()
                    self._restore()
                    await self._store.scrub(self._conn)
                await self._give_back()
                return
        except psycopg.Error as failed:
            logger.debug("rollback of job %s failed, its connection is closed: %s", self._job.job_id, failed)
        except BaseException:
            # A cancellation: what was not scrubbed serves nobody any more.
            await self._conn.close()
            raise
        await self._conn.close()

    async def _give_back(self) -> None:
        """Leave the connection to the next job, or close it where user code changed what cannot be put back."""
        self.face.detach()
        conn = self._conn
        if (
            (conn.isolation_level, conn.read_only, conn.deferrable) != self._modes
            or not conn.autocommit
            or conn.pgconn.pipeline_status != PipelineStatus.OFF
        ):
            await conn.close()

    def _restore(self) -> None:
        """Put back what user code may have set on the connection object: our own statements are next, then another job."""
        conn: Any = self._conn
        conn.row_factory, conn.cursor_factory, conn.server_cursor_factory, conn.prepare_threshold = self._saved
        # psycopg has no public way to drop a connection's own adapters and handlers.
        conn._adapters = None
        conn._notice_handlers.clear()
        conn._notify_handlers.clear()


class JobTransactions:
    """Opens the transactions of jobs."""

    def __init__(self, database: Database, store: Store, settings: Settings, *, committed: Callable[[], None]) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._committed = committed

    @contextlib.asynccontextmanager
    async def own(self, job: Claimed, seconds: float) -> AsyncIterator[OpenTransaction]:
        """The transaction that a task runs in; the caller ends it with `finish`, an exception rolls it back.

        Raises NoFreeConnection before anything was begun.
        """
        async with self._begun(job, seconds, self._settings.limits.transaction_wait) as opened:
            yield opened
        if opened.face.enqueued:
            self._committed()

    @contextlib.asynccontextmanager
    async def short(self, job: Claimed, seconds: float) -> AsyncIterator[JobTransaction]:
        """A short transaction of a task that holds nothing; committed at the end of the block if the job is still ours."""
        if isinstance(current_job.get(), JobTransaction):
            raise TransactionViolation(
                "a transaction of this job is open already, and a second one could wait for its connection for ever: use "
                "a savepoint (async with tx.connection.transaction()), or end the first"
            )
        async with self._begun(job, seconds, None) as opened:
            outer = current_job.set(opened.face)
            try:
                yield opened.face
            finally:
                current_job.reset(outer)
            await opened.confirm()
        if opened.face.enqueued:
            self._committed()

    @contextlib.asynccontextmanager
    async def _begun(self, job: Claimed, seconds: float, wait: float | None) -> AsyncIterator[OpenTransaction]:
        async with contextlib.AsyncExitStack() as stack:
            opened = await self._begin(stack, job, seconds, wait)
            try:
                yield opened
            except Exception as error:
                if await opened.left():
                    violation = TransactionViolation(LEFT)
                    await opened.abort(violation)
                    raise violation from error
                await opened.abort(error)
                raise
            except BaseException as error:
                await opened.abort(error)
                raise
            finally:
                opened.face.detach()

    async def _begin(self, stack: contextlib.AsyncExitStack, job: Claimed, seconds: float, wait: float | None) -> OpenTransaction:
        # A connection that died in the pool shows here, before user code has begun: every one may have died.
        last: psycopg.Error | None = None
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.pool.deadline
        for _ in range(self._settings.pool.size + 1):
            if loop.time() > give_up:
                break
            async with contextlib.AsyncExitStack() as trial:
                conn = await trial.enter_async_context(self._database.for_job(wait))
                opened = OpenTransaction(self._store, self._database, self._settings, job, conn)
                try:
                    await opened.begin(seconds)
                except psycopg.Error as error:
                    await conn.close()
                    if not self._database.lost(error):
                        raise NoFreeConnection(f"the job's transaction could not be opened: {error}") from error
                    last = error
                except BaseException:
                    await conn.close()
                    raise
                else:
                    await stack.enter_async_context(trial.pop_all())
                    return opened
        raise NoFreeConnection(f"no connection to the database: {last}") from last
