"""Watches the event loop from a thread of its own, with a connection of its own: what the loop cannot do while it is blocked.

While user code blocks the loop, the guard renews the worker's lease, names the job and the line that block, and writes the
fenced time-out of a job that is past its limit and the abandon limit; what it cannot write, the recorder gets. Other jobs keep
their lease. It never ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict

from .attempt import Run
from .claimed import Claimed
from .clock import clock
from .events import LoopBlocked, Observers
from .frames import stack, where
from .outcome import Failed
from .pool_connection import sever
from .settings import LeaseSettings, LimitSettings
from .store import LOCKED, Store

logger = logging.getLogger("aioqueue")

BLOCKED_AFTER = 1.0
"""Seconds (at most a beat) without a turn after which the loop counts as blocked."""
LONGEST_PAUSE = 5.0
"""Seconds between attempts to connect; doubling, jittered, never more than a beat."""
CALL_SECONDS = 5.0
"""Seconds that one look's statements may take, at most a beat."""
STOP_SECONDS = 1.0
"""Seconds that stopping waits for the thread."""


class Sink(Protocol):
    """The recorder, called on the loop."""

    def put(self, job: Claimed, outcome: Failed) -> None:
        """Take an outcome that may or may not be written already."""
        ...

    def recorded_by_guard(self, job: Claimed, state: str, outcome: Failed) -> None:
        """Take note of a time-out that the guard recorded."""
        ...


class Renewed(Protocol):
    """The lease, as the guard renews it."""

    @property
    def worker(self) -> int:
        """The worker's identity."""
        ...

    def renewed(self, sent: float) -> None:
        """A beat sent at that time was accepted; callable from any thread."""
        ...

    def refused(self, worker: int) -> None:
        """That worker was declared dead; to be called on the loop."""
        ...


@dataclass(frozen=True, slots=True)
class _Block:
    """What blocks the loop."""

    run: Run | None
    where: str
    stack: str


class Guard:
    """The guard of one worker."""

    def __init__(
        self,
        conninfo: str,
        store: Store,
        observers: Observers,
        *,
        lease: LeaseSettings,
        limits: LimitSettings,
        heartbeat: Renewed,
        runs: Callable[[], Sequence[Run]],
        sink: Sink,
        encode: Callable[[Claimed, Failed], str],
    ) -> None:
        self._conninfo = conninfo
        self._store = store
        self._observers = observers
        self._lease = lease
        self._limits = limits
        self._heartbeat = heartbeat
        self._runs = runs
        self._sink = sink
        self._encode = encode
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = 0
        self._asked: float | None = None
        self._pause = min(0.25, lease.beat_seconds / 4)
        # Two beats and a look later the lease still has a quarter left, however short it is.
        self._blocked_after = min(BLOCKED_AFTER, lease.beat_seconds)
        # libpq knows no less than two seconds; a lease of the default length has time for more.
        given = int(conninfo_to_dict(conninfo).get("connect_timeout") or 5)
        self._connect_timeout = max(2, min(given, int(lease.beat_seconds)))
        self._failures = 0
        self._connect_at = 0.0
        self._beat_at = 0.0
        self._reported: tuple[float, _Block] | None = None
        self._conn: psycopg.Connection[Any] | None = None
        self._writing: dict[tuple[object, ...], Claimed] = {}
        """Jobs whose outcomes it has taken upon itself, by fence; added in the thread, removed on the loop."""
        self._written = asyncio.Event()
        self._ended = asyncio.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aioqueue guard", daemon=True)

    @property
    def lag(self) -> float:
        """Seconds for which the loop has owed a turn; 0: it turns."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def start(self) -> None:
        """Start the thread; to be called on the loop that is guarded."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread.start()

    def jobs(self) -> list[Claimed]:
        """Jobs whose outcomes it writes now."""
        return list(self._writing.values())

    async def wait_written(self) -> None:
        """Wait until everything it has begun to write is recorded, or the recorder's."""
        while self._writing:
            self._written.clear()
            await self._written.wait()

    async def stop(self) -> None:
        """Stop the thread and close its connection."""
        self._stop.set()
        with contextlib.suppress(TimeoutError):  # it may stand in a call to a server that hangs
            async with asyncio.timeout(STOP_SECONDS):
                await self._ended.wait()

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            if self._asked is None:
                self._asked = time.monotonic()
                self._on_loop(self._turn)
            try:
                self._look()
            except psycopg.Error as error:
                logger.debug("guard: %s", error)
                self._close()
            except Exception:
                logger.exception("guard failed; it goes on")
        self._close()
        self._on_loop(self._ended.set)

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: the worker is gone
            self._stop.set()

    def _turn(self) -> None:
        self._asked = None

    def _look(self) -> None:
        """One look: keep the connection, and see to a blocked loop."""
        if self.lag < self._blocked_after:
            if self._reported is not None:
                since, block = self._reported
                self._reported = None
                self._emit(block, time.monotonic() - since, over=True)
            self._connect()
            return
        self._report(block := self._find_block())
        conn = self._connect()
        if conn is not None:
            with self._deadline(conn):
                self._act(conn, block)

    def _act(self, conn: psycopg.Connection[Any], block: _Block) -> None:
        """Do what the blocked loop cannot: beat, and end jobs that are past their limit."""
        sent = clock()
        if sent - self._beat_at >= self._lease.beat_seconds / 2:
            worker = self._heartbeat.worker
            alive = self._store.beat_in_thread(
                conn,
                worker=worker,
                lease=self._lease.lease,
                running=len(self._runs()),
                problems=[f"the event loop is blocked at {block.where}"],
            )
            self._beat_at = sent
            if alive:
                self._heartbeat.renewed(sent)
            else:
                self._on_loop(self._heartbeat.refused, worker)
        now = time.monotonic()
        for run in self._runs():
            ends = run.ends
            if ends is not None and now > ends + self._limits.abandon and not run.taken:
                self._time_out(conn, run, block.stack if block.run is run else None)

    def _connect(self) -> psycopg.Connection[Any] | None:
        """Return the connection; None while the server refuses one and it is not yet time to ask again."""
        if self._conn is None or self._conn.closed:
            if time.monotonic() < self._connect_at:
                return None
            try:
                # It may lead through a pooler, where the next statement may meet another session: nothing is prepared.
                self._conn = psycopg.connect(
                    self._conninfo, autocommit=True, prepare_threshold=None, connect_timeout=self._connect_timeout
                )
            except psycopg.Error:
                pause = min(self._pause * 2**self._failures, self._lease.beat_seconds, LONGEST_PAUSE)
                self._failures = min(self._failures + 1, 10)
                self._connect_at = time.monotonic() + random.uniform(pause / 2, pause)
                raise
            self._failures = 0
        return self._conn

    @contextlib.contextmanager
    def _deadline(self, conn: psycopg.Connection[Any]) -> Iterator[None]:
        """Shut the connection if the block takes too long: the server may hang."""
        timer = threading.Timer(min(CALL_SECONDS, self._lease.beat_seconds), sever, (conn,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _report(self, block: _Block) -> None:
        """Say what blocks, once per block: whatever it does meanwhile."""
        if block.run is not None:
            block.run.blocked = f"it blocked the event loop for {self.lag:.1f} s at {block.where}"
        if self._reported is None:
            self._reported = (time.monotonic() - self.lag, block)
            job = "no job" if block.run is None else f"job {block.run.job.job_id} ({block.run.job.task})"
            # In this thread, since observers hear of it when the block is over.
            logger.warning("the event loop has been blocked for %.1f s by %s at %s", self.lag, job, block.where)
            self._emit(block, self.lag, over=False)

    def _emit(self, block: _Block, seconds: float, *, over: bool) -> None:
        job = None if block.run is None else block.run.job
        facts = (None, None) if job is None else (job.job_id, job.task)
        event = LoopBlocked(block.where, seconds, over, *facts)
        self._on_loop(self._observers.emit, event)

    def _find_block(self) -> _Block:
        """Name the job whose task runs now, and the line of user code."""
        frames = stack(self._loop_thread)
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        run = next((run for run in self._runs() if run.task is task and task is not None), None)
        lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames[:20]))
        return _Block(run, where(frames), "".join(lines.format()))

    def _time_out(self, conn: psycopg.Connection[Any], run: Run, lines: str | None) -> None:
        """Write the fenced time-out of a job that the blocked loop cannot end."""
        job = run.job
        # Before it is taken, so that at every moment somebody knows of the job.
        self._writing[job.fence] = job
        outcome: Failed | None = None
        state: str | None = None
        try:
            if run.take():
                outcome = run.timed_out(lines)
                text = self._encode(job, outcome)
                state = self._store.record_in_thread(conn, worker=job.worker, outcomes=[text]).get(job.job_id)
        finally:
            self._on_loop(self._hand_over, job, outcome, state)

    def _hand_over(self, job: Claimed, outcome: Failed | None, state: str | None) -> None:
        """On the loop: the job is recorded, or else (its row locked or gone, an error) the recorder's like any other."""
        self._writing.pop(job.fence, None)
        self._written.set()
        if outcome is None:
            return
        if state is None or state == LOCKED:
            self._sink.put(job, outcome)
        else:
            self._sink.recorded_by_guard(job, state, outcome)
