"""The app of the trials' worker processes (`-A benchmarks.endurance_trials.tasks:app`): default settings."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from pathlib import Path

from aioqueue import AioQueue, JobContext, JobTransaction, Retry

DIARY = os.open(os.environ.get("ENDURANCE_DIARY", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
PAGE = os.sysconf("SC_PAGE_SIZE")

app = AioQueue()


def note(word: str, *facts: object) -> None:
    """One line into the diary, with the machine's monotonic clock behind the word; in one call."""
    os.write(DIARY, f"{word} {time.monotonic():.6f} {' '.join(map(str, facts))}\n".encode())


@app.task(name="hold", retry=Retry(max_attempts=3))
async def hold(ctx: JobContext) -> None:
    """Never end in the first attempt, at once in a later one."""
    note("start", ctx.attempt)
    if ctx.attempt == 1:
        await asyncio.sleep(1e6)


@app.task(name="ten seconds", retry=Retry(max_attempts=3))
async def ten_seconds(ctx: JobContext) -> None:
    """Take ten seconds."""
    note("start", ctx.job_id, ctx.attempt)
    await asyncio.sleep(10)


@app.task(name="poison", retry=Retry(max_attempts=3))
async def poison(ctx: JobContext) -> None:
    """Take the process along, after a second."""
    note("poison", ctx.attempt)
    await asyncio.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="small")
async def small(n: int) -> int:
    """Return the argument."""
    return n


@app.task(name="noted")
async def noted(tx: JobTransaction) -> None:
    """Write a row in the job's own transaction."""
    await tx.execute("INSERT INTO trial.note (job_id) VALUES (%s)", (tx.job_id,))


@app.task(name="failing", retry=Retry(max_attempts=2, base=0.05))
async def failing(n: int) -> None:
    """Fail, and fail again."""
    raise ValueError(f"number {n} fails")


@app.task(name="sample", queue="samples")
async def sample(ctx: JobContext) -> dict[str, int]:
    """Say what this process has: kB in memory, tasks, threads, open files, objects known to the garbage collector."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # noqa: ASYNC240 - not a file system that waits
    gc.collect()
    return {
        "rss": pages * PAGE // 1024,
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }
