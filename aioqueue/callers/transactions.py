"""Whether the transaction of a driver's connection has ended, as this process sees it without asking the server.

None of these keeps a connection alive, but for one of a pool of asyncpg's, which its pool keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, Protocol
from weakref import ref

from psycopg.pq import TransactionStatus


class OpenTransaction(Protocol):
    """A transaction in which jobs were written."""

    @property
    def key(self) -> Hashable:
        """What names the connection: it has one transaction at a time."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the connection shows that its transaction has ended."""
        ...


def _reference(conn: Any) -> ref[Any]:
    """Refer to a connection; whoever uses that as a key may do so after the connection has gone."""
    reference = ref(conn)
    hash(reference)  # kept from now on; of what has gone it cannot be had any more
    return reference


class SeenByStatus:
    """Of psycopg, async or not, and of psycopg2, whose states have the same numbers."""

    def __init__(self, conn: Any) -> None:
        self.key = _reference(conn)

    @property
    def ended(self) -> bool:
        """Whether the connection is idle, closed or gone."""
        conn = self.key()
        return conn is None or bool(conn.closed) or conn.info.transaction_status == TransactionStatus.IDLE


class SeenByFlag:
    """Of asyncpg. A connection lent by a pool is a proxy that cannot be referred to weakly, and raises once it is back there."""

    def __init__(self, conn: Any, released: type[Exception]) -> None:
        self._released = released
        self._conn: Callable[[], Any]
        self.key: Hashable
        try:
            self.key = self._conn = _reference(conn)
        except TypeError:
            self.key, self._conn = conn, lambda: conn

    @property
    def ended(self) -> bool:
        """Whether the connection is idle, closed, released or gone."""
        conn = self._conn()
        with contextlib.suppress(self._released):
            return conn is None or bool(conn.is_closed()) or not conn.is_in_transaction()
        return True


class Unseen:
    """Of a driver that is not known here: only the server can tell."""

    def __init__(self, conn: Any) -> None:
        self.key: Hashable = id(conn)

    @property
    def ended(self) -> bool:
        """Never: the server is asked."""
        return False
