"""The command `enqueue`: one job of a task by its name, and with --wait its result."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click

from .failure import Common, Misuse
from .options import common_options, make_app, option
from .output import dumps


@click.command
@common_options
@click.argument("task")
@click.argument("payload", metavar="[JSON]", default="{}")
@option("--tenant", help="The tenant that the job belongs to.")
@option("--queue", help="The queue (the task's own).")
@option("--priority", type=int, help="-2 to 2, higher first (the task's own).")
@option("--delay", type=float, metavar="SECONDS", help="Not before this time has passed.")
@option("--max-attempts", type=int, help="Attempts at most (the task's own).")
@option("--key", help="What the task's limit per key counts by.")
@option("--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait for its end so long, and print its result.")
@click.pass_context
def enqueue(
    ctx: click.Context,
    task: str,
    payload: str,
    tenant: str | None,
    queue: str | None,
    priority: int | None,
    delay: float | None,
    max_attempts: int | None,
    key: str | None,
    wait: float | None,
) -> None:
    """Enqueue a job of TASK and print its id; - reads the JSON from standard input.

    JSON is an object of the task's arguments; where its only argument is a model, it is the model itself. With -A the task
    validates it. Without, the name must be one that a worker has registered in the database, and the job's worker validates the
    payload. With --wait the result is printed as JSON after the id; exit code 1 when the job is dead or cancelled, or has not
    ended in time.
    """
    text = sys.stdin.read() if payload == "-" else payload
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise Misuse(f'the payload is not JSON: {error}; quote it for the shell: \'{{"name": "value"}}\'') from None
    if not isinstance(arguments, dict):
        raise Misuse(f"the payload must be a JSON object of the task's arguments, got {type(arguments).__name__}")
    options: dict[str, Any] = {
        "tenant": tenant, "queue": queue, "priority": priority, "delay": delay, "max_attempts": max_attempts, "key": key,
    }  # fmt: skip
    asyncio.run(_enqueue(ctx.ensure_object(Common), task, arguments, options, wait))


async def _enqueue(common: Common, task: str, arguments: dict[str, Any], options: dict[str, Any], wait: float | None) -> None:
    async with make_app(common) as app:
        job = await app.enqueue_by_name(task, arguments, **options)
        click.echo(str(job.id))
        if wait is not None:
            # By its id alone: the result as it is stored, whatever type the task has for it.
            click.echo(dumps(await app.job(job.id).result(timeout=wait)))
