"""Starts and stops with an idle listener: each stop under a second, no task, thread, file or connection left."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time

from aioqueue import AioQueue
from aioqueue.events import Event, ListenerConnected

from .bench import Bench, Verdict

SLOW = 1.0


async def run(bench: Bench, *, stops: int) -> Verdict:
    """Start and stop one app and its worker so many times; every third time the app stays open and the worker goes."""
    verdict = Verdict()
    place = await bench.place("stops")
    connected = asyncio.Event()

    def observe(event: Event) -> None:
        if isinstance(event, ListenerConnected):
            connected.set()

    app = AioQueue(place.dsn("worker"), observers=[observe])
    gone = "count(*) = 0 FROM pg_stat_activity WHERE application_name = 'aioqueue'"
    times: list[float] = []

    async def stop_worker() -> None:
        async with app.worker():
            await connected.wait()
            since = time.monotonic()
        times.append(time.monotonic() - since)

    async def once(number: int) -> None:
        connected.clear()
        if number % 3:
            await stop_worker()
            return
        async with app:
            await stop_worker()
            since = time.monotonic()
        times[-1] += time.monotonic() - since

    await once(0)  # what is made once is made now
    await place.until(gone, seconds=10)
    times.clear()
    tasks, threads, files = asyncio.all_tasks(), _threads(), len(os.listdir("/proc/self/fd"))
    connections = 0
    for number in range(stops):
        await once(number)
        left = asyncio.all_tasks() - tasks
        verdict.check(not left, f"tasks left after stop {number}: {left}")
        if number % 50 == 49:
            connections += not await place.until(gone, seconds=10)
    verdict.row("starts and stops with an idle listener", stops)
    verdict.row("a stop, median and longest", f"{1000 * statistics.median(times):.0f} ms, {1000 * max(times):.0f} ms")
    slow = sum(seconds > SLOW for seconds in times)
    verdict.row("stops that took more than a second", slow)
    verdict.check(not slow, f"{slow} stops took more than {SLOW:g} s")
    verdict.check(not connections, "connections were left")
    verdict.check(_threads() <= threads, f"threads left: {_threads() - threads}")
    now = len(os.listdir("/proc/self/fd"))
    verdict.check(now <= files, f"open files went from {files} to {now}")
    ((rows,),) = await place.rows("SELECT count(*) FROM aioqueue.worker")
    verdict.check(not rows, f"{rows} workers left in the table")
    verdict.row("tasks, threads, files, connections, worker rows left", "none" if not verdict.faults else "see below")
    return verdict


def _threads() -> set[str]:
    # Those that asyncio keeps for blocking calls stay.
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}
