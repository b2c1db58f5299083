"""Writes how far the jobs of one worker are: the last value of each, all of them in one statement, throttled.

Takes reports from any thread. A report is a hint: while the database is away the last ones are kept and tried again, the outage
is said once, and no job waits or fails. Removes what it has written once a run is over; `sweep` takes what a dead process left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

import psycopg

from .claimed import Claimed
from .database import Database
from .events import Observers, logger
from .outage import Outage
from .pool import AllInUse
from .server import connection_lost
from .store import REFUSED, Store

INTERVAL = 0.25
"""Seconds between two writes of one job's progress; a first report and a full 1.0 do not wait."""
SHORTEST = 0.02
"""Seconds between two writes of the process, however many first reports there are."""
BATCH = 1_000
"""Jobs of one write at most."""
RATE = 2_000
"""Rows a second that a process writes at most."""
SWEEP_INTERVAL = 600.0
"""Seconds between sweeps of what dead processes have left, jittered; the first is at the worker's start."""
SWEPT = 10_000
"""Rows of one sweep at most."""
CALL_SECONDS = 2.0
"""Deadline of each call."""


@dataclass(slots=True, eq=False)
class _Reported:
    """The progress of one run."""

    job: Claimed
    value: float = 0.0
    message: str | None = None
    waits: bool = False
    """Whether it is to be written."""
    urgent: bool = False
    ended: bool = False
    number: int = 0
    """Of the last row that was sent."""
    rows: list[int] = field(default_factory=list)
    """The numbers of the rows that may stand in the table: one, more after writes without an answer."""
    written_at: float = 0.0

    def line(self) -> dict[str, object]:
        """What the statement is told; a new row, or none once the run is over."""
        job = self.job
        facts: dict[str, object] = {"w": job.worker, "j": str(job.job_id), "a": job.attempt, "d": self.rows}
        if self.ended:
            return facts
        return {**facts, "l": job.lane, "v": job.vt, "n": self.number, "p": self.value, "m": self.message}


class Reporter:
    """The progress of one worker's jobs."""

    def __init__(self, database: Database, store: Store, observers: Observers, *, reported: Callable[[], None]) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._reported = reported
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._of: dict[tuple[UUID, int], _Reported] = {}
        self._work = asyncio.Event()
        self._hurry = asyncio.Event()
        self._next = self._soonest = 0.0
        """When the next write is due that nobody hurries, and one that somebody does."""
        self._sweep_at = 0.0
        self._refused = False
        """Whether it was said that the database is there and does not take them."""

    def report(self, job: Claimed, value: float, message: str | None) -> None:
        """Take a report, from any thread; never blocks, never fails. Of a run that is over it is ignored."""
        with self._lock:
            if job.reporter is not self:
                return
            key = job.job_id, job.attempt
            found = self._of.get(key)
            if found is None:
                found = self._of[key] = _Reported(job)
            elif (found.value, found.message) == (value, message):
                return
            waited, before = found.waits, found.urgent
            urgent = found.urgent = before or not found.number or (value == 1 and found.value < 1)
            found.value, found.message, found.waits = value, message, True
        if not waited or urgent != before:  # else it is awake: a thread that reports without end must not flood the loop
            self._wake(urgent)

    def ended(self, job: Claimed) -> None:
        """Take note that a run is over: what it has reported goes."""
        with self._lock:
            job.reporter = None
            if not self._of:
                return  # nobody reports: to look for one costs more
            key = job.job_id, job.attempt
            found = self._of.get(key)
            if found is None:
                return
            found.ended, found.waits = True, False
            if not found.number:
                del self._of[key]
                return
        self._work.set()

    async def run(self) -> None:
        """Write what is reported, for ever."""
        self._work.set()  # what was reported since the last run
        outage = Outage(self._observers, "reporter")
        while True:
            await self._wait()
            self._work.clear()
            self._hurry.clear()
            started = time.monotonic()
            batch = self._take(started)
            try:
                if batch:
                    await self._write(batch)
                if started >= self._sweep_at:
                    await self.sweep()
            except psycopg.Error as error:
                self._work.set()
                if connection_lost(error) and not isinstance(error, AllInUse):
                    outage.lost(error)
                elif not outage.under_way and not self._refused:
                    self._refused = True
                    logger.warning("progress cannot be written for now: %s: %s", type(error).__name__, error)
                await outage.pause()
            else:
                self._refused = False
                outage.over()
            self._next = started + max(INTERVAL, len(batch) / RATE)
            self._soonest = started + max(SHORTEST, len(batch) / RATE)

    async def clear(self, seconds: float) -> None:
        """Once `run` has been cancelled: remove what it has written, in one short try."""
        with self._lock:
            for found in self._of.values():
                found.ended = True
            left = [found for found in self._of.values() if found.rows or found.number]
        with contextlib.suppress(psycopg.Error):
            for start in range(0, len(left), BATCH):
                await self._send(left[start : start + BATCH], seconds)

    async def sweep(self) -> None:
        """Remove what counts no more, of whatever process."""
        self._sweep_at = time.monotonic() + random.uniform(0.5, 1.5) * SWEEP_INTERVAL
        async with self._database.in_turn(), self._database.runtime(CALL_SECONDS) as conn:
            await self._store.sweep_progress(conn, limit=SWEPT)

    def _wake(self, urgent: bool) -> None:
        if threading.get_ident() == self._thread:
            self._set(urgent)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._set, urgent)

    def _set(self, urgent: bool) -> None:
        self._work.set()
        if urgent:
            self._hurry.set()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._sweep_at - time.monotonic())):
                await self._work.wait()
        await asyncio.sleep(max(0.0, self._soonest - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._next - time.monotonic())):
                await self._hurry.wait()

    def _take(self, now: float) -> list[_Reported]:
        """What is to be written now; what came too early for its job's turn makes another write."""
        batch: list[_Reported] = []
        with self._lock:
            for found in self._of.values():
                if not found.waits and not found.ended:
                    continue
                if len(batch) == BATCH or not (found.urgent or found.ended or now - found.written_at >= INTERVAL):
                    self._work.set()
                    continue
                batch.append(found)
                found.waits = found.urgent = False
                found.written_at = now
                if not found.ended:
                    found.number += 1
        return batch

    async def _write(self, batch: list[_Reported]) -> None:
        lines = [(found, found.number, found.ended) for found in batch]
        try:
            await self._send(batch, CALL_SECONDS)
        except BaseException as error:
            refused = str(getattr(error, "sqlstate", None))[:2] in REFUSED  # for what is in it: it would be so again
            with self._lock:
                for found, number, ended in lines:
                    if not ended:
                        found.rows.append(number)  # it may have been written all the same
                        found.waits = found.waits or not (refused or found.ended)
            raise
        with self._lock:
            for found, number, ended in lines:
                if ended:
                    self._of.pop((found.job.job_id, found.job.attempt), None)
                else:
                    found.rows = [number]
        if any(not ended for _, _, ended in lines):
            self._reported()

    async def _send(self, batch: list[_Reported], seconds: float) -> None:
        text = json.dumps([found.line() for found in batch])
        async with self._database.runtime(seconds) as conn:
            await self._store.report(conn, text)
