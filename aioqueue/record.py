"""Records outcomes in batches of any mixture; the one `match` over outcomes stands here.

At once when nothing is in flight, otherwise in the next batch, so a lone job waits for no company. A batch is repeated until
the database takes it: the fence makes that safe. What the database refuses for its content is halved until the culprit
stands alone, and gets a minimal write. Back-pressure: the claimer asks `full`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from .database import Database, connection_lost
from .events import DatabaseLost, DatabaseRecovered, JobLost, JobRecorded, Observers
from .job import Claimed
from .outcome import Cancelled, ErrorText, Failed, Outcome, Reason, Released, Snoozed, Succeeded
from .store import LOCKED, REFUSED, Store

BATCH = 200
"""Jobs of one write at most."""
LOCKED_PAUSE = 0.1
"""Seconds until such a job is tried again."""
BATCH_CHARACTERS = 4_000_000
"""Characters of one write at most, a single outcome apart."""


@dataclass(slots=True)
class Pending:
    """One outcome on its way; `name` is what stands in events."""

    job: Claimed
    text: str
    name: str
    minimal: bool = False
    succeeded: bool = False


def encode(job: Claimed, outcome: Outcome) -> Pending:
    """Turn an outcome into the JSON that sql/functions/record.sql reads."""
    facts: dict[str, Any]
    match outcome:
        case Succeeded(result):
            return Pending(job, f'{_fence(job)},"o":"succeeded","r":{result}}}', "succeeded", succeeded=True)
        case Failed(reason, error, delay):
            facts = {"o": reason, "d": delay, "t": error.type, "m": error.message, "b": error.traceback}
            name = f"{error.type}: {error.message}"
        case Cancelled(message):
            facts = {"o": Reason.CANCELLED, "d": None, "m": message}
            name = message
        case Snoozed(delay):
            facts = {"o": Reason.SNOOZED, "d": delay, "s": True}
            name = "snoozed"
        case Released(reason, message, delay):
            facts = {"o": reason, "d": delay, "s": True, "m": message}
            if reason is Reason.UNKNOWN_TASK:
                facts["u"] = job.task
            name = message
    return Pending(job, f"{_fence(job)},{json.dumps(facts)[1:]}", name)


def _fence(job: Claimed) -> str:
    return f'{{"j":"{job.job_id}","l":{job.lane},"v":{job.vt},"a":{job.attempt}'


def _minimal(pending: Pending, refused: psycopg.Error) -> Pending:
    """Return the smallest outcome that still says why: the one the database cannot refuse for its content."""
    error = ErrorText("OutcomeRefused", f"the outcome could not be stored ({refused.sqlstate})")
    small = encode(pending.job, Failed(Reason.INVALID_RESULT, error, None))
    small.minimal = True
    return small


class Recorder:
    """The outcomes of one worker that are still to be written."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        *,
        capacity: int,
        recorded: Callable[[], None],
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._capacity = capacity
        self._recorded = recorded
        self._ready = ready
        self._queue: deque[Pending] = deque()
        self._in_flight = 0
        self._held: set[UUID] = set()
        self._writing: set[UUID] = set()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def pending(self) -> int:
        """Outcomes not written yet."""
        return len(self._queue) + self._in_flight + len(self._held)

    def jobs(self) -> list[UUID]:
        """Jobs whose outcomes are not written yet."""
        return [*(p.job.job_id for p in self._queue), *self._writing, *self._held]

    def put(self, job: Claimed, outcome: Outcome) -> None:
        """Take an outcome. Never blocks, never fails."""
        self._queue.append(encode(job, outcome))
        self._idle.clear()
        self._work.set()
        if self.pending >= self._capacity:
            self._room.clear()

    def settled(self, job: Claimed) -> None:
        """Take note of a success that its own commit recorded."""
        seconds = time.monotonic() - job.claimed_at
        self._observers.emit(JobRecorded(job.job_id, job.task, job.tenant, job.attempt, "succeeded", seconds))
        self._recorded()

    async def wait_room(self) -> None:
        """Wait while more outcomes are pending than the database keeps up with."""
        await self._room.wait()

    async def wait_idle(self) -> None:
        """Wait until everything is written."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write what is pending, for ever; several of these may run side by side."""
        while True:
            await self._work.wait()
            # One turn of the loop, so that jobs that ended together are written together.
            await asyncio.sleep(0)
            batch = self._take()
            if not batch:
                self._work.clear()
                continue
            try:
                await self._write(batch)
            except BaseException:
                self._queue.extendleft(reversed(batch))
                raise
            finally:
                self._in_flight -= len(batch)
                self._writing.difference_update(p.job.job_id for p in batch)
            self._settle()

    def _settle(self) -> None:
        if self.pending < self._capacity:
            self._room.set()
        if not self.pending:
            self._idle.set()

    def _take(self) -> list[Pending]:
        batch: list[Pending] = []
        size = 0
        while self._queue and len(batch) < BATCH:
            pending = self._queue[0]
            size += len(pending.text)
            if batch and (size > BATCH_CHARACTERS or pending.job.worker != batch[0].job.worker):
                break
            batch.append(self._queue.popleft())
        self._in_flight += len(batch)
        self._writing.update(p.job.job_id for p in batch)
        return batch

    async def _write(self, batch: list[Pending]) -> None:
        """Write a batch, repeating it until it is written; halve it where its content is refused."""
        lost_since: float | None = None
        pause = 0.05
        repeated = False
        while True:
            try:
                async with self._database.runtime() as conn:
                    states = await self._store.record(
                        conn, worker=batch[0].job.worker, outcomes=f"[{','.join(p.text for p in batch)}]"
                    )
                    if repeated:
                        states = {**states, **await self._read_back(conn, [p for p in batch if p.job.job_id not in states])}
            except psycopg.Error as error:
                state = error.sqlstate or ""
                if state[:2] in REFUSED or isinstance(error, psycopg.DataError):
                    await self._write_apart(batch, error)
                    return
                if lost_since is None:
                    lost_since = time.monotonic()
                    self._observers.emit(DatabaseLost("recorder", str(error)))
                repeated = repeated or connection_lost(error)
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(pause * 2, 2.0)
            else:
                break
        if lost_since is not None:
            self._observers.emit(DatabaseRecovered("recorder", time.monotonic() - lost_since))
        now = time.monotonic()
        for pending in batch:
            job = pending.job
            recorded = states.get(job.job_id)
            if recorded == LOCKED:
                self._again(pending)
            elif recorded is not None:
                failed = None if recorded == "succeeded" else pending.name
                self._observers.emit(
                    JobRecorded(job.job_id, job.task, job.tenant, job.attempt, recorded, now - job.claimed_at, failed)
                )
            elif not repeated or pending.succeeded:
                # After a lost answer, no row may also mean: written the first time. A success was looked up.
                self._lost(job)
        self._recorded()
        if self._ready is not None and "ready" in states.values():
            self._ready()  # handed back: nobody else says that there is work

    async def _read_back(self, conn: AsyncConnection[Any], batch: list[Pending]) -> dict[UUID, str]:
        """Look up which successes of a repeated batch were written the first time."""
        found = {p.job.job_id: await self._store.read_back(conn, p.job) for p in batch if p.succeeded}
        return {job_id: state for job_id, state in found.items() if state == "succeeded"}

    def _again(self, pending: Pending) -> None:
        """Somebody holds the job's row, such as a cancel in an open transaction: in a moment once more."""
        self._held.add(pending.job.job_id)
        asyncio.get_running_loop().call_later(LOCKED_PAUSE, self._put_again, pending)

    def _put_again(self, pending: Pending) -> None:
        self._held.discard(pending.job.job_id)
        self._queue.append(pending)
        self._work.set()

    async def _write_apart(self, batch: list[Pending], error: psycopg.Error) -> None:
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._write(batch[:middle])
            await self._write(batch[middle:])
        elif not batch[0].minimal:
            await self._write([_minimal(batch[0], error)])
        else:
            self._lost(batch[0].job)

    def _lost(self, job: Claimed) -> None:
        self._observers.emit(JobLost(job.job_id, job.task, job.attempt))
