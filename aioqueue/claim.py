"""Decides when to claim, and how many: free slots and a wake-up (or the poll) → one claim of a batch → one run per job.

A claim itself is made in one_claim.py. While there is a backlog two claims are in flight, so that the jobs
of one run while the other waits for its answer. It records nothing and knows nothing of user code.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from .claimed import Claimed
from .database import Database
from .floor import Floors
from .lanes import Lanes
from .one_claim import Lease, OneClaim
from .settings import WorkerSettings
from .store import Claims, LaneScan
from .suspect import SuspectTurn

GATHER = 0.01
"""Seconds to wait for more free slots while there is a backlog: a claim of one costs as much as a claim of fifty."""
LOOK_AGAIN = 1.0
"""Seconds between looks for what a claim without an answer took, and for a suspect that another took, at most."""


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


class Claimer:
    """The claiming loop of one worker."""

    def __init__(
        self,
        database: Database,
        one_claim: OneClaim,
        *,
        settings: WorkerSettings,
        lanes: Lanes,
        floors: Floors,
        lease: Lease,
        slots: Slots,
        wait_room: Callable[[], Awaitable[None]],
    ) -> None:
        self._database = database
        self._one_claim = one_claim
        self._settings = settings
        self._lanes = lanes
        self._floors = floors
        self._lease = lease
        self._slots = slots
        self._wait_room = wait_room
        self._wake_up = asyncio.Event()
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
            if self._one_claim.unanswered is not None:
                self._backlog.clear()
                await self._second_over.wait()  # or what it is about to be told of would be taken for unknown
                await self._one_claim.hand_back_unknown()
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
        seconds = self._settings.poll if self._one_claim.unanswered is None else min(LOOK_AGAIN, self._settings.poll)
        return await _wait_at_most(self._wake_up, seconds)

    async def run_second(self) -> None:
        """Claim too while there is a backlog, for ever."""
        while True:
            await self._backlog.wait()
            await self._wait_room()
            await self._lease.wait_proven()
            alone = (
                self._no_more or self._floors.suspect_ready or self._database.waiting or self._one_claim.unanswered is not None
            )
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
        """Claim up to `limit` jobs; see `OneClaim.make`. The slots that they may take are reserved until the answer is there."""
        self._reserved += limit
        try:
            return await self._one_claim.make(limit, scans)
        finally:
            self._reserved -= limit


async def _wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; whether it came."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
