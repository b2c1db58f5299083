"""Signals of a standalone worker, and an end of the process that no stuck job can hold up.

First SIGTERM or SIGINT: drain; second: cancel and hand back; third: exit at once, with code 1. The handlers are plain ones
rather than the loop's, because a job that blocks the loop must not keep the third signal from being obeyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import NoReturn

from aioqueue.frames import stack, where
from aioqueue.running import RunningWorker

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_MOMENT = 1.0
"""Seconds that threads and tasks have to end by themselves once the worker has stopped."""
JOB_THREADS = ("aioqueue job", "aioqueue thread")
"""Names of the threads that run user code: the runner's for `def` tasks, and those of asyncio.to_thread."""


class Stops:
    """Counts signals, and passes them on to the worker once there is one."""

    def __init__(self, logger: logging.Logger) -> None:
        self.worker: RunningWorker | None = None
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._count = 0

    @property
    def asked(self) -> bool:
        """Whether there was a signal."""
        return self._count > 0

    @property
    def started(self) -> bool:
        """Whether there is a worker that has its row."""
        return self.worker is not None and self.worker.id != 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals for the block; in the main thread."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count >= 3:
            os.write(2, b"third signal: exiting at once; others take the jobs over when the lease ends\n")
            os._exit(1)
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(number).name, self._count)

    def _stop(self, name: str, count: int) -> None:
        if not self.started:
            # Nothing is claimed yet: whatever is being opened is given up.
            if self._main is not None:
                self._main.cancel()
            return
        assert self.worker is not None  # noqa: S101 - it has started
        if count == 1:
            self._logger.info("%s: claiming nothing more; once again to hand back what runs, a third time to exit at once", name)
        else:
            self._logger.info("%s: handing back what runs", name)
        self.worker.stop(hurry=count > 1)


async def find_stuck(threads: ThreadPoolExecutor) -> list[str]:
    """End what is left of user code, wait a moment for it, and say what would hold up the end of the process."""
    threads.shutdown(wait=False, cancel_futures=True)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    pending = (await asyncio.wait(tasks, timeout=LAST_MOMENT))[1] if tasks else set()
    until = time.monotonic() + LAST_MOMENT
    stuck = [f"task {task.get_name()!r}" for task in pending]
    for thread in threading.enumerate():
        if thread.name.startswith(JOB_THREADS) and not thread.daemon:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                stuck.append(f"thread {thread.name!r}{_where(thread)}")
    return stuck


def _where(thread: threading.Thread) -> str:
    frames = stack(thread.ident or 0)
    return f" at {where(frames)}" if frames else ""


def leave(code: int) -> NoReturn:
    """End the process without waiting for threads; nothing registered with atexit runs."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
