"""Watches the event loop from a thread of its own, with a connection of its own: what the loop cannot do while it is blocked.

While user code blocks the loop, the guard renews the worker's lease, names the job and the line that block, and writes the
fenced time-out of a job that is past its limit and the abandon limit. Other jobs keep their lease. It never ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict

from .clock import clock
from .database import sever
from .events import JobLost, JobRecorded, LoopBlocked, Observers
from .job import Claimed
from .outcome import ErrorText, Failed, Reason
from .settings import LeaseSettings, LimitSettings
from .store import LOCKED, Store

logger = logging.getLogger("aioqueue")

BLOCKED_AFTER = 1.0
"""Seconds (at most a beat) without a turn after which the loop counts as blocked."""
LONGEST_PAUSE = 5.0
"""Seconds between attempts to connect; doubling, jittered, never more than a beat."""
CALL_SECONDS = 5.0
"""Seconds that one look's statements may take, at most a beat."""


class GuardedRun(Protocol):
    """A run as the guard sees it."""

    job: Claimed
    task: asyncio.Task[None] | None
    limit: float
    put: bool
    blocked: str | None

    @property
    def ends(self) -> float | None:
        """When its time limit is over, by time.monotonic(); None while no user code runs."""
        ...

    def delay(self, error: BaseException) -> float | None:
        """Seconds until it is tried again after `error`; None: dead."""
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

    def refused(self) -> None:
        """The worker was declared dead; to be called on the loop."""
        ...


@dataclass(frozen=True, slots=True)
class _Block:
    """What blocks the loop."""

    run: GuardedRun | None
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
        runs: Callable[[], Iterable[GuardedRun]],
        encode: Callable[[Claimed, Failed], str],
    ) -> None:
        self._conninfo = conninfo
        self._store = store
        self._observers = observers
        self._lease = lease
        self._limits = limits
        self._heartbeat = heartbeat
        self._runs = runs
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
        self._reported: tuple[float, str] | None = None
        self._conn: psycopg.Connection[Any] | None = None
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

    async def stop(self) -> None:
        """Stop the thread and close its connection."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 1.0)  # it may stand in a call to a server that hangs

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            try:
                if self._asked is None:
                    self._asked = time.monotonic()
                    self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:  # the loop is closed
                break
            try:
                self._look()
            except psycopg.Error as error:
                logger.debug("guard: %s", error)
                self._close()
            except Exception:
                logger.exception("guard failed; it goes on")
        self._close()

    def _turn(self) -> None:
        self._asked = None

    def _look(self) -> None:
        """One look: keep the connection, and see to a blocked loop."""
        if self.lag < self._blocked_after:
            if self._reported is not None:
                since, where = self._reported
                self._reported = None
                self._emit(LoopBlocked(where, time.monotonic() - since, over=True))
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
            row = conn.execute(
                self._store.sql["beat"],
                (
                    self._heartbeat.worker,
                    self._lease.lease,
                    len(list(self._runs())),
                    [f"the event loop is blocked at {block.where}"],
                ),
            ).fetchone()
            self._beat_at = sent
            if row is not None and row[0]:
                self._heartbeat.renewed(sent)
            else:
                self._loop.call_soon_threadsafe(self._heartbeat.refused)
        now = time.monotonic()
        for run in list(self._runs()):
            if run.ends is not None and now > run.ends + self._limits.abandon and not run.put:
                self._time_out(conn, run, block)

    def _connect(self) -> psycopg.Connection[Any] | None:
        """Return the connection; None while the server refuses one and it is not yet time to ask again."""
        if self._conn is None or self._conn.closed:
            if time.monotonic() < self._connect_at:
                return None
            try:
                self._conn = psycopg.connect(self._conninfo, autocommit=True, connect_timeout=self._connect_timeout)
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
        """Say what blocks, once per block and line."""
        if block.run is not None:
            block.run.blocked = f"it blocked the event loop for {self.lag:.1f} s at {block.where}"
        if self._reported is None or self._reported[1] != block.where:
            self._reported = (time.monotonic() - self.lag if self._reported is None else self._reported[0], block.where)
            job = "no job" if block.run is None else f"job {block.run.job.job_id} ({block.run.job.task})"
            logger.warning("the event loop has been blocked for %.1f s by %s at %s", self.lag, job, block.where)
            job_id = None if block.run is None else block.run.job.job_id
            self._emit(LoopBlocked(block.where, self.lag, over=False, job_id=job_id))

    def _find_block(self) -> _Block:
        """Name the job whose task runs now and the innermost line of user code."""
        frame = sys._current_frames().get(self._loop_thread)
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        run = next((run for run in self._runs() if run.task is task and task is not None), None)
        stack = "".join(traceback.format_stack(frame)[-20:]) if frame is not None else ""
        return _Block(run, _innermost(frame), stack)

    def _time_out(self, conn: psycopg.Connection[Any], run: GuardedRun, block: _Block) -> None:
        """Write the fenced time-out of a job that the blocked loop cannot end."""
        run.put = True
        message = f"the job ran longer than its time limit of {run.limit:g} s"
        if run.blocked is not None:
            message += f"; {run.blocked}"
        error = ErrorText("aioqueue.errors.TimeLimitExceeded", message, block.stack if block.run is run else None)
        outcome = Failed(Reason.TIME_LIMIT, error, run.delay(TimeoutError(message)))
        try:
            rows = conn.execute(self._store.sql["record"], (run.job.worker, f"[{self._encode(run.job, outcome)}]")).fetchall()
        except psycopg.Error:
            run.put = False
            raise
        job = run.job
        if rows and rows[0][1] == LOCKED:
            run.put = False  # somebody holds its row: at the next look once more
        elif rows:
            seconds = time.monotonic() - job.claimed_at
            self._emit(JobRecorded(job.job_id, job.task, job.tenant, job.attempt, rows[0][1], seconds, message))
        else:
            self._emit(JobLost(job.job_id, job.task, job.attempt))

    def _emit(self, event: Any) -> None:
        self._loop.call_soon_threadsafe(self._observers.emit, event)


def _innermost(frame: FrameType | None) -> str:
    """Return 'file:line in function' of the innermost frame outside the standard library's event loop."""
    if frame is None:
        return "an unknown place"
    while frame.f_back is not None and "/asyncio/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
