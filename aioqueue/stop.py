"""The stop of a worker: what begins it, and its order. Claims first, then jobs, then outcomes; the heartbeat goes last.

Every step has a limit of its own, so that it ends whatever jobs, network and database do. worker.py ends the loops.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from .attempt import Cause
from .claim import Claimer
from .events import Observers, WorkerStopping
from .outcome import Reason, Released
from .settings import LimitSettings
from .slots import Slots

LAST_WRITES = 5.0
"""Seconds a stopping worker waits for commits and outcomes that the database does not take."""
LAST_WORD = 1.0
"""Seconds that its other last statements may take, each."""


class Stop:
    """When one worker stops, and how."""

    def __init__(
        self,
        slots: Slots,
        claimer: Claimer,
        observers: Observers,
        *,
        limits: LimitSettings,
        grace: float,
        drain: bool,
        worker: Callable[[], int],
        hand_back_unknown: Callable[[float], Awaitable[None]],
    ) -> None:
        self._slots = slots
        self._claimer = claimer
        self._observers = observers
        self._limits = limits
        self._grace = grace
        self._drain = drain
        self._worker = worker
        self._hand_back_unknown = hand_back_unknown
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._gave_up = asyncio.Event()
        self.unwritten = 0
        """Outcomes that the database did not take in time; others run these jobs again."""

    @property
    def begun(self) -> bool:
        """Whether the worker stops."""
        return self._asked.is_set()

    def ask(self, *, hurry: bool = False) -> None:
        """Drain for the grace period; `hurry` ends what runs now and hands it back, spared."""
        self._asked.set()
        if hurry:
            self._hurry.set()

    def claim_no_more(self) -> None:
        """Finish what runs and claim nothing else: there is a job that cannot be ended."""
        self._claimer.claim_no_more()
        self._gave_up.set()

    async def wait(self) -> None:
        """Wait until it is time: asked for, or (when draining) nothing is ready and nothing runs."""
        await _first_of(self._asked.wait(), *([self._wait_drained()] if self._drain else []))

    async def carry_out(self, claims: Sequence[asyncio.Task[None]]) -> bool:
        """End the claims, let the jobs end, end those that do not, write what became of them; whether all was written."""
        self._asked.set()
        for task in claims:
            task.cancel()
        await asyncio.wait(claims)
        self._slots.give_up(Released(Reason.INTERRUPTED, "its worker stopped"))
        await self._hand_back_unknown(LAST_WORD)
        self._observers.emit(WorkerStopping(self._worker(), len(self._slots.runner.runs), self._grace))
        await self._wait_empty(self._grace, self._hurry.wait())
        if self._slots.busy:
            runner = self._slots.runner
            runner.stop_all(Cause.INTERRUPTED)
            await self._wait_empty(LAST_WRITES)
            # User code has the abandon limit; what only waits for the database does not.
            if any(run.in_user_code for run in runner.runs.values()):
                await self._wait_empty(max(0.0, self._limits.abandon + 1.0 - LAST_WRITES))
        try:
            async with asyncio.timeout(LAST_WRITES):
                await self._slots.guard.wait_written()
                await self._slots.recorder.wait_idle()
        except TimeoutError:
            self.unwritten = self._slots.recorder.pending + len(self._slots.guard.jobs())
            return False
        with contextlib.suppress(TimeoutError):  # otherwise another worker sweeps
            async with asyncio.timeout(LAST_WORD):
                await self._slots.unparker.wait_idle()
        return True

    async def _wait_drained(self) -> None:
        while True:
            await self._slots.empty.wait()
            await self._slots.recorder.wait_idle()
            await self._slots.unparker.wait_idle()
            unparked = self._slots.unparker.begun
            # What ran may have enqueued more. The claim that is under way now may be too old to see it, the next is not.
            for _ in range(2):
                self._claimer.found_nothing.clear()
                self._claimer.wake()
                await _first_of(self._claimer.found_nothing.wait(), self._gave_up.wait())
            if not self._slots.busy and not self._slots.recorder.pending and self._slots.unparker.begun == unparked:
                return

    async def _wait_empty(self, seconds: float, *unless: Coroutine[Any, Any, Any]) -> None:
        """Wait until nothing runs, at most so long, or until one of the others is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _first_of(self._slots.empty.wait(), *unless)


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until the first of them is over, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
