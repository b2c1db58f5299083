"""Where claimed jobs run, as the claimer and the worker's stop see it: how much room there is, what is busy, what is known.

Jobs beyond the slots wait here for a moment: no more than will start soon, by the rate at which short ones have ended; what does
not is handed back. Otherwise it holds no jobs: the runner has those that run, recorder and guard those still to be written.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections import deque
from collections.abc import Callable

from .claimed import Claimed, Fence
from .guard import Guard
from .outcome import Outcome, Reason, Released
from .record import Recorder
from .run import Runner
from .unpark import Unparker

AHEAD = 0.05
"""Seconds that a job waits for a slot at the rate of late; it takes about as long to claim the next ones on a busy machine."""
WINDOW = 0.05
"""Seconds at least over which the rate is taken."""
SHORT = 0.25
"""Seconds from claim to end in which a job counts for that rate: longer ones may end together, as they began, without others
soon after, and what was claimed for a slot would wait for as long as one of them takes."""
LATE = 1.0
"""Seconds after which a job that still waits is handed back: those that run take longer than the ones before."""


class Slots:
    """The slots of one worker."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.runner: Runner
        self.recorder: Recorder
        self.unparker: Unparker
        self.guard: Guard
        self._waiting: deque[Claimed] = deque()
        self._late: asyncio.TimerHandle | None = None
        self._starts_soon = False
        self._freed = asyncio.Event()
        self._ends = 0
        """Short jobs that have ended since `_since`."""
        self._quick_ends = 0
        """Those of them that took no longer than AHEAD: what is claimed in their place starts as soon."""
        self._rate, self._since = 0.0, time.monotonic()
        # A job that is started at the end of another has none of its context.
        self._context = contextvars.copy_context()
        self.empty = asyncio.Event()
        self.empty.set()
        """Set while nothing runs or waits, abandoned jobs apart."""

    @property
    def room(self) -> int:
        """Jobs that could be claimed now: for the free slots, and for those that will be free soon.

        Where more quick ones have ended since the last rate than it says for AHEAD, it is higher by now: a worker begins fast.
        """
        now = time.monotonic()
        if now - self._since > WINDOW:
            self._rate, self._since = self._ends / (now - self._since), now
            self._ends = self._quick_ends = 0
        soon = max(int(self._rate * AHEAD), self._quick_ends)
        return max(0, self.concurrency + soon - len(self.runner.runs) - len(self._waiting))

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Jobs that run, those apart that were given up on."""
        return len(self.runner.runs) - self.runner.given_up

    def longest_left(self) -> float:
        """Seconds until the last of the busy ones is at its time limit; one whose user code has not begun counts in full."""
        now = time.monotonic()
        runs = [run for run in self.runner.runs.values() if not run.abandoned]
        return max((run.limit if run.ends is None else run.ends - now for run in runs), default=0.0)

    async def wait_for_room(self) -> None:
        """Wait until one could be claimed."""
        while not self.room:
            await self.wait_freed()

    async def wait_freed(self) -> None:
        """Wait until a run is over."""
        self._freed.clear()
        await self._freed.wait()

    def start(self, job: Claimed) -> None:
        """Start a claimed job, as soon as there is a slot."""
        self.empty.clear()
        if self._waiting or len(self.runner.runs) >= self.concurrency:
            self._waiting.append(job)
            if self._late is None:
                self._watch(LATE)
        else:
            self.runner.start(job)

    def freed(self, job: Claimed | None = None) -> None:
        """The run of `job` is over, or one was given up on."""
        took = math.inf if job is None else time.monotonic() - job.claimed_at
        self._ends += took <= SHORT
        self._quick_ends += took <= AHEAD
        self._freed.set()
        if self._waiting:
            if not self._starts_soon:
                self._starts_soon = True
                asyncio.get_running_loop().call_soon(self._start_waiting, context=self._context)
        elif len(self.runner.runs) <= self.runner.given_up:
            self.empty.set()

    def _start_waiting(self) -> None:
        self._starts_soon = False
        while self._waiting and len(self.runner.runs) < self.concurrency:
            self.runner.start(self._waiting.popleft())

    def _watch(self, seconds: float) -> None:
        self._late = asyncio.get_running_loop().call_later(seconds, self._hand_back_late, context=self._context)

    def _hand_back_late(self) -> None:
        """Hand back what has waited too long; the first has waited longest."""
        self._late = None
        oldest = time.monotonic() - LATE
        self.give_up(Released(Reason.INTERRUPTED, "its worker had no slot for it"), lambda job: job.claimed_at <= oldest)
        if self._waiting:
            self._watch(max(0.01, self._waiting[0].claimed_at - oldest))

    def give_up(self, outcome: Outcome, which: Callable[[Claimed], bool] = lambda _: True) -> None:
        """End those of the jobs that still wait for a slot without starting them."""
        waiting = list(self._waiting)
        self._waiting.clear()
        for job in waiting:
            if which(job):
                self.recorder.put(job, outcome)
            else:
                self._waiting.append(job)
        if not self._waiting and not self.busy:
            self.empty.set()

    def known(self) -> set[Fence]:
        """Every claim of this process that is not recorded yet."""
        running = [run.job for run in self.runner.runs.values()]
        return {job.fence for job in (*running, *self._waiting, *self.recorder.jobs(), *self.guard.jobs())}
