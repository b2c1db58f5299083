"""Makes one claim, through an outage if there is one; its answer goes to floors, observers and who waits for it.

Also sees to a claim without an answer: what it may have taken is looked up, and handed back. When to claim, and how
many jobs, is decided in claim.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from .store import WORKER_DEAD, Claims, LaneScan, Store

UNANSWERED = 15.0
"""Seconds after a claim without an answer in which the server may still be committing it (its statement_timeout is 5 s)."""


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


class OneClaim:
    """Makes the claims of one worker, one at each call."""

    def __init__(
        self,
        database: Database,
        store: Store,
        observers: Observers,
        *,
        lanes: Lanes,
        floors: Floors,
        lease: Lease,
        known: Callable[[], set[Fence]],
        put: Callable[[Claimed, Outcome], None],
        claimed: Callable[[], None],
        passed: Callable[[Mapping[int, int]], None],
    ) -> None:
        """`known`: every claim of this process that is not recorded yet."""
        self._database = database
        self._store = store
        self._observers = observers
        self._lanes = lanes
        self._floors = floors
        self._lease = lease
        self._known = known
        self._put = put
        self._claimed = claimed
        self._passed = passed
        self.unanswered: float | None = None
        """When, by the monotonic clock, the server cannot commit a claim without an answer any more; None: there is none."""

    async def make(self, limit: int, scans: Sequence[LaneScan] | None) -> Claims:
        """Claim up to `limit` jobs (of the given lanes; None: all but the suspects'), waiting out an outage."""
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
                    self.unanswered = time.monotonic() + UNANSWERED  # an error that the server answers took nothing
                outage.lost(error)
                await outage.pause()
                await self._lease.wait_proven()
            except BaseException:
                # The worker stops (or this is a bug); what the server did is not known.
                self.unanswered = time.monotonic() + UNANSWERED
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
        if self.unanswered is None:
            return
        last_look = time.monotonic() > self.unanswered
        # Before and after: what is claimed and what is recorded during the look are both no secret.
        known = self._known()
        try:
            async with self._database.runtime(seconds) as conn:
                # All that this worker runs: of a job that was given up on, an earlier attempt is known and this one perhaps not.
                jobs = await self._store.unknown_claims(conn, worker=self._lease.worker)
        except psycopg.Error:
            return
        known |= self._known()
        for job in jobs:
            if job.fence not in known:
                self._put(job, Released(Reason.INTERRUPTED, "the answer to its claim was lost"))
        if last_look:
            self.unanswered = None
