"""The app of the storm's worker processes (`-A benchmarks.chaos_harness.storm.tasks:app`), and of those that enqueue.

Every run writes its start and its end into a file of its process, with the machine's monotonic clock: that evidence needs no
database and no connection, and outlives a kill. The tables that tasks write to stand in servers.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aioqueue import AioQueue, Cancel, JobContext, JobTransaction, Retry, Snooze
from aioqueue.events import Observer
from aioqueue.settings import LeaseSettings, LimitSettings, PoolSettings, WorkerSettings
from benchmarks.chaos_harness import sabotage

from . import clock

LEASE = 2.0
CONCURRENCY = 12
POOL = 4
DIARY = "STORM_DIARY"
PATCH = "STORM_SABOTAGE"
BOMBED = 7
"""Exit code of a process whose job ended it."""
UNNOTED = ("plain",)
"""Tasks that write nothing into the diary."""
TRANSACTIONAL = ("write", "parent")
"""Tasks of which every success leaves exactly one row in storm.effect."""
UNCANCELLABLE = ("threaded", "block")
"""Tasks whose user code goes on after its cancellation, as threads and a blocked event loop do."""


class Diary:
    """Appends lines to the file of this process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def note(self, word: str, job: JobContext | JobTransaction) -> None:
        """One line: word, job, attempt, seconds, task."""
        line = f"{word} {job.job_id} {job.attempt} {time.monotonic():.6f} {job.task}\n"
        os.write(self._file, line.encode())


_diary = Diary(os.environ.get(DIARY, os.devnull))


@contextmanager
def _noted(job: JobContext | JobTransaction) -> Iterator[None]:
    _diary.note("start", job)
    try:
        yield
    finally:
        _diary.note("end", job)


class Unlucky(Exception):
    """A task of the storm fails, as asked."""


async def nothing(ctx: JobContext) -> None:
    """Do nothing."""
    with _noted(ctx):
        pass


async def plain(number: int) -> int:
    """Be given nothing at all."""
    return number


async def sleep(ctx: JobContext, seconds: float) -> float:
    """Wait for the outside world."""
    with _noted(ctx):
        await asyncio.sleep(seconds)
    return seconds


async def fail(ctx: JobContext, times: int) -> int:
    """Fail so many times, perhaps more often than is allowed."""
    with _noted(ctx):
        await asyncio.sleep(0.01)
        if ctx.attempt - ctx.spared <= times:
            raise Unlucky(f"time {ctx.attempt - ctx.spared} of {times}")
    return times


async def snooze(ctx: JobContext, times: int) -> int:
    """Ask for later so many times."""
    with _noted(ctx):
        if ctx.attempt <= times:
            raise Snooze(0.2)
    return times


async def quit(ctx: JobContext) -> None:
    """End as cancelled by itself."""
    with _noted(ctx):
        raise Cancel("as asked")


async def slow(ctx: JobContext) -> None:
    """Meet the time limit."""
    with _noted(ctx):
        await asyncio.sleep(60)


async def bomb(ctx: JobContext) -> None:
    """Take the whole process along."""
    with _noted(ctx):
        await asyncio.sleep(0.05)
        os._exit(BOMBED)


def threaded(ctx: JobContext, seconds: float) -> None:
    """Block a thread."""
    with _noted(ctx):
        time.sleep(seconds)


async def block(ctx: JobContext, seconds: float) -> None:
    """Block the event loop, perhaps beyond the lease."""
    with _noted(ctx):
        time.sleep(seconds)  # noqa: ASYNC251 - that is the point


async def short(ctx: JobContext, tenant: str, seconds: float, fails: bool) -> None:
    """Take two short transactions, with a wait between them that holds nothing."""
    with _noted(ctx):
        for part in (1, 2):
            async with ctx.transaction() as tx:
                await tx.execute(
                    "INSERT INTO storm.part (job_id, attempt, part) VALUES (%s, %s, %s)", (ctx.job_id, ctx.attempt, part)
                )
                await _look(tx, tenant)
            await asyncio.sleep(seconds)
        if fails and ctx.attempt == 1:
            raise Unlucky("after its transactions")


async def write(tx: JobTransaction, tenant: str, seconds: float, fails: int) -> int:
    """Write one row in the job's own transaction, and fail the first times after that."""
    with _noted(tx):
        await _effect(tx, tenant)
        await asyncio.sleep(seconds)
        if tx.attempt - tx.spared <= fails:
            raise Unlucky("its row is rolled back")
    return fails


async def intruder(tx: JobTransaction) -> None:
    """Change the session's tenant, which fails the job and must not reach the next one."""
    with _noted(tx):
        await tx.execute("SELECT set_config('app.tenant', 'intruder', false)")


async def parent(tx: JobTransaction, tenant: str, seconds: float) -> None:
    """Enqueue a child in the job's own transaction: both or neither."""
    with _noted(tx):
        await _effect(tx, tenant)
        child = await app.tasks["nothing"].enqueue()
        await tx.execute("INSERT INTO storm.asked (job_id) VALUES (%s)", (child.id,))
        await asyncio.sleep(seconds)


async def _effect(tx: JobTransaction, tenant: str) -> None:
    await tx.execute("INSERT INTO storm.effect (job_id, attempt) VALUES (%s, %s)", (tx.job_id, tx.attempt))
    await tx.execute("INSERT INTO storm.ledger (tenant, job_id) VALUES (%s, %s)", (tenant, tx.job_id))
    await _look(tx, tenant)


async def _look(tx: JobTransaction, tenant: str) -> None:
    strange = await tx.fetch_value(
        "SELECT current_setting('app.tenant', true) IS DISTINCT FROM %(t)s"
        " OR EXISTS (SELECT FROM storm.ledger WHERE tenant <> %(t)s)",
        {"t": tenant},
    )
    if strange or (tx.tenant or "") != tenant:
        _diary.note("breach", tx)


_QUICK = Retry(max_attempts=12, base=0.1, cap=1.0)
_FEW = Retry(max_attempts=3, base=0.1, cap=0.5)


def made(dsn: str | None = None, *, schema: str = "aioqueue", pool: int = POOL, observers: tuple[Observer, ...] = ()) -> AioQueue:
    """An app with these tasks and short times."""
    new = AioQueue(
        dsn,
        schema=schema,
        lease=LeaseSettings(lease=LEASE, rescue_interval=0.2),
        pool=PoolSettings(size=pool, acquire_timeout=1.0, deadline=1.5),
        limits=LimitSettings(transaction_time_limit=10),
        worker=WorkerSettings(poll=0.5, concurrency=CONCURRENCY),
        observers=observers,
    )
    tasks: tuple[Any, ...] = (nothing, plain, sleep, snooze, quit, threaded, block, short, write, parent)
    for task in tasks:
        new.task(name=task.__name__, retry=_QUICK)(task)
    few: tuple[Any, ...] = (fail, bomb, intruder)
    for task in few:
        new.task(name=task.__name__, retry=_FEW)(task)
    new.task(name="slow", retry=_FEW, timeout=0.3)(slow)
    return new


clock.install()
sabotage.patch(os.environ.get(PATCH, ""))
app = made()
