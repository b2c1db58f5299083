"""Waits for jobs' ends, and for what happens before: one query serves all waiters of the process, however many there are.

A wait subscribes, reads, then waits for the next read: on every wake-up, on reconnection, on a slow poll, and
once at its deadline. Errors of a read are retried within the waiter's time. Starts no task. What a watch tells: watch.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import PoolTimeout

from .client_store import EndedJob
from .context import InTransaction, running_job
from .database import Database
from .errors import AppNotOpen, JobNotFound, NotCommitted, ResultTimeout
from .events import logger
from .job import Job, JobStatus
from .listen import Listener
from .server import connection_lost
from .store import Store
from .waiting import Key, Waiter, batches, expired, result_of, standing
from .wakeup import Notifier
from .watch import Watch, Watched

UNKNOWN_WAIT = 1.0
"""Seconds that an unknown job is waited for: its enqueue may be about to commit."""
LAST_READ = 2.0
"""Seconds that the read at a waiter's deadline may take."""
REST = 5.0
"""The pause after a read, in its durations, at least: waiting never loads the server."""
SHORTEST_REST, LONGEST_REST = 0.005, 1.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between attempts after an error; doubling, jittered."""
LINGER = 10.0
"""Seconds without any waiter after which notifications of progress are no longer asked for."""

_Read = Callable[[AsyncConnection[Any], list[Key]], Awaitable[list[EndedJob]]]


def _check_committed(job: Job[Any]) -> None:
    running = running_job.get()
    if isinstance(running, InTransaction) and job.id in running.enqueued:
        raise NotCommitted(job.id)


class ResultReader:
    """Answers `Job.result` and `Job.status`. Everything is to be called from the loop's thread."""

    def __init__(
        self, database: Database, store: Store, listener: Listener, notifier: Notifier, *, poll: float, keep: float
    ) -> None:
        self._database = database
        self._store = store
        self._listener = listener
        self._notifier = notifier
        self._poll = poll
        self._keep = keep
        self._waiting: dict[Key, list[Waiter]] = {}
        self._watchers = 0  # among them
        self._asked: set[Key] = set()  # to be read next: new ones, and those whose time is up
        self._all = False  # a hint has come: read all
        self._moved = False  # a hint of progress has come: read what is watched
        self._reads = 0  # of all that is watched
        self._hears_progress = False
        self._error: Exception | None = None
        self._event = asyncio.Event()
        self._closed = False

    async def wait(self, job: Job[Any], timeout: float | None) -> Any:
        """Wait up to `timeout` seconds; see `Job.result`. Cancelled, it leaves nothing behind."""
        _check_committed(job)
        waiter = Waiter((job.id, job.tenant), asyncio.get_running_loop().create_future(), timeout)
        return result_of(job, await self._answer(waiter, timeout))

    def watch(self, job: Job[Any], timeout: float | None) -> Watch:
        """Watch a job; see `Job.watch`."""
        return Watch(self, job, timeout, result_of)

    async def look(self, job: Job[Any], watched: Watched, timeout: float | None, *, of: float | None) -> EndedJob:
        """Wait until the job stands otherwise than `watched` says. Cancelled, it leaves nothing behind, and misses nothing."""
        _check_committed(job)
        waiter = Waiter((job.id, job.tenant), asyncio.get_running_loop().create_future(), of, watched)
        seen = await self._answer(waiter, timeout, ask=watched.read != self._reads)
        # Here, where nothing can cancel it any more: an answer that is not taken has not been seen.
        watched.standing, watched.read = standing(seen), waiter.read
        return seen

    async def _answer(self, waiter: Waiter, timeout: float | None, *, ask: bool = True) -> EndedJob:
        if self._closed:
            raise AppNotOpen("result")
        idle = not self._waiting
        self._waiting.setdefault(waiter.key, []).append(waiter)
        self._watchers += waiter.watched is not None
        if ask:
            self._asked.add(waiter.key)
        if ask or idle:
            self._event.set()
        try:
            await asyncio.wait([waiter.future], timeout=timeout)
            if not waiter.future.done():
                waiter.last = True
                self._ask(waiter)
                await asyncio.wait([waiter.future], timeout=LAST_READ)
            if not waiter.future.done():
                raise ResultTimeout(waiter.key[0], waiter.seconds or 0.0, None) from self._error
            return waiter.future.result()
        finally:
            self._forget(waiter)

    async def status(self, job: Job[Any]) -> JobStatus:
        """Read where the job stands; see `Job.status`. Retried on connections that died in the pool."""
        _check_committed(job)
        uncommitted = self._notifier.uncommitted(job.id)
        for _ in range(self._database.settings.size):
            try:
                status = await self._read_status(job)
                break
            except psycopg.Error as error:
                if isinstance(error, PoolTimeout) or not connection_lost(error):
                    raise
        else:
            status = await self._read_status(job)
        if status is None:
            raise NotCommitted(job.id) if uncommitted else JobNotFound(job.id, expired=expired(job.id, self._keep))
        return status

    async def _read_status(self, job: Job[Any]) -> JobStatus | None:
        async with self._database.for_caller() as conn:
            return await self._store.job_status(conn, job.id, tenant=job.tenant)

    async def run(self) -> None:
        """Read for the waiters, for ever; a failure leaves them waiting."""
        self._listener.subscribe("done", self._hint)
        try:
            await self._read_for_ever()
        finally:
            self._listener.unsubscribe("done", self._hint)
            self._hear_progress(False)

    def close(self) -> None:
        """Let nobody wait any more: those who do, and whoever looks for the next event of a watch, get AppNotOpen."""
        self._closed = True
        for waiter in self._waiters(list(self._waiting)):
            self._fail(waiter, AppNotOpen("result"))

    def _hint(self) -> None:
        self._all = True
        self._event.set()

    def _hint_progress(self) -> None:
        if self._watchers:
            self._moved = True
            self._event.set()
        else:
            self._reads += 1  # whoever is between two events reads anew

    def _hear_progress(self, wanted: bool) -> None:
        if wanted != self._hears_progress:
            self._hears_progress = wanted
            change = self._listener.subscribe if wanted else self._listener.unsubscribe
            change("progress", self._hint_progress)

    def _ask(self, waiter: Waiter) -> None:
        self._asked.add(waiter.key)
        self._event.set()

    def _forget(self, waiter: Waiter) -> None:
        if waiter.future.done() and not waiter.future.cancelled():
            waiter.future.exception()  # a wait that was cancelled at the same moment does not fetch it
        self._watchers -= waiter.watched is not None
        others = self._waiting[waiter.key]
        others.remove(waiter)
        if not others:
            del self._waiting[waiter.key]
            self._asked.discard(waiter.key)

    def _waiters(self, keys: Iterable[Key]) -> list[Waiter]:
        return [waiter for key in keys for waiter in self._waiting.get(key, ()) if not waiter.future.done()]

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        if not waiter.future.done():
            waiter.future.set_exception(error)

    async def _read_for_ever(self) -> None:
        poll_at = time.monotonic() + self._poll
        pause = SHORTEST_PAUSE
        self._all = True  # whoever waits since the last run
        while True:
            await self._wait(poll_at)
            # Taken before the read: what comes during it makes another one.
            everything = self._all or time.monotonic() >= poll_at or self._unknown_due() <= time.monotonic()
            watched = self._watched()
            keys = set(self._waiting) if everything else self._asked | (watched if self._moved else set())
            self._reads += everything or self._moved
            self._event.clear()
            self._asked.clear()
            self._all = self._moved = False
            if everything:
                poll_at = time.monotonic() + self._poll
            if watched:
                self._hear_progress(True)
            if not keys:
                continue
            started = time.monotonic()
            try:
                # Those whose time is up are told how the job stands.
                followed = watched | {waiter.key for waiter in self._waiters(keys) if waiter.last}
                await self._read([key for key in keys if key not in followed], self._store.read_outcomes)
                await self._read([key for key in keys if key in followed], self._store.follow)
            except (psycopg.Error, OSError) as error:
                if self._error is None:
                    logger.warning("results cannot be read for now: %s: %s", type(error).__name__, error)
                self._error = error
                self._all = True
                self._event.set()
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                pause, self._error = SHORTEST_PAUSE, None
                rest = REST * (time.monotonic() - started)
                await asyncio.sleep(min(max(rest, SHORTEST_REST), LONGEST_REST))

    async def _wait(self, poll_at: float) -> None:
        while not self._waiting:
            self._event.clear()
            try:
                async with asyncio.timeout(LINGER if self._hears_progress else None):
                    await self._event.wait()
            except TimeoutError:
                self._hear_progress(False)
        seconds = min(poll_at, self._unknown_due()) - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._event.wait()
        except TimeoutError:
            return

    def _unknown_due(self) -> float:
        since = [w.unknown_since for w in self._waiters(self._waiting) if w.unknown_since is not None]
        return min(since, default=float("inf")) + UNKNOWN_WAIT

    def _watched(self) -> set[Key]:
        if not self._watchers:
            return set()
        return {key for key, waiters in self._waiting.items() if any(waiter.watched is not None for waiter in waiters)}

    async def _read(self, keys: list[Key], read: _Read) -> None:
        for batch in batches(keys):
            await self._read_batch(batch, read)

    async def _read_batch(self, batch: list[Key], read: _Read) -> None:
        """Read one batch; what cannot be asked for is found by halving, so that it fails its own waiters and no others."""
        # Both before the read, or a commit during it would be taken for none.
        last = {waiter for waiter in self._waiters(batch) if waiter.last}
        uncommitted = {key for key in batch if self._notifier.uncommitted(key[0])}
        reads = self._reads
        try:
            async with self._database.for_caller() as conn:
                rows = await read(conn, batch)
        except Exception as error:
            if isinstance(error, psycopg.Error | OSError) and not isinstance(error, psycopg.DataError):
                raise  # the server's, whatever was asked for: tried again
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._read_batch(batch[:middle], read)
                await self._read_batch(batch[middle:], read)
                return
            logger.exception("the result of job %s cannot be read", batch[0][0])
            for waiter in self._waiters(batch):
                self._fail(waiter, error)
            return
        found = {row.job_id: row for row in rows}
        self._tell_watchers(batch, found, reads)
        self._deliver(batch, found, last, uncommitted)

    def _tell_watchers(self, batch: list[Key], found: dict[UUID, EndedJob], reads: int) -> None:
        for waiter in self._waiters(batch):
            row = found.get(waiter.key[0])
            if waiter.watched is not None and row is not None and row.stage is not None:
                waiter.read = reads
                if standing(row) != waiter.watched.standing:
                    waiter.future.set_result(row)
                else:
                    waiter.watched.read = reads

    def _deliver(self, batch: list[Key], found: dict[UUID, EndedJob], last: set[Waiter], uncommitted: set[Key]) -> None:
        now = time.monotonic()
        for waiter in self._waiters(batch):
            job_id = waiter.key[0]
            row = found.get(job_id)
            long_unknown = waiter.unknown_since is not None and now - waiter.unknown_since >= UNKNOWN_WAIT
            if row is not None and row.state is not None:
                waiter.future.set_result(row)
            elif row is None and waiter.key in uncommitted:
                self._fail(waiter, NotCommitted(job_id))
            elif row is None and expired(job_id, self._keep):
                self._fail(waiter, JobNotFound(job_id, expired=True))
            elif row is None and long_unknown:
                self._fail(waiter, JobNotFound(job_id))
            elif waiter in last:
                state = None if row is None else str(row.stage or "under way")
                self._fail(waiter, ResultTimeout(job_id, waiter.seconds or 0.0, state))
            elif row is not None:
                waiter.unknown_since = None
            elif waiter.unknown_since is None:
                waiter.unknown_since = now
