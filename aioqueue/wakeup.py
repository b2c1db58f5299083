"""Sends this process's hints, debounced, outside any transaction; sees callers' transactions end.

A NOTIFY inside a transaction would serialise the commits of the whole server. A hint that is lost costs one
poll, so failures are not reported; they are tried again, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import psycopg

from .callers.transactions import OpenTransaction
from .database import Database
from .listen import Kind
from .store import Store

DEBOUNCE = 0.01
"""Seconds between two notifications: a first hint goes out at once, what follows within this time is one more."""
CARRY = 0.008
"""Seconds after a notification from which an enqueue, or a write of outcomes, carries the next one: a stream of them leaves the
timer none to send."""
LOOK = 0.005
"""Seconds between looks at the watched connections, in memory; a twentieth of the youngest age, up to ASK."""
ASK = 0.05
"""Seconds after which the server is asked whether a watched transaction has ended; then doubling."""
LONGEST_PAUSE = 1.0
"""Seconds between questions, and between attempts after errors, at most."""
CALL_SECONDS = 2.0
"""Deadline of each call: a late hint is of no use."""
LAST_SECONDS = 1.0
"""Deadline of the last one, when the app is closed."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A caller's transaction that has enqueued or cancelled jobs; the connection stays the caller's to drop."""

    transaction: OpenTransaction
    xid: int
    since: float
    ask_at: float
    ask_pause: float = ASK
    job_ids: set[UUID] = field(default_factory=set)
    kinds: set[Kind] = field(default_factory=set)


class Notifier:
    """Takes hints at any rate and sends few. Everything is to be called from the loop's thread."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store
        self._pending: set[Kind] = set()
        self._watched: dict[Hashable, _Watched] = {}
        self._of_job: dict[UUID, _Watched] = {}
        self._next_ask = self._sent_at = 0.0
        self._event = asyncio.Event()

    def hint(self, kind: Kind) -> None:
        """Say that there may be work ('ready'), that jobs have ended ('done'), come further ('progress'); returns at once."""
        self._pending.add(kind)
        self._event.set()

    def take(self, kind: Kind) -> bool:
        """Whether a hint of that kind is due: then whoever asks sends it, in a round trip that he has to make anyway.

        If that fails he gives it back, by `hint`: it may be that of others, too.
        """
        now = time.monotonic()
        if now < self._sent_at + CARRY or self._pending - {kind}:
            return False
        self._pending.clear()
        self._sent_at = now
        return True

    def watch(
        self, transaction: OpenTransaction, xid: int, job_ids: Sequence[UUID] = (), *, kinds: Sequence[Kind] = ("ready",)
    ) -> None:
        """Hint once transaction `xid` (pg_current_xact_id) of a caller's connection has ended, however it ends."""
        key = transaction.key
        watched = self._watched.get(key)
        if watched is None or watched.xid != xid:
            # A connection has one transaction at a time: the one before has ended.
            self.look(also=watched)
            now = time.monotonic()
            watched = _Watched(transaction, xid, since=now, ask_at=now + ASK)
            if transaction.ended:
                for kind in kinds:
                    self.hint(kind)
                return
            self._watched[key] = watched
        watched.kinds.update(kinds)
        watched.job_ids.update(job_ids)
        self._of_job.update(dict.fromkeys(job_ids, watched))
        self._event.set()

    def look(self, _committed: object = None, *, also: _Watched | None = None) -> None:
        """Look at the watched connections now: one of them may just have committed."""
        for watched in list(self._watched.values()):
            if watched is also or watched.transaction.ended:
                self._end(watched)

    def uncommitted(self, job_id: UUID) -> bool:
        """Whether the job was enqueued in a transaction of this process that is still open.

        Right at once while the connection has begun no other transaction; that is found out within a second.
        """
        watched = self._of_job.get(job_id)
        return watched is not None and not watched.transaction.ended

    def all_uncommitted(self) -> list[UUID]:
        """Return the jobs that were enqueued in transactions of this process that are still open; see `uncommitted`."""
        return [job_id for job_id in self._of_job if self.uncommitted(job_id)]

    async def run(self) -> None:
        """Send hints and watch, for ever."""
        pause = ASK
        while True:
            await self._wait()
            self.look()
            try:
                if self._pause_left <= 0:
                    await self._send()
                await self._ask()
            except (psycopg.Error, OSError):
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                pause = ASK

    async def send_last(self) -> None:
        """Once `run` has been cancelled: send what is pending, in one short try."""
        self.look()
        with contextlib.suppress(psycopg.Error, OSError):
            await self._send(LAST_SECONDS)

    async def _wait(self) -> None:
        self._event.clear()
        if not self._pending:
            seconds = None
            if self._watched:
                youngest = time.monotonic() - max(watched.since for watched in self._watched.values())
                seconds = min(max(LOOK, youngest / 20), ASK)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._event.wait()
        if self._pending and (early := self._pause_left) > 0:
            await asyncio.sleep(early)

    @property
    def _pause_left(self) -> float:
        """Seconds until the next notification may be sent: whoever takes a hint meanwhile begins the pause anew."""
        return self._sent_at + DEBOUNCE - time.monotonic()

    def _end(self, watched: _Watched) -> None:
        key = watched.transaction.key
        if self._watched.get(key) is watched:
            del self._watched[key]
        for job_id in watched.job_ids:
            if self._of_job.get(job_id) is watched:
                del self._of_job[job_id]
        for kind in watched.kinds:
            self.hint(kind)

    async def _send(self, seconds: float = CALL_SECONDS) -> None:
        kinds, self._pending = self._pending, set()
        try:
            if kinds:
                self._sent_at = time.monotonic()
                async with self._database.for_caller(seconds) as conn:
                    for kind in sorted(kinds):
                        await self._store.notify(conn, kind)
        except BaseException:
            self._pending |= kinds
            raise

    async def _ask(self) -> None:
        # For a caller that began its next transaction between two looks, or whose server went unnoticed.
        now = time.monotonic()
        due = [watched for watched in self._watched.values() if watched.ask_at <= now]
        if not due or now < self._next_ask:
            return
        self._next_ask = now + ASK
        async with self._database.for_caller(CALL_SECONDS) as conn:
            ended = await self._store.ended_transactions(conn, [watched.xid for watched in due])
        for watched in due:
            watched.ask_pause = min(2 * watched.ask_pause, LONGEST_PAUSE)
            watched.ask_at = time.monotonic() + watched.ask_pause
            if watched.xid in ended:
                self._end(watched)
