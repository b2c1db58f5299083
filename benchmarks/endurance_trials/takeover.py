"""Take-over after kill -9 with default settings: from the kill to the start of the job's next attempt in another process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time

from .bench import Bench, Verdict

EARLIEST, LATEST = 20.0, 31.0
"""Seconds: a lease of 30 s whose last beat was up to 10 s ago, a look each second."""
SLACK = 1.0
"""Seconds for a busy machine: its beats and its looks come late."""


async def run(bench: Bench, *, runs: int, at_once: int, seed: int) -> Verdict:
    """Kill so many workers, each in a database of its own with one other worker."""
    dice = random.Random(seed)
    phases = [dice.uniform(0, 10) for _ in range(runs)]
    places = asyncio.Semaphore(at_once)
    starts = asyncio.Semaphore(2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(bench, number, phase, places, starts)) for number, phase in enumerate(phases)]
    found = sorted(task.result() for task in tasks)
    verdict = Verdict()
    verdict.row("runs, default settings", runs)
    verdict.row("take-over, median", f"{statistics.median(found):.1f} s")
    verdict.row("take-over, shortest and longest", f"{found[0]:.1f} s, {found[-1]:.1f} s")
    verdict.check(found[0] >= EARLIEST - SLACK, f"a job was taken over after {found[0]:.1f} s, while its worker's lease held")
    verdict.check(found[-1] <= LATEST + SLACK, f"a job was taken over after {found[-1]:.1f} s only")
    return verdict


async def _one(bench: Bench, number: int, phase: float, places: asyncio.Semaphore, starts: asyncio.Semaphore) -> float:
    async with places:
        with contextlib.ExitStack() as stack:
            # Processes that start together keep each other, and those that beat, from the processor.
            async with starts:
                place = await bench.place(f"takeover_{number}")
                victim = stack.enter_context(bench.worker(place, f"victim-{number}"))
                await victim.wait_ready()
                await place.enqueue("hold", [{}])
                await victim.wait(lambda: bool(victim.notes("start")))
                heir = stack.enter_context(bench.worker(place, f"heir-{number}"))
                await heir.wait_ready()
            await asyncio.sleep(phase)
            killed = time.monotonic()
            victim.kill()
            await heir.wait(lambda: bool(heir.notes("start")))
            ((at, attempt),) = heir.notes("start")
            assert attempt == "2"
            assert await heir.stop() == 0
            return float(at) - killed
