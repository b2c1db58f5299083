"""What user code may not do with its job's session, seen by SQLAlchemy's events, and refused before or right after it happens.

Sees commits and rolls back nothing: session_transaction.py ends the transaction, and asks here what user code has made of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import psycopg
from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import PoolProxiedConnection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from .errors import TransactionViolation
from .job_connection import LEFT
from .nested import Nesting
from .session_driver import Below

ENDS = (
    "{} is not the task's to call: aioqueue commits a job's session when the task returns, and rolls it back when it raises; "
    "what may fail goes into 'async with session.begin_nested():'"
)
SWALLOWED = (
    "a statement failed in the job's transaction and the task went on: let the error out, or put what may fail into a savepoint "
    "(async with session.begin_nested())"
)
ENDING = ("begin", "begin_twophase", "close", "commit", "detach", "rollback")
"""Methods of SQLAlchemy's blocking connection that user code finds below, and must not call; the session needs none of them."""


def refuse(what: str, *_: object, **__: object) -> NoReturn:
    """Refuse a call that would end the transaction."""
    raise TransactionViolation(ENDS.format(what))


class Refusing:
    """What a job's user code may do neither on its session nor on the connection below: aioqueue begins, commits and closes."""

    def begin(self) -> NoReturn:
        """Refused: the transaction has begun."""
        refuse("begin()")

    async def commit(self) -> None:
        """Refused: aioqueue commits when the task has returned."""
        refuse("commit()")

    async def rollback(self) -> None:
        """Refused: raise what the job shall fail with."""
        refuse("rollback()")

    async def close(self) -> None:
        """Refused: aioqueue closes it when the task has ended."""
        refuse("close()")

    async def aclose(self) -> None:
        """Refused as `close` is."""
        refuse("aclose()")

    async def invalidate(self, exception: BaseException | None = None) -> None:
        """Refused as `close` is."""
        refuse("invalidate()")


class SessionConnection(Refusing, AsyncConnection):
    """The connection that user code finds below its session; what would end the transaction is refused."""

    handed_out = False
    """Whether user code has had the driver's own connection: what it did there is not seen, and it may have kept it."""

    async def get_raw_connection(self) -> PoolProxiedConnection:
        """Return the driver's connection; it is closed when the job ends."""
        self.handed_out = True
        return await super().get_raw_connection()


class SessionGuard:
    """Watches one session and its connection, from the first statement to the last."""

    def __init__(self, conn: Connection, session: Session, below: Below) -> None:
        self._conn = conn
        self._session = session
        self._below = below
        self.nesting: Nesting | None = None
        """There once user code may begin."""
        self.last: Callable[[Connection], None] | None = None
        """Sends the last statement: called by the session's commit, right before COMMIT."""
        self.left = False
        """Whether user code has ended the transaction in SQL: then nothing more runs."""
        self.rolled_back = False
        """Whether it was rolled back by SQLAlchemy: by user code below the session, or by a flush that failed."""
        self.ended = False
        self._begun = False
        self._runtime: asyncio.Task[Any] | None = None
        """The task that sends statements of the runtime's own at this moment."""
        self._cursors: list[Any] = []
        """Those of streams: one that was kept would read in the next transaction of its connection."""
        guards: dict[str, Callable[..., Any]] = {
            "begin": self._on_begin,
            "commit": self._on_commit,
            "rollback": self._on_rollback,
            "before_cursor_execute": self._before_statement,
            "after_cursor_execute": self._after_statement,
        }
        for name, guard in guards.items():
            event.listen(conn, name, guard)
        event.listen(session, "after_begin", self._after_begin)

    def let_user_code(self, nesting: Nesting) -> None:
        """Be strict from now on."""
        self.nesting = nesting
        for name in ENDING:
            setattr(self._conn, name, partial(refuse, f"{name}()"))

    def release(self) -> None:
        """Refuse nothing any more, so that the connection can be closed."""
        for name in ENDING:
            vars(self._conn).pop(name, None)

    @contextlib.contextmanager
    def as_runtime(self) -> Iterator[None]:
        """Let the statements of this task through."""
        before, self._runtime = self._runtime, asyncio.current_task()
        try:
            yield
        finally:
            self._runtime = before

    @property
    def in_use(self) -> bool:
        """Whether another task has a statement under way, or reads a stream."""
        return self._below.busy

    def check(self) -> None:
        """Raise what user code has done to the transaction, as far as it is seen here."""
        session, conn = self._session, self._conn
        if self.left:
            raise TransactionViolation.by(LEFT)
        if conn.closed:
            raise TransactionViolation.by("it closed its connection")
        if conn.invalidated:
            raise psycopg.OperationalError("the connection of the job's transaction was lost")
        if self.nesting is not None and self.nesting.broken is not None:
            raise self.nesting.broken
        if self.in_use:
            raise TransactionViolation.by(
                "it ended while a statement was under way in it, in another task that was not awaited: one task at a time uses "
                "a session"
            )
        begun = conn.get_transaction()
        if not session.is_active or (begun is not None and not begun.is_active):
            raise TransactionViolation(SWALLOWED)
        if self.rolled_back or begun is None or not session.in_transaction():
            raise TransactionViolation.by(LEFT)
        if session.in_nested_transaction() or conn.in_nested_transaction():
            raise TransactionViolation.by("it left a begin_nested() block open")

    def close_cursors(self, *_: object) -> None:
        """Close the cursors of streams; to be called where SQLAlchemy may wait."""
        cursors, self._cursors = self._cursors, []
        for cursor in cursors:
            with contextlib.suppress(Exception):
                cursor.close()

    def _on_begin(self, _conn: Connection) -> None:
        if self._begun:
            raise TransactionViolation.by(LEFT)
        self._begun = True

    def _on_commit(self, conn: Connection) -> None:
        last, self.last = self.last, None
        if last is None:
            refuse("commit()")
        last(conn)

    def _on_rollback(self, _conn: Connection) -> None:
        self.rolled_back = True

    def _after_begin(self, _session: object, _transaction: object, connection: Connection) -> None:
        if connection is not self._conn:
            raise TransactionViolation.by("its session took a second connection, which would not be in the job's transaction")

    def _before_statement(self, *_: object) -> None:
        if asyncio.current_task() is self._runtime:
            return
        if self.left:
            raise TransactionViolation.by(LEFT)
        if self.ended or self._runtime is not None:
            raise TransactionViolation("the job's transaction is ending, and takes no more statements")
        if self.nesting is not None:
            self.nesting.check()
            if self.in_use:
                self.nesting.broken = TransactionViolation.by(
                    "two of its tasks used the session at once: let one after the other use it"
                )
                raise self.nesting.broken

    def _after_statement(self, _conn: object, cursor: Any, _text: str, _params: object, context: object, _many: bool) -> None:
        if getattr(context, "_is_server_side", False):
            self._cursors.append(cursor)
        if not self._below.in_transaction and self.nesting is not None:
            self.left = True
            raise TransactionViolation.by(LEFT)
