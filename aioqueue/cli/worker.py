"""The command `worker`: runs one worker in this process until a signal, or until nothing is ready (--drain).

Composes app, signals, logging and event loop; how a worker works and stops stands in ../worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from aioqueue import migrate as migrations
from aioqueue.app import AioQueue
from aioqueue.health import HealthServer
from aioqueue.patience import once_reached

from .failure import FAILED, Common, Misuse, explain
from .logs import Format, last_word, log_format, set_up_logs
from .options import address, common_options, given_dsn, make_app, option
from .stopping import Stops, find_stuck, leave

logger = logging.getLogger("aioqueue.worker")

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the options of `worker` say; None: as the app's settings say."""

    queues: tuple[str, ...] | None
    concurrency: int | None
    drain: bool | None
    grace: float | None
    migrate: bool
    health: tuple[str, int] | None


@click.command
@common_options
@option("-q", "--queue", multiple=True, metavar="QUEUE[:WEIGHT]", help="Serve this queue; several, or a,b:3.")
@option("-c", "--concurrency", type=click.IntRange(min=1), help="Jobs at once (the app's setting: 100).")
@option("--drain", is_flag=True, help="End once nothing is ready; scheduled jobs are not waited for.")
@option("--migrate", is_flag=True, help="Bring the schema up to date first, as the role of the DSN.")
@option("--grace", type=click.FloatRange(min=0), metavar="SECONDS", help="Time for jobs to end after the first signal (25).")
@option("--listen-dsn", envvar="AIOQUEUE_LISTEN_DSN", metavar="URI", help="A direct way to the database, for wake-ups.")
@option(
    "--start-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time for a database that cannot be reached at the start (the app's setting: 60).",
)
@option(
    "--health", callback=address, metavar="[HOST:]PORT",
    help="Answer /livez and /readyz there; HOST is 127.0.0.1, 0.0.0.0 lets a cluster's probes in, which need no secret.",
)  # fmt: skip
@option("--uvloop/--no-uvloop", default=True, help="Run on uvloop where it is installed (the default).")
@option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="info", show_default=True, help="What to log.")
@log_format
@click.pass_context
def worker(
    ctx: click.Context,
    queue: tuple[str, ...],
    concurrency: int | None,
    drain: bool,
    migrate: bool,
    grace: float | None,
    listen_dsn: str | None,
    start_timeout: float | None,
    health: tuple[str, int] | None,
    uvloop: bool,
    log_level: str,
    log_format: Format,
) -> None:
    """Run jobs of the app that -A names.

    Signals (SIGTERM, SIGINT): the first drains for the grace period, the second cancels what runs and hands it back
    without holding it against the jobs, the third exits at once with code 1. Exit code 0 after a clean stop, 1 when the
    database cannot be reached at the start in time or takes no outcomes at the end or a job cannot be stopped, 3 when the schema
    does not fit.
    """
    common = ctx.ensure_object(Common)
    if common.app is None:
        raise Misuse("worker needs the app: -A module:app (AIOQUEUE_APP), such as -A tasks:app")
    level = getattr(logging, log_level.upper())
    if listen_dsn:
        # Before the import, as for --dsn: an app may read it there.
        os.environ["AIOQUEUE_LISTEN_DSN"] = listen_dsn
    with last_word(logger, level, log_format, verbose=common.verbose):
        app = make_app(common, start_timeout=start_timeout)
        if ctx.get_parameter_source("listen_dsn") is ParameterSource.COMMANDLINE and app.listen_dsn not in (None, listen_dsn):
            raise Misuse(
                f"{common.app} has a listen_dsn of its own: leave --listen-dsn out, or write AioQueue() there without one"
            )
        # After the import of the app: logging that it has set up itself stays as it is.
        set_up_logs(level, log_format)
        logging.getLogger("aioqueue").setLevel(level)
        names = tuple(name for text in queue for name in text.split(",") if name)
        wanted = Wanted(
            queues=names or None, concurrency=concurrency, drain=drain or None, grace=grace, migrate=migrate,
            health=health,
        )  # fmt: skip
        with _imports_frozen(), asyncio.Runner(loop_factory=_loop_factory() if uvloop else None) as runner:
            ctx.exit(_run(runner.get_loop(), _work(app, given_dsn(common, app), wanted, verbose=common.verbose)))


@contextlib.contextmanager
def _imports_frozen() -> Iterator[None]:
    """What has been imported stays while the worker runs: no collection need walk over it. At the exit it is finalised."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, int]) -> int:
    """Run to the end, whatever tasks of user code raise: asyncio lets a SystemExit of any task out of its loop."""
    main = loop.create_task(work, name="aioqueue main")
    while True:
        try:
            return loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt) as error:
            if main.done() or signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                raise  # ours, or from before the signals had handlers of ours
            logger.error("a task that a job started raised %s, which ends its job and not this worker", type(error).__name__)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory


async def _work(app: AioQueue, dsn: str | None, wanted: Wanted, *, verbose: bool) -> int:
    """Run the worker; end the process at once when user code is stuck, after outcomes are recorded and all is closed."""
    # Our own, so that its threads can be told by name: those of asyncio.to_thread would be waited for without end.
    threads = ThreadPoolExecutor(thread_name_prefix="aioqueue thread")
    asyncio.get_running_loop().set_default_executor(threads)
    stops = Stops(logger)
    with stops.installed():
        try:
            code = await _serve(app, dsn, wanted, stops)
        except Exception as error:
            if stuck := await find_stuck(threads):
                logger.error("%s", explain(error).message, exc_info=error if verbose else None)
                _say_stuck(stuck)
                leave(explain(error).exit_code)
            raise
        if stuck := await find_stuck(threads):
            _say_stuck(stuck)
            leave(FAILED)
    return code


async def _serve(app: AioQueue, dsn: str | None, wanted: Wanted, stops: Stops) -> int:
    # The embedded server's schema is brought up to date by the app itself.
    try:
        async with contextlib.AsyncExitStack() as stack:
            grace = app.settings.limits.grace if wanted.grace is None else wanted.grace
            running = stops.worker = app.worker(
                queues=wanted.queues, concurrency=wanted.concurrency, drain=wanted.drain, grace=grace, standalone=True
            )
            if wanted.health is not None:
                # From the beginning: a worker that waits for its database is not ready, and says why.
                host, wished = wanted.health
                port = await stack.enter_async_context(HealthServer(running.problems).listen(wished, host=host))
                logger.info("health probes are answered on http://%s:%d/livez and /readyz", host, port)
            if wanted.migrate and dsn is not None:
                await once_reached(
                    lambda: migrations.migrate(dsn, schema=app.settings.schema),
                    app.settings.pool.start_timeout,
                    app.note_refusal,
                )
            await stack.enter_async_context(app)
            await running.run()
    except asyncio.CancelledError:
        if stops.asked and not stops.started:
            return 0
        raise
    if running.unwritten:
        logger.error("%d outcomes could not be written: others run these jobs when the lease ends", running.unwritten)
    return FAILED if running.abandoned or running.unwritten else 0


def _say_stuck(stuck: list[str]) -> None:
    logger.error("exiting without waiting for what cannot be stopped: %s", ", ".join(stuck))
