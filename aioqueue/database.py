"""What an app and its workers have of the database: the way there (server.py), the pool (pool.py), and here the share of jobs.

Which job's transaction has which connection, who has it next, and for how many jobs there will be one soon: connections go from
job to job without the pool, and may be promised before they come back. Opens no transaction and runs no statement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psycopg
from psycopg.pq import TransactionStatus

from .errors import AioQueueError
from .pool import Pool, give_back
from .pool_connection import PoolConnection, sever
from .settings import PoolSettings
from .shares import Waiting

PASSED_ON = 60.0
"""Seconds for which a connection goes from job to job; then the pool sees it again, which ends it when it is old."""
SOON = 0.25
"""Seconds that a claimed job may have to wait for a connection, as long as the others take what they took lately."""
AHEAD = 15
"""Jobs at most that wait for each connection."""


class NoFreeConnection(AioQueueError):
    """A job got no connection for its transaction; user code has not begun."""


class Database(Pool):
    """The pool of one app, with `lend()` for jobs' transactions."""

    def __init__(self, dsn: str, settings: PoolSettings, *, listen_dsn: str | None = None) -> None:
        super().__init__(dsn, settings, listen_dsn=listen_dsn)
        self._lent: dict[PoolConnection, float] = {}
        """Those that jobs' transactions have, and since when."""
        self._promised: dict[PoolConnection, Waiting[PoolConnection]] = {}
        self._held = 0.0
        """Seconds that a job's transaction has had its connection lately."""
        self.severed_with_jobs: set[Callable[[], None]] = set()
        """Shut the connections of jobs that are no pool's of ours, when the lease is over."""
        self.waiting = 0
        """Jobs that wait for a connection now."""
        self._share = 0.0
        """Which share of the jobs that run has a connection, or waits for one."""

    @property
    def of_worker(self) -> int:
        """Connections of the server that a worker's process takes at most: the pool, its listener, its guard.

        Those that lead through a pooler are the pooler's.
        """
        return (0 if self.pooler else self.settings.size) + (2 if self.can_listen else 0)

    @property
    def free_for_jobs(self) -> int:
        """Connections that a job's transaction could have at once."""
        return self._shares.free

    def bounded(self, limit: int, *, busy: int, coming: int) -> int:
        """How many jobs to claim, `limit` at most, so that those of them that take a connection have one soon.

        How many do is taken to be as among the `busy` ones that run. `coming`: jobs that another claim has asked
        for, or that wait for a slot.
        """
        if busy:
            now = min(1.0, self._shares.jobs / busy)
            self._share = max(now, self._share + (now - self._share) / 8)  # it rises at once, and falls by and by
        # While none comes back, what the last one has taken so far counts.
        last = max(self._lent.values(), default=None)
        held = max(self._held, 0.0 if last is None else time.monotonic() - last)
        each = min(AHEAD, SOON / held) if held else AHEAD
        most = int(self._shares.limit * (1 + each))
        room = max(self._shares.free, most - self._shares.jobs - int(coming * self._share))
        if self.waiting and room < most // 4:
            return 0  # a few at a time would cost more than they bring
        return min(limit, int(room / self._share)) if self._share * limit > room else limit

    async def lend(self, wait: float | None, guest: object = None) -> PoolConnection:
        """Lend one to a job's transaction; `take_back` follows exactly if this returns. `guest`: see `promise`.

        NoFreeConnection when there is none within `wait` seconds.
        """
        conn: PoolConnection | None = None
        if self._shares.free and not self.waiting:
            await self._shares.enter("job")
        else:
            conn = await self._wait_for_turn(wait, guest)
        try:
            if conn is None:
                conn = await self._get(self._opened(), self.settings.acquire_timeout)
                conn.stays_watched_by = asyncio.get_running_loop()
                conn.pass_on_until = time.monotonic() + PASSED_ON
        except psycopg.OperationalError as error:
            self._shares.leave("job")
            raise NoFreeConnection(str(error)) from error
        except BaseException:
            self._shares.leave("job")
            raise
        self._lent[conn] = time.monotonic()
        return conn

    async def _wait_for_turn(self, wait: float | None, guest: object) -> PoolConnection | None:
        self.waiting += 1
        try:
            return await self._shares.enter("job", guest, wait)
        except TimeoutError:
            raise NoFreeConnection(f"no connection was free for a job within {wait:g} s") from None
        finally:
            self.waiting -= 1
            while self._shares.left_over:
                conn = self._shares.left_over.pop()
                self._lent.pop(conn, None)
                await give_back(conn)

    def promise(self, conn: PoolConnection) -> object:
        """Promise a connection that is about to come back to the job that waits first; its `guest`, None: nobody waits.

        So that its transaction may begin in the round trip that ends this one. It takes the connection as it comes back, unless
        the promise is broken.
        """
        waiting = self._shares.first() if time.monotonic() < conn.pass_on_until else None
        if waiting is None:
            return None
        self._promised[conn] = waiting
        return waiting.guest

    def break_promise(self, conn: PoolConnection) -> None:
        """Let the job that was promised the connection wait for another."""
        waiting = self._promised.pop(conn, None)
        if waiting is not None:
            self._shares.put_back(waiting)

    async def take_back(self, conn: PoolConnection) -> None:
        """Take one back that was lent; the next job that waits has it at once."""
        now = time.monotonic()
        self._held += (now - self._lent.pop(conn) - self._held) / 16
        promised = self._promised.pop(conn, None)
        if promised is not None and self._shares.pass_on(promised, conn):
            self._lent[conn] = now
            return
        if self.waiting and conn.pgconn.transaction_status == TransactionStatus.IDLE and now < conn.pass_on_until:
            if not self._shares.leave("job", conn):
                await give_back(conn)
            return
        try:
            await give_back(conn)
        finally:
            self._shares.leave("job")

    def sever_jobs(self) -> None:
        """Shut the connections of all jobs' transactions: the lease is over, they must not commit."""
        for conn in self._lent:
            sever(conn)
        for shut in list(self.severed_with_jobs):
            shut()
