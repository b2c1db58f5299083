"""The connection that one job's transaction is given: an object of its own around a pooled connection, dead when the job ends.

What user code sets on it (factories, adapters, handlers, modes) dies with it, and so does every reference that was kept: the
object then holds no connection any more. Opens and ends no transaction; open_transaction.py does, on the pooled one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from psycopg import AsyncCursor, AsyncServerCursor, pq
from psycopg._connection_base import BaseConnection
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from .errors import TransactionViolation
from .pool_connection import RV, PoolConnection

# The members of an enum are looked up by code in Python: for each answer that would show.
IDLE = int(TransactionStatus.IDLE)
LEFT = (
    "it ended the transaction that was opened for it (COMMIT or ROLLBACK in SQL, PREPARE TRANSACTION), or took back its settings "
    "(RESET ALL); what may have to be undone alone goes into a savepoint"
)
"""What check_transaction.sql says, too, of a transaction that is not the job's any more."""


class JobConnection(PoolConnection):
    """One job's view of a pooled connection on which a transaction was begun.

    psycopg takes it for one inside of a `transaction()` block: commit, rollback and changes of mode are refused.
    """

    # What most jobs never change stands in the class: to set it for each costs more.
    _adapters = _tpc = _pipeline = _isolation_level = _read_only = _deferrable = None
    _autocommit = True
    _num_transactions = 1
    _closed = False
    _begin_statement = b""
    left = False
    """Whether user code has ended the transaction: then nothing runs on this object any more."""
    closed_by_user = False
    """Whether user code has called close()."""

    def __init__(self, pooled: PoolConnection, check: Callable[[], None]) -> None:
        # All that psycopg's own __init__ sets, but for a manager of prepared statements, which that would make in vain.
        self.pgconn = pgconn = pooled.pgconn
        self.row_factory = tuple_row
        self.cursor_factory = AsyncCursor
        self.server_cursor_factory = AsyncServerCursor
        self.lock = asyncio.Lock()
        self._notice_handlers = []
        self._notify_handlers = []
        self._notifies_backlog = deque()
        mine: ref[BaseConnection[TupleRow]] = ref(self)
        pgconn.notice_handler = partial(BaseConnection._notice_handler, mine)
        pgconn.notify_handler = partial(BaseConnection._notify_handler, mine)
        # What the server has prepared is known to all that use this connection, one after the other.
        self._prepared = known = pooled._prepared
        self._limits = known.prepare_threshold, known.prepared_max
        self._pooled = pooled
        self._check = check

    async def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        """Wait for the server, as psycopg does; what ends the transaction is the last that ever runs.

        Every statement comes by here when its turn has come: the `check` refuses the one of a task that may send none now.
        """
        if self.pgconn is _closed():
            return await super().wait(gen, *args, **options)  # which says so
        self._check()
        try:
            answer = await self._pooled.wait(gen, *args, **options)
        finally:
            if self.pgconn.transaction_status == IDLE:
                self.left = True
                self.kill()
        if self.left:
            raise TransactionViolation.by(LEFT)
        return answer

    async def close(self) -> None:
        """Let nothing run on it any more. The connection is closed where the transaction ends, and nobody waits for it."""
        self.closed_by_user = True
        self.kill()

    def __del__(self, *_: Any) -> None:
        """Say nothing of a connection that was not closed, as psycopg does: it is not this object's to close."""

    @property
    def in_use(self) -> bool:
        """Whether a statement is under way on it, also when it was killed meanwhile: another task or thread has it."""
        return self.lock.locked()

    @property
    def open_blocks(self) -> int:
        """How many `transaction()` blocks were entered on it and not left."""
        return self._num_transactions - 1

    def kill(self) -> None:
        """Take the connection away from it for good. What is under way ends as it will; all that comes after is refused."""
        pgconn = self.pgconn
        if pgconn is _closed():
            return
        # Nobody reads notices and notifications of a pooled connection; psycopg would gather them for ever.
        pgconn.notice_handler = pgconn.notify_handler = None
        self._prepared.prepare_threshold, self._prepared.prepared_max = self._limits
        self.pgconn = _closed()
        del self._pooled
        self._check = _nothing  # or it would be the garbage collector's to find that nobody needs the two any more


def _nothing() -> None:
    pass


_dead: list[pq.abc.PGconn] = []


def _closed() -> pq.abc.PGconn:
    """Return a connection of libpq that was never open: whatever is asked of it is an OperationalError."""
    if not _dead:
        pgconn = pq.PGconn.connect_start(b"no connection string")
        pgconn.finish()
        _dead.append(pgconn)
    return _dead[0]
