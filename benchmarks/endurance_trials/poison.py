"""One poison job among many ten-second jobs, three worker processes under a restarter: it ends dead, the others succeed."""

from __future__ import annotations

import asyncio
import time

from .bench import Bench, Process, Verdict

PROCESSES = 3
LIMIT = 900.0
"""Seconds in which everything must have ended."""


async def run(bench: Bench, *, neighbours: int) -> Verdict:
    """Run it once, with default settings."""
    verdict = Verdict()
    began = time.monotonic()
    place = await bench.place("poison")
    restarter = asyncio.create_task(_restart(bench, place.dsn("worker")))
    try:
        half = neighbours // 2
        await place.enqueue("ten seconds", [{}] * half)
        await place.enqueue("poison", [{}])
        await place.enqueue("ten seconds", [{}] * (neighbours - half))
        ended = "count(*) = %s FROM aioqueue.outcome"
        verdict.check(await place.until(ended, neighbours + 1, seconds=LIMIT), f"not everything had ended after {LIMIT:g} s")
        took = time.monotonic() - began
    finally:
        restarter.cancel()
        (lives,) = await asyncio.gather(restarter)
    rows = await place.rows("SELECT task, state, count(*) FROM aioqueue.jobs GROUP BY 1, 2")
    found = {(task, state): number for task, state, number in rows}
    verdict.row(f"{neighbours} ten-second jobs, max_attempts 3", f"{found.get(('ten seconds', 'succeeded'), 0)} succeeded")
    verdict.row("the poison job, max_attempts 3", ", ".join(state for task, state in found if task == "poison"))
    attempts = sum(len(life.notes("poison")) for life in lives)
    verdict.check(attempts == 3, f"the poison job was started {attempts} times")
    verdict.row("worker processes it killed", sum(life.process.returncode == -9 and life.poisoned for life in lives))
    ((lost,),) = await place.rows(
        "SELECT count(DISTINCT job_id) FROM aioqueue.attempt a JOIN aioqueue.job j ON j.id = a.job_id"
        " WHERE a.reason = 'worker lost' AND j.task <> 'poison'"
    )
    verdict.row("neighbours lost with a worker, and run again", lost)
    verdict.row("all had ended after", f"{took:.0f} s")
    verdict.check(found == {("ten seconds", "succeeded"): neighbours, ("poison", "dead"): 1}, f"expected otherwise: {found}")
    return verdict


class _Life(Process):
    @property
    def poisoned(self) -> bool:
        """Whether the poison job was run here."""
        return bool(self.notes("poison"))


async def _restart(bench: Bench, dsn: str) -> list[_Life]:
    """Keep so many processes alive until cancelled; every one there was."""
    lives: list[_Life] = []
    slots: list[_Life | None] = [None] * PROCESSES
    try:
        while True:
            for number, life in enumerate(slots):
                if life is None or life.ended:
                    slots[number] = started = _Life(bench.directory / f"poison-{len(lives)}", dsn, ())
                    lives.append(started)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return lives
    finally:
        for life in lives:
            if not life.ended:
                await life.stop()
