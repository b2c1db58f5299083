"""Opens the transactions of jobs: the one that a task runs in, and short ones on the way; how one goes, open_transaction.py says.

Lends connections, tries another where one has died in the pool, and rolls back what ends with an exception. User code is
cancelled elsewhere; here nothing is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import psycopg

from .claimed import Claimed
from .context import HeldSession, InTransaction, JobTransaction, running_job
from .database import Database, NoFreeConnection
from .errors import TransactionViolation
from .identity import Identity
from .job_connection import LEFT
from .listen import Kind
from .open_transaction import OpenTransaction
from .session_factory import EngineSession
from .settings import Settings
from .store import Store
from .terms import MISCONFIGURED


class Opened(Protocol):
    """A job's transaction that has begun, whichever library it is of."""

    @property
    def face(self) -> InTransaction[Any]:
        """What user code is given."""
        ...

    async def left(self) -> bool:
        """Whether user code ended it by itself."""
        ...

    async def abort(self, error: BaseException) -> None:
        """Roll back."""
        ...

    async def release(self) -> None:
        """Give the connection back."""
        ...


class OpenedSession(Opened, Protocol):
    """The transaction that a session is in."""

    async def begin(self, seconds: float) -> None:
        """Take a connection and begin. Raises NoFreeConnection."""
        ...

    async def settle(self) -> None:
        """Send what is still to be sent when user code has returned."""
        ...

    async def finish(self, result: str) -> None:
        """Record success and commit."""
        ...


class SessionOpener(Protocol):
    """What `HeldSession.opener` is."""

    async def check(self, database: Database, store: Store, settings: Settings) -> EngineSession:
        """Look at a worker's start whether sessions can be had, and whose they are. Raises ConfigurationError."""
        ...

    def __call__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        job: Claimed,
        identity: Identity,
        kind: type[HeldSession[Any]],
    ) -> OpenedSession:
        """Make one, that has not begun."""
        ...


Begun = TypeVar("Begun", bound=Opened)


class Block(Generic[Begun]):
    """The block of one transaction: it begins at the entry, is rolled back by an exception, and its connection goes back."""

    __slots__ = ("_begin", "_hint", "_opened")

    def __init__(self, begin: Callable[[], Awaitable[Begun]], hint: Callable[[Kind], None]) -> None:
        self._begin = begin
        self._hint = hint

    async def __aenter__(self) -> Begun:
        """Begin."""
        self._opened = await self._begin()
        return self._opened

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; what was due after a commit is sent."""
        opened = self._opened
        try:
            if error is not None:
                await _roll_back(opened, error)
        finally:
            opened.face.detach()
            await opened.release()
        if error is None:
            for hint in opened.face.hints:
                self._hint(hint)


async def _roll_back(opened: Opened, error: BaseException) -> None:
    if isinstance(error, Exception) and await opened.left() and not isinstance(error, TransactionViolation):
        violation = TransactionViolation.by(LEFT)
        await opened.abort(violation)
        raise violation from error
    await opened.abort(error)


class Confirmed(Protocol):
    """A job's transaction that can end before the job."""

    @property
    def face(self) -> JobTransaction:
        """What user code is given."""
        ...

    async def confirm(self) -> None:
        """Check that the job is still this worker's, and commit."""
        ...


@contextlib.asynccontextmanager
async def in_short(block: contextlib.AbstractAsyncContextManager[Confirmed]) -> AsyncIterator[JobTransaction]:
    """The block of a short transaction: its job's only one, confirmed at the end."""
    if isinstance(running_job.get(), InTransaction):
        raise TransactionViolation(
            "a transaction of this job is open already, and a second one could wait for its connection for ever: use "
            "a savepoint (async with tx.connection.transaction()), or end the first"
        )
    async with block as opened:
        outer = running_job.set(opened.face)
        try:
            yield opened.face
        finally:
            running_job.reset(outer)
        await opened.confirm()


class JobTransactions:
    """Opens the transactions of jobs."""

    def __init__(self, database: Database, store: Store, settings: Settings, *, hint: Callable[[Kind], None]) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._send_hint = hint

    def own(self, job: Claimed, seconds: float) -> Block[OpenTransaction]:
        """The transaction that a task runs in; the caller ends it with `finish`, an exception rolls it back.

        Raises NoFreeConnection before anything was begun.
        """
        return Block(partial(self._begin, job, seconds, self._settings.limits.transaction_wait), self._send_hint)

    def in_session(self, job: Claimed, seconds: float, kind: type[HeldSession[Any]]) -> Block[OpenedSession]:
        """As `own`, for a task that takes a session of that class."""
        opener: SessionOpener = kind.opener

        async def begin() -> OpenedSession:
            identity = Identity.of(job, self._settings.tenants)
            session = opener(self._database, self._store, self._settings, job, identity, kind)
            await session.begin(seconds)
            return session

        return Block(begin, self._send_hint)

    def short(self, job: Claimed, seconds: float) -> contextlib.AbstractAsyncContextManager[JobTransaction]:
        """A short transaction of a task that holds nothing; committed at the end of the block if the job is still ours."""
        return in_short(Block(partial(self._begin, job, seconds, None), self._send_hint))

    async def _begin(self, job: Claimed, seconds: float, wait: float | None) -> OpenTransaction:
        # A connection that died in the pool shows here, before user code has begun: every one may have died.
        identity = Identity.of(job, self._settings.tenants)
        last: psycopg.Error | None = None
        give_up = time.monotonic() + self._settings.pool.deadline
        for _ in range(self._settings.pool.size + 1):
            if time.monotonic() > give_up:
                break
            opened = OpenTransaction(self._store, self._database, self._settings, job, identity, seconds)
            conn = await self._database.lend(wait, opened)
            try:
                await opened.begin(conn)
            except BaseException as error:
                await conn.close()
                await self._database.take_back(conn)
                if not isinstance(error, psycopg.Error) or (error.sqlstate or "")[:2] in MISCONFIGURED:
                    raise
                # What is not prepared any more is so on this connection alone.
                if not (self._database.lost(error) or isinstance(error, psycopg.errors.InvalidSqlStatementName)):
                    raise NoFreeConnection(f"the job's transaction could not be opened: {error}") from error
                last = error
            else:
                return opened
        raise NoFreeConnection(f"no connection to the database: {last}") from last
