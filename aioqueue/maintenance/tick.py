"""One tick: virtual times out and in, the snapshot, the floors' questions and answers, and what else a worker must know.

Order is everything here (sql/functions/tick.sql, floor.py): answers belong to the question asked before, then the new
virtual times and the snapshot are observed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from aioqueue.database import Database
from aioqueue.floor import Floors
from aioqueue.maintenance_store import UNIX_EPOCH, LaneQuestion, Tick
from aioqueue.store import Store

MARGIN = timedelta(seconds=1)
"""The floor of scheduled stays this far behind the clock, which may be set back a little."""
FULL_LOOK = 30.0
"""Seconds between looks below the floors: the net under a rule that is exact."""
ANY = 2**62
"""Above every virtual time."""
FULL_LOOK_SHARE = 100
"""A full look that took t seconds is not repeated before this many times t."""


def _microseconds(moment: datetime) -> int:
    return (moment - UNIX_EPOCH) // timedelta(microseconds=1)


class Ticker:
    """Ticks of one worker."""

    def __init__(
        self,
        database: Database,
        store: Store,
        floors: Floors,
        *,
        worker: Callable[[], int],
        restarted: Callable[[], None],
    ) -> None:
        self._database = database
        self._store = store
        self._floors = floors
        self._worker = worker
        self._restarted = restarted
        self._server: tuple[str, datetime] | None = None
        self._losses = 0
        self._clock = UNIX_EPOCH
        self._next_full_look = time.monotonic() + FULL_LOOK

    def due_from(self) -> datetime:
        """Where the scan of scheduled begins."""
        return UNIX_EPOCH + timedelta(microseconds=self._floors.due.value)

    async def tick(self) -> Tick:
        """Read the clocks and move the floors. Raises psycopg.Error."""
        began = time.monotonic()
        losses = self._database.losses
        full = began >= self._next_full_look
        if full:
            self._next_full_look = began + FULL_LOOK  # also when it fails: it must not stand in the way of the others
        floors = self._floors
        floors.begin_tick()
        questions = [
            LaneQuestion(
                lane,
                floors.highest_claimed(lane),
                (0, floors[lane].lowest) if full else floors[lane].start,
                ANY if lane in floors.suspects else floors[lane].value if full else floors[lane].question,
            )
            for lane in floors.lanes
        ]
        due_start, due_question = floors.due.start, floors.due.question
        async with self._database.runtime() as conn:
            tick = await self._store.tick(
                conn,
                worker=self._worker(),
                questions=questions,
                due_from=self.due_from(),
                due_to=None if due_question is None else UNIX_EPOCH + timedelta(microseconds=due_question),
            )
        now = time.monotonic()
        if full:
            self._next_full_look = now + max(FULL_LOOK, FULL_LOOK_SHARE * (now - began))
        if self._server is not None and (tick.server != self._server or losses != self._losses):
            # A server that crashed and recovered keeps its start time, but may have lost virtual times: they wait for no disk.
            floors.reset()
            self._losses = losses
            if tick.server != self._server:
                self._server = tick.server
                self._restarted()
            return tick
        self._server = tick.server
        floors.suspect_ready = False
        for question, value, found in zip(questions, tick.vts, tick.firsts, strict=True):
            floor, first, upto = floors[question.lane], found, question.upto
            if question.lane in floors.suspects:
                floors.suspect_ready = floors.suspect_ready or (found is not None and question.lane not in tick.paused)
                upto = floor.value if full else floor.question
                first = None if found is None or upto is None or found.vt > upto else found
            if full and first is not None:
                floor.lower(first)
            elif not full and upto is not None:
                floor.answer(question.floor, upto, first)
            floor.observe(value, tick.snapshot, now, floors.taken(question.lane))
        if tick.clock < self._clock:
            floors.due.reset()
        elif due_question is not None:
            first_due = tick.first_due
            floors.due.answer(due_start, due_question, None if first_due is None else (_microseconds(first_due), 0))
        self._clock = tick.clock
        floors.due.observe(_microseconds(tick.clock - MARGIN), tick.snapshot, now)
        return tick
