"""Where claimed jobs run, as the claimer and the worker's stop see it: how many are free, how many busy, what is known.

Holds no jobs of its own: the runner has those that run, recorder and guard those whose outcomes are still to be written.
"""

from __future__ import annotations

import asyncio
import time

from .guard import Guard
from .job import Claimed, Fence
from .record import Recorder
from .run import Runner
from .unpark import Unparker


class Slots:
    """The slots of one worker."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.runner: Runner
        self.recorder: Recorder
        self.unparker: Unparker
        self.guard: Guard
        self._freed = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()
        """Set while nothing runs, abandoned jobs apart."""

    @property
    def free(self) -> int:
        """Jobs that could be started now."""
        return max(0, self.concurrency - len(self.runner.runs))

    @property
    def busy(self) -> int:
        """Jobs that run, those apart that were given up on."""
        return len(self.runner.runs) - self.runner.given_up

    def longest_left(self) -> float:
        """Seconds until the last of the busy ones is at its time limit; one whose user code has not begun counts in full."""
        now = time.monotonic()
        runs = [run for run in self.runner.runs.values() if not run.abandoned]
        return max((run.limit if run.ends is None else run.ends - now for run in runs), default=0.0)

    async def wait_free(self) -> None:
        """Wait until one could be started."""
        while not self.free:
            self._freed.clear()
            await self._freed.wait()

    async def wait_freed(self) -> None:
        """Wait until a run is over."""
        self._freed.clear()
        await self._freed.wait()

    def start(self, job: Claimed) -> None:
        """Start a claimed job."""
        self.empty.clear()
        self.runner.start(job)

    def freed(self) -> None:
        """A run is over, or was given up on."""
        self._freed.set()
        if not self.busy:
            self.empty.set()

    def known(self) -> set[Fence]:
        """Every claim of this process that is not recorded yet."""
        running = [run.job for run in self.runner.runs.values()]
        return {job.fence for job in (*running, *self.recorder.jobs(), *self.guard.jobs())}
