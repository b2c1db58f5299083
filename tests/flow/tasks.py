"""The app whose worker processes the tests of this folder start and kill: `-A tests.flow.tasks:app`.

Every task writes what it does into table flow.note, on a connection of its own that no outage of the queue's touches, and a
task that is to be caught in the middle waits at the flow's gate (tests/flow/processes.py). The settings that a test chooses
come by FLOW_… in the environment.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable

import psycopg

from aioqueue import AioQueue, JobContext, JobTransaction, Retry, listen
from aioqueue.settings import LeaseSettings, LimitSettings, PoolSettings, WorkerSettings


class Unprintable(Exception):
    """It has no text."""

    def __str__(self) -> str:
        raise RuntimeError


ERRORS: dict[str, Callable[[str], BaseException]] = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "BaseException": BaseException,
    "Unprintable": Unprintable,
    "wide": lambda text: BaseExceptionGroup(text, [ValueError(text, n) for n in range(1000)]),
}
EVIDENCE = "FLOW_EVIDENCE"
"""The environment variable of the DSN for flow.note, where it is not the queue's."""


def _number(name: str) -> float | None:
    value = os.environ.get(f"FLOW_{name.upper()}")
    return None if value is None else float(value)


def made(dsn: str | None = None, *, schema: str) -> AioQueue:
    """An app with these tasks; lease, beat, poll and pool from the environment, else the defaults."""
    lease, beat, poll, pool = map(_number, ("lease", "beat", "poll", "pool"))
    if (probe := _number("probe")) is not None:
        listen.PROBE_INTERVAL = listen.ANSWER_TIMEOUT = probe
    new = AioQueue(
        dsn,
        schema=schema,
        lease=LeaseSettings() if lease is None else LeaseSettings(lease=lease, beat=beat, rescue_interval=0.2),
        worker=WorkerSettings() if poll is None else WorkerSettings(poll=poll),
        pool=PoolSettings() if pool is None else PoolSettings(size=int(pool)),
        limits=LimitSettings(abandon=0.5),
    )
    for task in (
        quick,
        hold,
        reader,
        weigh,
        nap,
        bomb,
        block,
        counted,
        frozen,
        cancels_itself,
        stubborn,
        raises,
        raises_in_thread,
        sleeps_in_query,
        keeps_transaction,
        enqueues,
        thread,
    ):
        new.task(name=task.__name__)(task)
    new.task(name="limited", timeout=0.2, retry=Retry(max_attempts=3, base=0.01))(for_ever)
    new.task(name="limited_for_long", timeout=0.2, retry=Retry(max_attempts=3, base=100_000, cap=100_000))(for_ever)
    new.task(name="thread_limited", timeout=0.2, retry=Retry(max_attempts=1))(thread)
    new.task(name="for_ever")(for_ever)
    new.task(name="one_at_a_time", max_running=1)(hold)
    return new


def evidence_dsn() -> str:
    """Where flow.note is written."""
    return os.environ.get(EVIDENCE) or os.environ["AIOQUEUE_DSN"]


async def _evidence() -> psycopg.AsyncConnection[tuple[object, ...]]:
    while True:
        try:
            return await psycopg.AsyncConnection.connect(
                evidence_dsn(), autocommit=True, application_name="evidence", prepare_threshold=None
            )
        except psycopg.OperationalError:
            await asyncio.sleep(0.05)


async def _note(ctx: JobContext | JobTransaction, what: str) -> None:
    while True:
        try:
            async with await _evidence() as conn:
                await conn.execute(
                    "INSERT INTO flow.note (job_id, attempt, pid, what) VALUES (%s, %s, %s, %s)",
                    (ctx.job_id, ctx.attempt, os.getpid(), what),
                )
                return
        except psycopg.OperationalError:
            await asyncio.sleep(0.05)


async def _until_open() -> None:
    """Wait until the gate is open: until nobody listens there."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(os.environ["FLOW_GATE"])
        try:
            await reader.read()
        finally:
            writer.close()


async def quick(ctx: JobContext, number: int = 0) -> int:
    """Note that it ran."""
    await _note(ctx, "start")
    return number


async def hold(ctx: JobContext) -> None:
    """Run until the gate is open."""
    await _note(ctx, "start")
    await _until_open()
    await _note(ctx, "end")


async def bomb(ctx: JobContext) -> None:
    """Take the whole process along."""
    await _note(ctx, "start")
    os._exit(1)


async def block(ctx: JobContext, seconds: float) -> None:
    """Block the event loop."""
    await _note(ctx, "start")
    time.sleep(seconds)  # noqa: ASYNC251 - that is the point
    await _note(ctx, "end")


async def reader(ctx: JobContext) -> None:
    """As `hold`, and write nothing at the end."""
    await _note(ctx, "start")
    await _until_open()


async def weigh(text: str) -> int:
    """Count the characters."""
    return len(text)


async def nap(ctx: JobContext, seconds: float) -> None:
    """Hold nothing for a while."""
    await asyncio.sleep(seconds)


async def counted(tx: JobTransaction) -> None:
    """Write one row in the job's own transaction."""
    await tx.execute("INSERT INTO flow.counted (job_id) VALUES (%s)", (tx.job_id,))
    await asyncio.sleep(0.01)


async def frozen(tx: JobTransaction) -> None:
    """Write one row, say so, and commit when the gate is open."""
    await tx.execute("INSERT INTO flow.counted (job_id) VALUES (%s)", (tx.job_id,))
    await _note(tx, "start")
    await _until_open()


async def for_ever(ctx: JobContext) -> None:
    """Wait for what never happens."""
    await _note(ctx, "start")
    await asyncio.Event().wait()


async def cancels_itself(ctx: JobContext) -> None:
    """Raise what looks like somebody's cancellation."""
    await _note(ctx, "start")
    raise asyncio.CancelledError


async def stubborn(ctx: JobContext) -> None:
    """Swallow every cancellation; the second attempt is good."""
    await _note(ctx, "start")
    while ctx.attempt == 1:
        try:
            await asyncio.sleep(600)
        except BaseException:  # noqa: S112 - that is the point
            continue


async def _raise(error: str, text: str) -> None:
    raise ERRORS[error](text)


async def raises(ctx: JobContext, error: str, nested: bool) -> None:
    """Raise it, by itself or in a task of its own."""
    if nested:
        async with asyncio.TaskGroup() as group:
            group.create_task(_raise(error, "nested"))
            await asyncio.sleep(600)
    await _raise(error, "plain")


async def sleeps_in_query(tx: JobTransaction) -> None:
    """Be inside a statement for a minute, in the job's own transaction."""
    await tx.execute("INSERT INTO flow.counted (job_id) VALUES (%s)", (tx.job_id,))
    await _note(tx, "start")
    await tx.execute("SELECT pg_sleep(60)")


async def keeps_transaction(tx: JobTransaction) -> None:
    """Keep the job's own transaction open until the gate is open, and busy: an idle one has an end of its own."""
    await _note(tx, "start")
    opened = asyncio.ensure_future(_until_open())
    while not opened.done():
        await tx.execute("SELECT 1")
        await asyncio.wait([opened], timeout=0.05)


async def enqueues(tx: JobTransaction, outside: bool) -> None:
    """Enqueue a job from inside the transaction: as a part of it, or on a connection of its own."""
    task = app.get("quick")
    await (task.options(on=app) if outside else task).enqueue(number=1)
    await tx.execute("INSERT INTO flow.counted (job_id) VALUES (%s)", (tx.job_id,))


def thread(ctx: JobContext) -> None:
    """Stay in a thread, whatever it is asked, until the gate is open."""
    with psycopg.connect(evidence_dsn(), autocommit=True, application_name="evidence", prepare_threshold=None) as conn:
        note = "INSERT INTO flow.note (job_id, attempt, pid, what) VALUES (%s, %s, %s, %s)"
        conn.execute(note, (ctx.job_id, ctx.attempt, os.getpid(), "start"))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as gate:
            gate.connect(os.environ["FLOW_GATE"])
            gate.recv(1)
        conn.execute(note, (ctx.job_id, ctx.attempt, os.getpid(), "end"))


def raises_in_thread(error: str) -> None:
    """Raise it in a thread."""
    raise ERRORS[error]("in a thread")


app = made(schema=os.environ.get("AIOQUEUE_SCHEMA", "aioqueue"))
