"""Several statements of the runtime in one round trip: one pipeline of libpq that is flushed once, without a cursor for each.

psycopg's own pipeline makes a cursor of each statement and sends it by itself, which costs several times as much. What is
prepared here stands among psycopg's own prepared statements, so that both know of it. Decides nothing: it says how far it came.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.generators import send
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Wait

from .overdue import Overdue
from .pool_connection import PoolConnection, sever

Key = tuple[bytes, tuple[int, ...]]
"""What psycopg knows a prepared statement by."""

# The members of an enum are looked up by code in Python: for each answer that would show.
_DONE = frozenset((int(ExecStatus.COMMAND_OK), int(ExecStatus.TUPLES_OK)))
_SYNC = int(ExecStatus.PIPELINE_SYNC)

LOST = "the connection was lost before the server's answer"

_trips: Overdue[PoolConnection] = Overdue(sever)


def wired(text: str) -> bytes:
    """Return a statement with psycopg's placeholders (%s) as it goes over the wire ($1, $2, …)."""
    first, *others = text.split("%s")
    return "".join([first, *(f"${n}{rest}" for n, rest in enumerate(others, 1))]).encode()


def _sent(value: object) -> bytes | None:
    if type(value) is str:
        return value.encode()
    if type(value) is UUID:
        return value.hex.encode()  # without the dashes, which take most of the time
    return None if value is None else str(value).encode()


def _arrival(pgconn: PGconn) -> PQGen[None]:
    """Wait until a result is there whole. Most often all have come at once, for which psycopg's generators do too much."""
    while pgconn.is_busy():
        while not (yield Wait.R):
            pass
        pgconn.consume_input()


class Trip:
    """The statements of one round trip, in order; after the first that fails no other is run."""

    def __init__(self, conn: PoolConnection, *, answers: Format = Format.TEXT, then: Trip | None = None) -> None:
        """`answers`: in which format the server sends them."""
        self._conn = conn
        self._format = answers
        self._calls: list[tuple[bytes, list[bytes | None] | None, bool]] = []
        self._new: list[Key] = []
        """The keys of what is prepared on the way, while it is not known to be."""
        self.prepared = 0
        """How many statements are prepared on the server when it has run; those of `then` come later."""
        self.answers: list[PGresult] = []
        """Those of the statements so far, none of them an error."""
        self.error: psycopg.Error | None = None
        self.then = then
        """One that is sent together with this one, and run also when this one has failed."""

    @property
    def was_sent(self) -> bool:
        """Whether all of it has been run and, outside of a transaction, committed."""
        return bool(self.answers) and self.error is None

    def add(self, text: bytes, values: Iterable[object] = (), *, prepare: bool = False) -> int:
        """Add a statement, to be prepared on the server if the connection prepares any; its place among the answers."""
        self._calls.append((text, [_sent(value) for value in values] if values else None, prepare))
        return len(self._calls) - 1

    async def run(self, seconds: float | None) -> list[PGresult]:
        """Send them all and return the answers; after `seconds` the connection is shut. Raises the first psycopg.Error."""
        under_way = None if seconds is None else _trips.add(self._conn, seconds)
        try:
            await self._conn.wait(self._talk(self._conn.pgconn))
        finally:
            if under_way is not None:
                under_way.pop(self._conn, None)
        return self.answers

    def _talk(self, pgconn: PGconn) -> PQGen[None]:
        pgconn.enter_pipeline_mode()
        trips = [self] if self.then is None else [self, self.then]
        sent = [trip._send_all(pgconn) for trip in trips]
        yield from send(pgconn)
        try:
            while trips:
                yield from trips[0]._read(pgconn, sent.pop(0))
                del trips[0]
            pgconn.exit_pipeline_mode()
        except psycopg.Error as error:
            for trip in trips:
                trip.error = trip.error or error
        if self.error is not None:
            raise self.error

    def _send_all(self, pgconn: PGconn) -> list[Key | bool]:
        """Put everything into libpq's buffer; for each answer to come, whether a statement was added, or what it prepares."""
        sent: list[Key | bool] = []
        known = self._conn._prepared
        while known._to_flush:
            name = known._to_flush.popleft()
            pgconn.send_query_params(b"DEALLOCATE ALL" if name is None else b'DEALLOCATE "%b"' % name, None)
            sent.append(False)
        for text, values, prepare in self._calls:
            if not prepare or known.prepare_threshold is None:
                pgconn.send_query_params(text, values, result_format=self._format)
            else:
                key: Key = (text, ())
                name = known._names.get(key)
                if name is None:
                    self._new.append(key)
                    name = known._names[key] = b"_aioqueue_%d" % known._prepared_idx
                    known._prepared_idx += 1
                    pgconn.send_prepare(name, text)
                    sent.append(key)
                else:
                    known._names.move_to_end(key)
                pgconn.send_query_prepared(name, values, result_format=self._format)
            sent.append(True)
        self.prepared = len(known._names)
        pgconn.pipeline_sync()
        return sent

    def _read(self, pgconn: PGconn, sent: list[Key | bool]) -> PQGen[None]:
        for what in sent:
            last: PGresult | None = None
            while True:
                if pgconn.is_busy():
                    yield from _arrival(pgconn)
                result = pgconn.get_result()
                if result is None:
                    break
                last = result
            if last is None:
                raise psycopg.OperationalError(LOST)
            if last.status not in _DONE:
                self.error = self.error or error_from_result(last)
            elif isinstance(what, tuple):
                self._new.remove(what)
            elif what:
                self.answers.append(last)
        yield from self._read_sync(pgconn)
        if self.error is not None:
            for key in self._new:
                self._conn._prepared._names.pop(key, None)

    def _read_sync(self, pgconn: PGconn) -> PQGen[None]:
        # What stood in no transaction is committed by the sync itself, and may be refused only then.
        refused = False
        while True:
            if pgconn.is_busy():
                yield from _arrival(pgconn)
            # To nobody: the runtime listens on a connection of its own. Not later: with the sync taken, libpq would take the last
            # words of a server that has ended the connection since for a notice, and nobody would be told why.
            while pgconn.notifies():
                pass
            result = pgconn.get_result()
            if result is None:
                if not refused:
                    raise self.error or psycopg.OperationalError(LOST)
                refused = False
            elif result.status == _SYNC:
                return
            else:
                self.error = self.error or error_from_result(result)
                refused = True
