"""The command `dev`: a worker for the time of writing code, started anew whenever a file changes.

The worker is a process of its own (`worker --migrate`), so a change that does not even import is said and the next one tried;
here it is only started, stopped and started again. Knows nothing of databases and jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from .failure import Common, Misuse
from .logs import Format, log_format, set_up_logs
from .options import common_options, option

logger = logging.getLogger("aioqueue.dev")

GRACE = 2
"""Seconds that jobs have to end before a change stops their worker; then they are handed back, and run again."""


@click.command
@common_options
@option("-q", "--queue", multiple=True, metavar="QUEUE[:WEIGHT]", help="Serve this queue; several, or a,b:3.")
@option(
    "--watch", multiple=True, metavar="PATH", type=click.Path(exists=True, path_type=Path),
    help="Watch this directory or file for changes; several (the current directory).",
)  # fmt: skip
@log_format
@click.pass_context
def dev(ctx: click.Context, queue: tuple[str, ...], watch: tuple[Path, ...], log_format: Format) -> None:
    """Run a worker of the app that -A names, and start it anew whenever a Python file changes.

    The schema is brought up to date first; without a DSN the database is an embedded PostgreSQL. Ctrl-C ends both. Needs the
    extra `reload`. For development only: in production run `worker`.
    """
    common = ctx.ensure_object(Common)
    if common.app is None:
        raise Misuse("dev needs the app: -A module:app (AIOQUEUE_APP), such as -A tasks:app")
    try:
        watchfiles = importlib.import_module("watchfiles")
    except ImportError:
        raise Misuse("dev needs watchfiles: install aioqueue-pg[reload], or run 'worker'") from None
    set_up_logs(logging.INFO, log_format)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    command = [
        sys.executable,
        "-m",
        "aioqueue",
        "worker",
        "-A",
        common.app,
        "--migrate",
        "--grace",
        str(GRACE),
        "--log-format",
        log_format,
    ]
    for name in ("dsn", "schema"):
        if name in common.given:
            command += [f"--{name}", str(getattr(common, name))]
    command += [part for name in queue for part in ("-q", name)] + ["-v"] * common.verbose

    async def run() -> int:
        stopping = asyncio.Event()
        changes = watchfiles.awatch(*(watch or [Path.cwd()]), watch_filter=watchfiles.PythonFilter(), stop_event=stopping)
        return await reload_worker(command, changes, stopping)

    ctx.exit(asyncio.run(run()))


async def reload_worker(command: list[str], changes: AsyncIterator[set[tuple[Any, str]]], stopping: asyncio.Event) -> int:
    """Run the command until a signal, anew after each set of changes; the exit code of the last one."""
    # In a session of its own, so that Ctrl-C comes to us alone and the worker is told once.
    process = await asyncio.create_subprocess_exec(*command, start_new_session=True)

    def stop(number: signal.Signals) -> None:
        stopping.set()
        _send(process, number)

    # A terminal that is closed sends SIGHUP, to us alone for the same reason.
    for number, sent in ((signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            asyncio.get_running_loop().add_signal_handler(number, stop, sent)
    try:
        async for changed in changes:
            names = sorted(Path(name).name for _, name in changed)
            logger.info("%s changed: the worker starts anew", ", ".join(names[:3]) + (" …" if len(names) > 3 else ""))
            _send(process, signal.SIGTERM)
            await process.wait()
            if stopping.is_set():
                break
            process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            if stopping.is_set():  # while it was started: the signal went to the one before
                _send(process, signal.SIGTERM)
        return await process.wait()
    finally:
        _send(process, signal.SIGKILL)
        await process.wait()


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
