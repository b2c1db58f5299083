"""Asks for work: free slots and a wake-up (or the poll) → one claim of a batch → one run per job.

Owns the moment to ask. While there is a backlog two claims are in flight, so that the jobs of one run while the other waits
for its answer. It records nothing and knows nothing of user code; what a claim without an answer may have taken, it looks up
and hands back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import psycopg

from .claimed import Claimed, Fence
from .database import Database
from .events import JobClaimed, Observers
from .floor import Floors
from .lanes import Lanes
from .outage import Outage
from .outcome import Outcome, Reason, Released
from .server import connection_lost
from .settings import WorkerSettings
from .store import WORKER_DEAD, Claims, LaneScan, Store
from .suspect import SuspectTurn

GATHER = 0.01
"""Seconds to wait for more free slots while there is a backlog: a claim of one costs as much as a claim of fifty."""
UNANSWERED = 15.0
"""Seconds after a claim without an answer in which the server may still be committing it (its statement_timeout is 5 s)."""
LOOK_AGAIN = 1.0
"""Seconds between looks for what such a claim took, and for a suspect that another took, at most."""


class Lease(Protocol):
    """The worker's right to claim."""

    @property
    def worker(self) -> int:
        """Its identity."""
        ...

    async def wait_proven(self) -> None:
        """Wait while the lease is in doubt."""
        ...

    def refused(self, worker: int) -> None:
        """The database says that this worker is dead."""
        ...


class Slots(Protocol):
    """Where claimed jobs run."""

    @property
    def room(self) -> int:
        """Jobs that could be claimed now."""
        ...

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot."""
        ...

    @property
    def busy(self) -> int:
        """Jobs that run, those apart that were given up on."""
        ...

    @property
    def empty(self) -> asyncio.Event:
        """Set while none does."""
        ...

    def longest_left(self) -> float:
        """Seconds until the last of them is at its time limit."""
        ...

    async def wait_for_room(self) -> None:
        """Wait until one could be claimed."""
        ...

    async def wait_freed(self) -> None:
        """Wait until a run is over."""
        ...

    def start(self, job: Claimed) -> None:
        """Start it, as soon as there is a slot."""
        ...

    def known(self) -> set[Fence]:
        """Every claim of this process that is not recorded yet."""
        ...


class Claimer:
    """The claiming loop of one worker."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        *,
        settings: WorkerSettings,
        lanes: Lanes,
        floors: Floors,
        lease: Lease,
        slots: Slots,
        wait_room: Callable[[], Awaitable[None]],
        put: Callable[[Claimed, Outcome], None],
        claimed: Callable[[], None],
        passed: Callable[[Mapping[int, int]], None],
    ) -> None:
        self._database = database
        self._store = store
        self._observers = observers
        self._settings = settings
        self._lanes = lanes
        self._floors = floors
        self._lease = lease
        self._slots = slots
        self._wait_room = wait_room
        self._put = put
        self._claimed = claimed
        self._passed = passed
        self._wake_up = asyncio.Event()
        self._unanswered: float | None = None
        self._suspect = SuspectTurn()
        self._no_more = False
        self._reserved = 0
        """Slots that claims in flight have asked jobs for."""
        self._backlog = asyncio.Event()
        """Set while there is work for a second claim."""
        self._second_over = asyncio.Event()
        """Cleared while the second claim is in flight."""
        self._second_over.set()
        self.turned = time.monotonic()
        """When the loop last came round, by the monotonic clock."""
        self.waits_for_slots = False
        """Whether it stands still because every slot is taken."""
        self.found_nothing = asyncio.Event()
        """Set by each look that found nothing ready (when draining: no suspect either), cleared by each that found something."""

    def wake(self) -> None:
        """There may be work: look soon."""
        self._wake_up.set()

    def claim_no_more(self) -> None:
        """Go on only with what was claimed already."""
        self._no_more = True

    async def run(self) -> None:
        """Claim and start jobs, for ever."""
        backlog = True
        while True:
            self.turned = time.monotonic()
            asked = backlog or await self._woken()
            self._wake_up.clear()
            self.waits_for_slots = True
            await self._slots.wait_for_room()
            self.waits_for_slots = False
            self.turned = time.monotonic()
            await self._wait_room()
            await self._lease.wait_proven()
            if self._unanswered is not None:
                self._backlog.clear()
                await self._second_over.wait()  # or what it is about to be told of would be taken for unknown
                await self.hand_back_unknown()
            if self._no_more:
                backlog = False
                continue
            if self._floors.suspect_ready:
                if await self._see_to_suspect():
                    backlog = True
                    continue
            else:
                self._suspect.reset()
            if backlog and self._room < self._enough:
                await asyncio.sleep(GATHER)
            limit = min(self._room, self._most if self._backlog.is_set() else self._settings.claim_batch)
            # What would wait for a connection for long is left to others, and a look taken again soon.
            limit = self._bounded(limit)
            if limit <= 0:
                await asyncio.sleep(GATHER)
                backlog = True
                continue
            async with self._database.in_turn(asked=asked):
                claims = await self._claim(limit)
            # Who drains looks on until there is nothing: the wake-up that asks for that look may have come before this one.
            backlog = self._start(claims) == limit or claims.more or (self._settings.drain and bool(claims.jobs))
            if backlog:
                self._backlog.set()
            if claims.jobs or claims.more or claims.passed:
                continue
            self._backlog.clear()
            if not self._second_over.is_set():
                await self._second_over.wait()
                backlog = True  # only both together can find nothing
            elif self._settings.drain and self._slots.empty.is_set() and await self._run_suspect():
                backlog = True
            else:
                self.found_nothing.set()

    async def _woken(self) -> bool:
        """Wait to be woken, for a poll at most; whether it was."""
        seconds = self._settings.poll if self._unanswered is None else min(LOOK_AGAIN, self._settings.poll)
        return await _wait_at_most(self._wake_up, seconds)

    async def run_second(self) -> None:
        """Claim too while there is a backlog, for ever."""
        while True:
            await self._backlog.wait()
            await self._wait_room()
            await self._lease.wait_proven()
            alone = self._no_more or self._floors.suspect_ready or self._database.waiting or self._unanswered is not None
            if alone or not self._backlog.is_set():
                self._backlog.clear()
                continue
            if self._room < max(1, self._enough):
                await self._slots.wait_freed()
                continue
            self._second_over.clear()
            try:
                limit = self._bounded(min(self._room, self._most))
                if limit <= 0 or self._start(await self._claim(limit)) < limit:
                    self._backlog.clear()
            finally:
                self._second_over.set()

    @property
    def _room(self) -> int:
        return self._slots.room - self._reserved

    @property
    def _enough(self) -> int:
        """Room that is worth a claim while there is a backlog."""
        return min(self._settings.claim_batch, self._settings.concurrency) // 4

    def _bounded(self, limit: int) -> int:
        return self._database.bounded(limit, busy=self._slots.busy, coming=self._reserved + self._slots.waiting)

    @property
    def _most(self) -> int:
        """Jobs of one claim at most while there is a backlog: half of the room is the other claim's."""
        return min(self._settings.claim_batch, -(-max(self._settings.concurrency, self._slots.room) // 2))

    def _start(self, claims: Claims) -> int:
        """Start what was claimed; the number of jobs."""
        for job in claims.jobs:
            self._slots.start(job)
        if claims.jobs or claims.more or claims.passed:
            self.found_nothing.clear()
        return len(claims.jobs)

    async def _see_to_suspect(self) -> bool:
        """Run the suspect that is ready, or make room for it; False: not now, go on with other work."""
        if self._slots.empty.is_set():
            return await self._run_suspect()
        seconds = self._suspect.seconds(
            time.monotonic(),
            busy=self._slots.busy / self._settings.concurrency,
            longest=self._slots.longest_left(),
        )
        if seconds:
            # Look again in a moment, since an idle worker may take it meanwhile.
            await _wait_at_most(self._slots.empty, min(seconds, self._settings.poll, LOOK_AGAIN))
        return seconds > 0.0

    async def _run_suspect(self) -> bool:
        """Claim one suspect and run it with nothing beside it, from the first to the last; whether there was one."""
        self._backlog.clear()
        await self._second_over.wait()
        if not self._slots.empty.is_set():
            return False
        self._suspect.reset()
        self._floors.suspect_ready = False
        jobs = (await self._claim(1, [LaneScan(line, self._floors[line].start, 1) for line in self._lanes.suspects()])).jobs
        for job in jobs:
            self.found_nothing.clear()
            self._slots.start(job)
            self.waits_for_slots = True
            await self._slots.empty.wait()
            self.waits_for_slots = False
        return bool(jobs)

    async def _claim(self, limit: int, scans: Sequence[LaneScan] | None = None) -> Claims:
        """Claim up to `limit` jobs (of the given lanes; default: all but the suspects'), waiting out an outage."""
        self._reserved += limit
        try:
            return await self._claim_reserved(limit, scans)
        finally:
            self._reserved -= limit

    async def _claim_reserved(self, limit: int, scans: Sequence[LaneScan] | None) -> Claims:
        outage = Outage(self._observers, "claimer")
        while True:
            worker = self._lease.worker
            try:
                async with self._database.runtime() as conn:
                    lanes = self._lanes.scans(self._floors, limit) if scans is None else scans
                    losses = self._database.losses
                    floors = self._floors.held.text(losses)
                    claims = await self._store.claim(conn, worker=worker, lanes=lanes, limit=limit, key_floors=floors)
                break
            except psycopg.Error as error:
                if error.sqlstate == WORKER_DEAD:
                    self._lease.refused(worker)
                    return Claims()
                if connection_lost(error):
                    self._unanswered = time.monotonic() + UNANSWERED  # an error that the server answers took nothing
                outage.lost(error)
                await outage.pause()
                await self._lease.wait_proven()
            except BaseException:
                # The worker stops (or this is a bug); what the server did is not known.
                self._unanswered = time.monotonic() + UNANSWERED
                raise
        outage.over()
        highest: dict[int, int] = {}
        for job in claims.jobs:
            if job.vt > highest.get(job.lane, -1):
                highest[job.lane] = job.vt
        for lane_number, vt in highest.items():
            self._floors.claimed(lane_number, vt, len(claims.jobs))
        if self._observers.see_successes:
            for job in claims.jobs:
                self._observers.emit(JobClaimed.of(job))
        for lane_number, (parked, vt) in claims.parked.items():
            self._floors.claimed(lane_number, vt, parked)  # virtual time has come past them, or no floor would
            self._floors.parked_at = time.monotonic()
        self._floors.held.learn(claims.key_floors, losses)
        if claims.passed:
            self._passed(claims.passed)
        if claims.jobs or claims.parked:
            self._claimed()
        return claims

    async def hand_back_unknown(self, seconds: float | None = None) -> None:
        """Hand back what a claim without an answer took, within so many seconds; until the server cannot commit it any more."""
        if self._unanswered is None:
            return
        last_look = time.monotonic() > self._unanswered
        # Before and after: what is claimed and what is recorded during the look are both no secret.
        known = self._slots.known()
        try:
            async with self._database.runtime(seconds) as conn:
                # All that this worker runs: of a job that was given up on, an earlier attempt is known and this one perhaps not.
                jobs = await self._store.unknown_claims(conn, worker=self._lease.worker)
        except psycopg.Error:
            return
        known |= self._slots.known()
        for job in jobs:
            if job.fence not in known:
                self._put(job, Released(Reason.INTERRUPTED, "the answer to its claim was lost"))
        if last_look:
            self._unanswered = None


async def _wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
