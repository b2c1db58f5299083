"""One transaction of a job, from BEGIN with the tenant set locally to a fenced statement, COMMIT and the scrub in one trip.

Two round trips beside the user's own; one where jobs wait for connections: each begins in the trip that ends the one before. User
code has a connection object of its own, which is dead before the ending begins. Decides nothing about outcomes: it raises, and
user_code.py turns that into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from functools import cache, lru_cache

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from .claimed import Claimed
from .context import JobTransaction
from .database import Database
from .errors import TransactionViolation
from .identity import MARKER, ROLE, Identity
from .job_connection import JobConnection
from .nested import Nesting, OnConnection
from .pool_connection import PoolConnection, sever
from .pooler import SharedConnection
from .server import deadline
from .settings import Settings
from .store import Store
from .terms import Terms, read_back
from .trip import Trip
from .violation import check_end, is_gone, refusal_of_commit

logger = logging.getLogger("aioqueue")

IN_STANDBY, READ_ONLY = b"in_hot_standby", b"default_transaction_read_only"
"""What a server tells at once when it can only read."""
SET_ROLE = b"SELECT pg_catalog.set_config('role', $1, true)"
KEEP_ROLE = b"SELECT pg_catalog.set_config($1, pg_catalog.current_setting('role'), true)"


@cache
def _set_config(number: int) -> bytes:
    calls = (f"pg_catalog.set_config(${n}, ${n + 1}, false)" for n in range(1, 2 * number, 2))
    return f"SELECT {', '.join(calls)}".encode()


@lru_cache(maxsize=100)
def _set_local(given: int, names: tuple[str, ...]) -> bytes:
    """Set as many settings whose names are given with their values, and then those of `names`, which are our own."""
    named = [f"pg_catalog.set_config(${n}, ${n + 1}, true)" for n in range(1, 2 * given, 2)]
    own = [f"pg_catalog.set_config('{name}', ${n}, true)" for n, name in enumerate(names, 2 * given + 1)]
    return f"SELECT pg_catalog.current_setting('role'), {', '.join(named + own)}".encode()


class OpenTransaction:
    """One begun transaction of a job on one connection; ended by `finish`, `confirm` or `abort`, whichever comes first."""

    face: JobTransaction
    """What user code is given; there once it has begun."""
    settle: None = None
    """Nothing is still to be sent when user code has returned."""

    def __init__(
        self, store: Store, database: Database, settings: Settings, job: Claimed, identity: Identity, seconds: float
    ) -> None:
        self._store = store
        self._database = database
        self._settings = settings
        self._job = job
        self._identity = identity
        self._seconds = seconds
        """What is left of the job's time limit."""
        self._conn: PoolConnection
        self._terms = Terms(job, identity, settings)
        self._beginning: Trip | None = None
        self._role = ""
        """The runtime's own, in which it ends the transaction."""
        self._user: str | None = None
        self._given: JobConnection | None = None
        self._nesting: Nesting | None = None
        self._ended = False

    async def begin(self, conn: PoolConnection) -> None:
        """BEGIN and the local settings, in one round trip, unless the end of another job's transaction has sent them."""
        beginning = self._beginning
        if beginning is None or self._conn is not conn:
            beginning = self._prepare_beginning(conn)
            await beginning.run(self._settings.pool.deadline)
        elif beginning.error is not None:
            raise beginning.error
        told = conn.pgconn.parameter_status
        if (told(IN_STANDBY) == b"on" or told(READ_ONLY) == b"on") and not isinstance(conn, SharedConnection):
            # A demoted primary, told before user code has begun: another connection finds the new one, and it costs no attempt.
            raise psycopg.errors.ReadOnlySqlTransaction("the server of this connection can only read")
        settings = beginning.answers[-1 if self._identity.role is None else -2]
        self._role = (settings.get_value(0, 0) or b"none").decode()
        self._user = (conn.pgconn.parameter_status(b"session_authorization") or b"").decode() or None
        self._nesting = Nesting(self._settings.tenants, self._job, self._identity, role=self._role, marker=self._terms.marker)
        self._given = JobConnection(conn, self._nesting.check)
        self.face = JobTransaction(self._job, self._given, self._nesting)
        self._nesting.on = OnConnection(self._store, self._given)

    def _prepare_beginning(self, conn: PoolConnection) -> Trip:
        self._conn = conn
        shared = isinstance(conn, SharedConnection)
        values = self._terms.local_settings(self._seconds, server_version=conn.pgconn.server_version, foreign=shared)
        trip = self._beginning = Trip(conn)
        trip.add(conn._get_tx_start_command(), prepare=True)
        if shared:
            self._add_scrub(trip)  # of strangers: behind a pooler the session was theirs
        given = self._identity.settings  # which come first
        number = len(given)
        texts = *itertools.chain.from_iterable(given.items()), *(*values.values(),)[number:]
        trip.add(_set_local(number, (*values,)[number:]), texts, prepare=True)
        if self._identity.role is not None:
            trip.add(SET_ROLE, [self._identity.role])
        return trip

    async def finish(self, result: str) -> None:
        """Record success and commit, together. `result` is JSON text.

        Raises LeaseLost, TransactionViolation, or the psycopg.Error with which the server refused: nothing was committed
        then. Returns only when it is committed, also when COMMIT's answer was lost and had to be read back.
        """
        error = await self._end("finish", result)
        if error is not None and await read_back(self._database, self._store, self._settings, self._job) != "succeeded":
            raise error

    async def confirm(self) -> None:
        """Check that the job is still this worker's, and commit; raises as `finish` does."""
        error = await self._end("confirm")
        if error is not None:
            raise error

    async def _end(self, statement: str, *result: str) -> BaseException | None:
        """Send the last statement, COMMIT and the scrub; an error returned (not raised) leaves open whether COMMIT was good."""
        self._check_status()
        conn = self._conn
        trip = Trip(conn)
        # What is deferred to COMMIT fails here, where nothing is in doubt. It returns no rows, which the first statement after a
        # stream() must not: libpq would give them one by one.
        deferred = trip.add(b"SET CONSTRAINTS ALL IMMEDIATE", prepare=True)
        if conn.pgconn.parameter_status(b"client_encoding") != b"UTF8":
            trip.add(b"SET LOCAL client_encoding TO 'UTF8'")  # a Trip's; user code has changed it
        if self._identity.role is not None:
            trip.add(KEEP_ROLE, [ROLE])
            trip.add(SET_ROLE, [self._role])
        expected = self._terms.expected(self._role, self._user)
        trip.add(self._store.wired[statement], (*self._job.fence, expected, *result), prepare=True)
        commit = trip.add(b"COMMIT", prepare=True)
        scrub = self._add_scrub(trip)
        following = self._follow(trip)
        try:
            await trip.run(self._settings.pool.deadline)
        except BaseException as error:
            self._break_promise(following)
            if not isinstance(error, psycopg.Error):
                raise
            done = len(trip.answers)
            refused = done < commit or (done == commit and is_gone(error))  # then COMMIT has not begun
            if refused and not conn.closed and conn.info.transaction_status == TransactionStatus.INERROR:
                raise refusal_of_commit(self._job, error, of_user=done == deferred) from None
            self._ended = True
            self._database.lost(error)
            await conn.close()
            # With a good COMMIT the outcome stands.
            return None if done > commit else error
        self._ended = True
        if self._unlike(trip, scrub):
            self._break_promise(following)
            await conn.close()
        return None

    def _follow(self, trip: Trip) -> OpenTransaction | None:
        """Let the job that waits first begin in the trip that ends this one; the transaction of that job, if there is one."""
        if isinstance(self._conn, SharedConnection):
            return None
        following = self._database.promise(self._conn)
        if not isinstance(following, OpenTransaction):
            return None
        try:
            trip.then = following._prepare_beginning(self._conn)
        except UnicodeError:
            self._break_promise(following)  # its own affair
            return None
        return following

    def _break_promise(self, following: OpenTransaction | None) -> None:
        # Whatever has become of its beginning, it begins anew: this connection is not known to be clean.
        if following is not None:
            following._beginning = None
        self._database.break_promise(self._conn)

    def _add_scrub(self, trip: Trip) -> int:
        # In the trip that ends or begins the transaction: behind a pooler the next one may meet another session.
        place = trip.add(self._store.wired["scrub"], prepare=True)
        if isinstance(self._conn, SharedConnection):
            values = itertools.chain.from_iterable(self._conn.reported.items())
            trip.add(_set_config(len(self._conn.reported)), values)
        return place

    def _unlike(self, trip: Trip, scrub: int) -> bool:
        # psycopg knows of a DEALLOCATE only where it could read the answer; what it takes for prepared would fail for others.
        return int(trip.answers[scrub].get_value(0, 0) or 0) < trip.prepared

    def _take_back(self) -> bool:
        """Take the connection from user code, for good; whether another task or thread of it has a statement under way."""
        if self._given is None:
            return False
        # In this order: a thread that is about to use it finds it dead, or is found here.
        self._given.kill()
        self.face.detach()
        return self._given.in_use or self._conn.is_waited_for

    def _check_status(self) -> None:
        in_use = self._take_back()
        assert self._given is not None and self._nesting is not None  # noqa: S101 - it has begun
        check_end(self._conn, self._given, self._nesting, in_use=in_use)

    async def left(self) -> bool:
        """Whether user code ended it by itself (and perhaps began another): then nothing can undo what it wrote."""
        in_use = self._take_back()
        if self._given is not None and self._given.left:
            return True
        if in_use or self._ended or self._conn.closed or self._conn.pgconn.pipeline_status != PipelineStatus.OFF:
            return False
        if self._conn.info.transaction_status != TransactionStatus.INTRANS:
            return False
        try:
            async with deadline(self._conn, self._settings.limits.rollback):
                row = await (await self._store.get_settings(self._conn, [MARKER])).fetchone()
                return row is not None and row[0] != self._terms.marker
        except psycopg.Error:
            return False

    async def abort(self, error: BaseException) -> None:
        """Roll back and scrub, within the rollback limit, or close the connection. Raises nothing but a cancellation."""
        if self._ended:
            return
        self._ended = True
        in_use = self._take_back()
        usable = (
            not (in_use or self._conn.closed or isinstance(error, TransactionViolation))
            and self._conn.info.transaction_status != TransactionStatus.ACTIVE
            and self._conn.pgconn.pipeline_status == PipelineStatus.OFF
        )
        try:
            if usable:
                trip = Trip(self._conn)
                trip.add(b"ROLLBACK")
                if self._conn.prepare_threshold is not None:
                    # What stood for a table that is gone with the transaction would fail; psycopg does the same.
                    trip.add(b"DEALLOCATE ALL")
                    self._conn._prepared.clear()
                    self._conn._prepared._to_flush.clear()
                scrub = self._add_scrub(trip)
                await trip.run(self._settings.limits.rollback)
                if not self._unlike(trip, scrub):
                    return
        except psycopg.Error as failed:
            logger.debug("rollback of job %s failed, its connection is closed: %s", self._job.job_id, failed)
        except BaseException:
            # A cancellation: what was not scrubbed serves nobody any more.
            await self._close()
            raise
        await self._close()

    async def release(self) -> None:
        """Give the connection back; it is as clean as before, or closed."""
        await self._database.take_back(self._conn)

    async def _close(self) -> None:
        if self._given is not None and self._given.in_use:
            # Who still waits on the socket sees its end first; a number of it that is used again would be waited on, too.
            sever(self._conn)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.limits.rollback):
                    while self._given.in_use:  # noqa: ASYNC110 - its lock is of the loop of whoever has it, which may be a thread's
                        await asyncio.sleep(0.01)
        await self._conn.close()
