"""Several statements of the runtime in one round trip: one pipeline of libpq that is flushed once, without a cursor for each.

psycopg's own pipeline makes a cursor of each statement and sends it by itself, which costs several times as much. What is
prepared here stands among psycopg's own prepared statements, so that both know of it. Decides nothing: it says how far it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import psycopg
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.generators import fetch_many, send
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from .pooler import PoolConnection, sever


def wired(text: str) -> bytes:
    """Return a statement with psycopg's placeholders (%s) as it goes over the wire ($1, $2, …)."""
    first, *others = text.split("%s")
    return "".join([first, *(f"${n}{rest}" for n, rest in enumerate(others, 1))]).encode()


class Trip:
    """The statements of one round trip, in order; after the first that fails no other is run."""

    def __init__(self, conn: PoolConnection) -> None:
        self._conn = conn
        self._calls: list[tuple[bytes, list[bytes], bool]] = []
        self.done = 0
        """How many of them were answered, none with an error."""

    def add(self, text: bytes, values: Iterable[object] = (), *, prepare: bool = False) -> int:
        """Add a statement, to be prepared on the server if the connection prepares any; its place, as `done` counts."""
        self._calls.append((text, [str(value).encode() for value in values], prepare))
        return len(self._calls) - 1

    async def run(self, seconds: float) -> list[PGresult]:
        """Send them all and return the answers; after `seconds` the connection is shut. Raises the first psycopg.Error."""
        timer = asyncio.get_running_loop().call_later(seconds, sever, self._conn)
        try:
            return await self._conn.wait(self._talk(self._conn.pgconn))  # type: ignore[no-any-return]
        finally:
            timer.cancel()

    def _talk(self, pgconn: PGconn) -> PQGen[list[PGresult]]:
        pgconn.enter_pipeline_mode()
        new: list[tuple[bytes, tuple[int, ...]]] = []
        sent = self._send_all(pgconn, new)
        pgconn.pipeline_sync()
        yield from send(pgconn)
        answers: list[PGresult] = []
        error: psycopg.Error | None = None
        try:
            for counts in sent:
                results = yield from fetch_many(pgconn)
                status = results[-1].status if results else ExecStatus.PIPELINE_ABORTED
                if status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
                    if counts:
                        answers.append(results[-1])
                        self.done += 1
                elif error is None:
                    error = error_from_result(results[-1]) if results else psycopg.OperationalError("no answer came")
            yield from fetch_many(pgconn)
            pgconn.exit_pipeline_mode()
        except psycopg.Error:
            if error is None:
                raise
        if error is not None:
            for key in new:  # what was prepared before the error and what was not is not worth knowing
                self._conn._prepared._names.pop(key, None)
            raise error
        return answers

    def _send_all(self, pgconn: PGconn, new: list[tuple[bytes, tuple[int, ...]]]) -> list[bool]:
        """Put everything into libpq's buffer; for each answer to come, whether it is that of a statement that was added.

        `new` takes the keys of what is prepared now.
        """
        sent: list[bool] = []
        known = self._conn._prepared
        while known._to_flush:
            name = known._to_flush.popleft()
            pgconn.send_query_params(b"DEALLOCATE ALL" if name is None else b'DEALLOCATE "%b"' % name, None)
            sent.append(False)
        for text, values, prepare in self._calls:
            if not prepare or known.prepare_threshold is None:
                pgconn.send_query_params(text, values or None)
            else:
                key: tuple[bytes, tuple[int, ...]] = (text, ())
                name = known._names.get(key)
                if name is None:
                    new.append(key)
                    name = known._names[key] = b"_aioqueue_%d" % known._prepared_idx
                    known._prepared_idx += 1
                    pgconn.send_prepare(name, text)
                    sent.append(False)
                else:
                    known._names.move_to_end(key)
                pgconn.send_query_prepared(name, values or None)
            sent.append(True)
        return sent
