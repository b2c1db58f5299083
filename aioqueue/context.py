"""What a task is given: `JobContext` (holds nothing) and `JobTransaction` (one short tenant transaction).

The faces only. transaction.py opens and ends the transactions behind them; user_code.py makes one fresh context per attempt.
`current_job` is the one that runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, LiteralString, Protocol
from uuid import UUID

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import TupleRow
from psycopg.sql import SQL, Composed

from .claimed import Claimed, Held_co
from .progress import Reporting

Query = LiteralString | SQL | Composed
Parameters = Sequence[Any] | Mapping[str, Any] | None


class JobContext(Reporting[Held_co]):
    """Given to a task that holds nothing: no connection and no transaction is kept for it.

    `JobContext[Resources]` gives `ctx.resources` its type.
    """

    __slots__ = ("_open", "_should_stop")

    def __init__(
        self,
        job: Claimed,
        open_transaction: Callable[[], AbstractAsyncContextManager[JobTransaction[Held_co]]],
        should_stop: Callable[[], bool],
    ) -> None:
        self._job = job
        self._open = open_transaction
        self._should_stop = should_stop

    def transaction(self) -> AbstractAsyncContextManager[JobTransaction[Held_co]]:
        """Open one short transaction with the job's tenant set locally; committed at the end of the block.

        At its end the job must still be this worker's, or LeaseLost is raised and everything in it is rolled back.
        An exception in the block rolls back. Waits for one of the pool's connections (size − 2 serve all jobs).
        """
        return self._open()

    @property
    def should_stop(self) -> bool:
        """Whether the job was asked to end (time limit, cancel, stop); a `def` task looks here, it cannot be cancelled.

        A task that has seen True and returns is taken to have stopped early: its result does not count, the job is cancelled,
        out of time, or handed back to run again.
        """
        return self._should_stop()


OpenNested = Callable[[str], AbstractAsyncContextManager[None]]


class CurrentTenant(str):
    """The tenant that a transaction is of at this moment, empty for none; called with another's name, it opens that one's."""

    __slots__ = ("_nest",)

    _nest: OpenNested

    @classmethod
    def of(cls, tenant: str | None, nest: OpenNested) -> CurrentTenant:
        """Make one."""
        made = cls(tenant or "")
        made._nest = nest
        return made

    def __call__(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Make the transaction another tenant's for a block; see `JobTransaction.tenant`."""
        return self._nest(tenant)


class Tenants(Protocol):
    """Which tenant's a transaction is, block by block."""

    @property
    def tenant(self) -> CurrentTenant:
        """The tenant of the block that the current task is in."""
        ...


class InTransaction(Reporting[Held_co]):
    """What a job's open transaction is to its user, whichever library it is of; the base of `JobTransaction` and `JobSession`."""

    __slots__ = ("_tenants", "enqueued", "hints")

    def __init__(self, job: Claimed, tenants: Tenants) -> None:
        super().__init__(job)
        self._tenants = tenants
        self.enqueued: set[UUID] = set()
        """The jobs that were enqueued in it: nobody else sees them before its commit."""
        self.hints: set[Literal["ready", "done", "progress"]] = set()
        """The kinds of hints that are due after its commit, for jobs that were enqueued or cancelled in it."""

    @property
    def tenant(self) -> CurrentTenant:
        """The tenant's name, "" for none, where `JobContext.tenant` is None; it may be given on as `tenant=` all the same.

        `async with tx.tenant("43"):` makes the block another tenant's. It is a savepoint: an exception rolls back what the block
        wrote. At its end, however it ends, the tenant before is in force again. Jobs enqueued in it are that tenant's. It is its
        task's and of the tasks started in it: what any other task sends meanwhile is refused, and fails the job. Raises
        InvalidOption for what is no tenant's name, and TransactionViolation where the settings were changed meanwhile.
        """
        return self._tenants.tenant

    def detach(self) -> None:
        """Take the transaction away; for the runtime, at its end."""
        raise NotImplementedError


class JobTransaction(InTransaction[Held_co]):
    """A transaction with the job's tenant set locally.

    As the first parameter of a task it is the job's own: its commit records the job as succeeded, both or neither.
    `JobTransaction[Resources]` gives `tx.resources` its type.
    """

    __slots__ = ("_connection",)

    def __init__(self, job: Claimed, connection: AsyncConnection[TupleRow], tenants: Tenants) -> None:
        super().__init__(job, tenants)
        self._connection: AsyncConnection[TupleRow] | None = connection

    @property
    def connection(self) -> AsyncConnection[TupleRow]:
        """The psycopg connection; commit() and rollback() on it are refused, savepoints by `transaction()` are fine.

        Raises RuntimeError once the transaction has ended: the connection is another job's then. Do not keep it.
        """
        if self._connection is None:
            raise RuntimeError(
                f"the transaction of job {self.job_id} has ended; its connection serves other jobs now, perhaps of "
                "another tenant: do all work on it before the task (or the block) ends"
            )
        return self._connection

    def detach(self) -> None:
        """Take the connection away; for the runtime, at the end of the transaction."""
        self._connection = None

    async def execute(self, query: Query, params: Parameters = None) -> AsyncCursor[TupleRow]:
        """Run a statement and return its cursor."""
        return await self.connection.execute(query, params)

    async def fetch_all(self, query: Query, params: Parameters = None) -> list[TupleRow]:
        """Run a query and return all rows."""
        return await (await self.connection.execute(query, params)).fetchall()

    async def fetch_one(self, query: Query, params: Parameters = None) -> TupleRow | None:
        """Run a query and return its first row, or None."""
        return await (await self.connection.execute(query, params)).fetchone()

    async def fetch_value(self, query: Query, params: Parameters = None) -> Any:
        """Run a query and return the first column of its first row, or None."""
        row = await self.fetch_one(query, params)
        return None if row is None else row[0]


class HeldSession(InTransaction[Held_co]):
    """The base of `JobSession`, of which nothing but this is known where SQLAlchemy may not be imported."""

    __slots__ = ()

    opener: ClassVar[Any]
    """Opens the transaction that a session of this class is in: transaction.py's SessionOpener."""


running_job: ContextVar[JobContext | InTransaction | None] = ContextVar("aioqueue_job", default=None)
"""The job that the current task (or thread) runs for; enqueues inside a job's own transaction join it, and its tenant."""


def current_job() -> JobContext | InTransaction | None:
    """Return what the job that runs here was given: its tenant, id and attempt; None outside of jobs.

    In a short transaction it is that transaction. Tasks and threads that user code starts have it too (asyncio.to_thread, not
    a bare Thread).
    """
    return running_job.get()
