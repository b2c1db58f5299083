"""Records outcomes in batches of any mixture; what is written of each stands in pending.py.

At once when nothing is in flight, otherwise in the next batch, so a lone job waits for no company. While the database is away
a batch is repeated until it is taken: the fence makes that safe. One that is refused is halved until the culprit stands alone
and waits its turn apart; for its content it gets a minimal write. Nothing is dropped. Back-pressure: see `wait_room`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import psycopg

from .claimed import Claimed
from .database import Database
from .events import JobLost, JobRecorded, Observers
from .listen import Hints
from .outage import Outage
from .outcome import Failed, Outcome
from .pending import SPARED, Pending, encode, parts
from .store import LOCKED, Store
from .trip import Trip
from .unrecorded import look_up, passes, refuses_content

logger = logging.getLogger("aioqueue")

BATCH = 200
"""Jobs of one write at most."""
LOCKED_PAUSES = (0.005, 0.1)
"""Seconds until a job whose row somebody holds is tried again: at first (a claim that came to it first), doubling, at most."""
REFUSED_PAUSES = (0.5, 10.0)
"""Seconds until an outcome that was refused by itself is tried again: at first, doubling, at most; jittered."""
ENOUGH = 100
"""Jobs for which a second write begins while another is in flight; fewer wait for its end, but no longer than that:"""
COMPANY = 0.01
"""Seconds that outcomes wait for more of them at most."""
BATCH_CHARACTERS = 4_000_000
"""Characters of one write at most, a single outcome apart."""
SLOWEST = 500_000
"""Characters a second that a way to the database carries at least: a large outcome on a slow one is not cut off for ever."""


class Recorder:
    """The outcomes of one worker that are still to be written."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        *,
        capacity: int,
        hints: Hints,
        ready: Callable[[], None] | None = None,
        ended: Callable[[Claimed], None] | None = None,
    ) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._capacity = capacity
        self._hints = hints
        self._ready = ready
        self._ended = ended
        self._pending: dict[Pending, None] = {}
        """All that is not recorded yet, wherever it stands: in one of the next three, or in a write."""
        self._queue: deque[Pending] = deque()
        self._parts: deque[list[Pending]] = deque()
        """Batches that are to be written as they are: halves of one that was refused, and what waited apart."""
        self._held: dict[Pending, asyncio.TimerHandle] = {}
        """What waits its turn apart."""
        self._work = asyncio.Event()
        self._writing = 0
        self._enough = asyncio.Event()
        """Set when it is time for a write beside another."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def pending(self) -> int:
        """Outcomes not written yet."""
        return len(self._pending)

    @property
    def refused(self) -> int:
        """Outcomes that the database refuses each by itself; they are tried again."""
        return sum(pending.refusals > 0 for pending in self._pending)

    def jobs(self) -> list[Claimed]:
        """Jobs whose outcomes are not written yet."""
        return [pending.job for pending in self._pending]

    def put(self, job: Claimed, outcome: Outcome) -> None:
        """Take an outcome, also one that may have been written already. Never blocks, never fails."""
        pending = encode(job, outcome)
        self._pending[pending] = None
        self._queue.append(pending)
        self._work.set()
        if len(self._queue) >= ENOUGH:
            self._enough.set()
        self._idle.clear()
        if len(self._pending) >= self._capacity:
            self._room.clear()

    def recorded_by_commit(self, job: Claimed) -> None:
        """Take note of a success that its own commit recorded."""
        self._note(job, "succeeded")
        self._hints.hint("done")

    def recorded_by_guard(self, job: Claimed, state: str, outcome: Failed) -> None:
        """Take note of a time-out that the guard recorded."""
        self._note(job, state, encode(job, outcome))
        self._hints.hint("done")
        if state == "ready" and self._ready is not None:
            self._ready()

    async def wait_room(self) -> None:
        """Wait while more outcomes are pending than the database keeps up with."""
        await self._room.wait()

    async def wait_idle(self) -> None:
        """Wait until everything is written; what waits apart is tried at once."""
        self._retry_held()
        await self._idle.wait()

    async def run(self) -> None:
        """Write what is pending, for ever; several of these may run side by side."""
        while True:
            await self._work.wait()
            # One turn of the loop, so that jobs that ended together are written together.
            await asyncio.sleep(0)
            if self._writing and not self._parts and 0 < len(self._queue) < ENOUGH:
                self._enough.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMPANY):
                        await self._enough.wait()
            batch = self._take()
            if not batch:
                self._work.clear()
                continue
            self._writing += 1
            try:
                await self._write(batch)
            except Exception as error:
                self._set_apart([pending for pending in batch if pending in self._pending], error)
            except BaseException:
                # Cancelled: what the server did is not known, and is looked up at the next write.
                self._add_part([pending for pending in batch if pending in self._pending])
                raise
            finally:
                self._writing -= 1
                self._enough.set()
                self._update_events()
            del batch  # an idle worker keeps no results in memory

    def _update_events(self) -> None:
        _set_if(self._room, len(self._pending) < self._capacity)
        _set_if(self._idle, not self._pending)

    def _take(self) -> list[Pending]:
        if self._parts:
            return self._parts.popleft()
        batch: list[Pending] = []
        size = 0
        while self._queue and len(batch) < BATCH:
            pending = self._queue[0]
            size += len(pending.text)
            if batch and (size > BATCH_CHARACTERS or pending.job.worker != batch[0].job.worker):
                break
            batch.append(self._queue.popleft())
        return batch

    async def _write(self, batch: list[Pending]) -> None:
        """Write a batch, repeating it until the database is there; raise what else it says."""
        outage = Outage(self._observers, "recorder", shortest=0.05)
        outcomes, succeeded, results = parts(batch)
        seconds = self._database.settings.deadline + sum(len(pending.text) for pending in batch) / SLOWEST
        hint: Trip | None = None
        try:
            while True:
                try:
                    async with self._database.runtime(seconds) as conn:
                        hint = self._store.hint(conn, "done") if not self._database.pooler and self._hints.take("done") else None
                        states = await self._store.record(
                            conn, worker=batch[0].job.worker, outcomes=outcomes, succeeded=succeeded, results=results, hint=hint
                        )
                        if states is not None:
                            for pending in batch:
                                if pending.job.job_id not in states and (found := await look_up(self._store, conn, pending)):
                                    states[pending.job.job_id] = found
                    break
                except psycopg.Error as error:
                    if not passes(error):
                        raise
                    outage.lost(error)
                    await outage.pause()
        finally:
            if hint is None or not hint.was_sent:
                self._hints.hint("done")
        outage.over()
        if states is None and len(batch) > 1 and not self._observers.see_successes:
            for pending in batch:  # as _end() does: of a batch none was refused before, and nobody looks
                del self._pending[pending]
                if pending.job.keys and self._ended is not None:
                    self._ended(pending.job)
        else:
            for pending in batch:
                self._end(pending, "succeeded" if states is None else states.get(pending.job.job_id))
        if self._ready is not None and states is not None and "ready" in states.values():
            self._ready()  # handed back: nobody else says that there is work

    def _end(self, pending: Pending, state: str | None) -> None:
        job = pending.job
        if state == LOCKED:
            first, longest = LOCKED_PAUSES
            self._hold(pending, min(longest, first * 2 ** min(pending.waits, 10)))
            pending.waits += 1
            return
        del self._pending[pending]
        if state is None:
            self._observers.emit(JobLost.of(job))
        else:
            self._note(job, state, None if state == "succeeded" else pending)
        if pending.refusals:
            self._retry_held()  # what stood in the way may be gone for all

    def _note(self, job: Claimed, state: str, pending: Pending | None = None) -> None:
        if self._ended is not None:
            self._ended(job)
        if not (self._observers.see_successes if pending is None else self._observers.any):
            return
        event = JobRecorded.of(job, state, time.monotonic() - job.claimed_at)
        if pending is not None:
            spared = pending.reason in SPARED
            event = replace(
                event,
                error=pending.name,
                reason=pending.reason,
                failures=job.failures - spared,
                max_attempts=job.max_attempts,
                delay=pending.delay if state == "scheduled" else None,
            )
        self._observers.emit(event)

    def _set_apart(self, batch: list[Pending], error: Exception) -> None:
        """Halve what was refused until the culprit stands alone; it waits, so that its neighbours go on."""
        if len(batch) > 1:
            middle = len(batch) // 2
            self._add_part(batch[:middle])
            self._add_part(batch[middle:])
            return
        for pending in batch:
            if refuses_content(error) and not pending.minimal:
                pending.minimise(error)
                self._add_part([pending])
                continue
            if not pending.refusals:
                logger.warning(
                    "the outcome of job %s (%s) cannot be recorded and is tried again: %s: %s",
                    pending.job.job_id, pending.job.task, type(error).__name__, error,
                )  # fmt: skip
            first, longest = REFUSED_PAUSES
            self._hold(pending, min(longest, first * 2 ** min(pending.refusals, 10)) * (0.5 + random.random() / 2))
            pending.refusals += 1

    def _add_part(self, part: list[Pending]) -> None:
        if part:
            self._parts.append(part)
            self._work.set()

    def _hold(self, pending: Pending, seconds: float) -> None:
        self._held[pending] = asyncio.get_running_loop().call_later(seconds, self._retry, pending)

    def _retry(self, pending: Pending) -> None:
        self._held.pop(pending).cancel()
        if pending.refusals:
            self._add_part([pending])
        else:
            self._queue.append(pending)
            self._work.set()

    def _retry_held(self) -> None:
        for pending in list(self._held):
            self._retry(pending)


def _set_if(event: asyncio.Event, condition: bool) -> None:
    if condition:
        event.set()
    else:
        event.clear()
