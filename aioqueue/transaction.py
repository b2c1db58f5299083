"""Opens the transactions of jobs: the one that a task runs in, and short ones on the way; how one goes, open_transaction.py says.

Lends connections, tries another where one has died in the pool, and rolls back what ends with an exception. User code is
cancelled elsewhere; here nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import psycopg

from .context import JobTransaction, running_job
from .database import Database, NoFreeConnection
from .errors import TransactionViolation
from .identity import Identity
from .job import Claimed
from .job_connection import LEFT
from .listen import Kind
from .open_transaction import OpenTransaction
from .settings import Settings
from .store import Store

MISCONFIGURED = ("22", "42")
"""Classes of SQLSTATE of a beginning that no other connection would make better: a role or setting that cannot be had."""


class JobTransactions:
    """Opens the transactions of jobs."""

    def __init__(self, database: Database, store: Store, settings: Settings, *, hint: Callable[[Kind], None]) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._send_hint = hint

    @contextlib.asynccontextmanager
    async def own(self, job: Claimed, seconds: float) -> AsyncIterator[OpenTransaction]:
        """The transaction that a task runs in; the caller ends it with `finish`, an exception rolls it back.

        Raises NoFreeConnection before anything was begun.
        """
        identity = Identity.of(job, self._settings.tenants)
        async with self._begun(job, identity, seconds, self._settings.limits.transaction_wait) as opened:
            yield opened
        self._hint(opened)

    @contextlib.asynccontextmanager
    async def short(self, job: Claimed, seconds: float) -> AsyncIterator[JobTransaction]:
        """A short transaction of a task that holds nothing; committed at the end of the block if the job is still ours."""
        if isinstance(running_job.get(), JobTransaction):
            raise TransactionViolation(
                "a transaction of this job is open already, and a second one could wait for its connection for ever: use "
                "a savepoint (async with tx.connection.transaction()), or end the first"
            )
        identity = Identity.of(job, self._settings.tenants)
        async with self._begun(job, identity, seconds, None) as opened:
            outer = running_job.set(opened.face)
            try:
                yield opened.face
            finally:
                running_job.reset(outer)
            await opened.confirm()
        self._hint(opened)

    def _hint(self, committed: OpenTransaction) -> None:
        for kind in committed.face.hints:
            self._send_hint(kind)

    @contextlib.asynccontextmanager
    async def _begun(
        self, job: Claimed, identity: Identity, seconds: float, wait: float | None
    ) -> AsyncIterator[OpenTransaction]:
        async with contextlib.AsyncExitStack() as stack:
            opened = await self._begin(stack, job, identity, seconds, wait)
            try:
                yield opened
            except Exception as error:
                if await opened.left() and not isinstance(error, TransactionViolation):
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

    async def _begin(
        self, stack: contextlib.AsyncExitStack, job: Claimed, identity: Identity, seconds: float, wait: float | None
    ) -> OpenTransaction:
        # A connection that died in the pool shows here, before user code has begun: every one may have died.
        last: psycopg.Error | None = None
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.pool.deadline
        for _ in range(self._settings.pool.size + 1):
            if loop.time() > give_up:
                break
            async with contextlib.AsyncExitStack() as trial:
                conn = await trial.enter_async_context(self._database.for_job(wait))
                opened = OpenTransaction(self._store, self._database, self._settings, job, identity, conn)
                try:
                    await opened.begin(seconds)
                except psycopg.Error as error:
                    await conn.close()
                    if (error.sqlstate or "")[:2] in MISCONFIGURED:
                        raise
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
