"""The commands `queue pause` and `queue resume`. Need a role with the rights of a worker."""

from __future__ import annotations

import asyncio

import click

from .failure import Common
from .options import common_options, make_app
from .output import cell, say


@click.group
@common_options
def queue() -> None:
    """Pause queues and resume them."""


@queue.command
@common_options
@click.argument("name")
@click.pass_context
def pause(ctx: click.Context, name: str) -> None:
    """Start no job of queue NAME until it is resumed; jobs that run go on, and new ones may be enqueued."""
    asyncio.run(_set(ctx.ensure_object(Common), name, paused=True))


@queue.command
@common_options
@click.argument("name")
@click.pass_context
def resume(ctx: click.Context, name: str) -> None:
    """Start the jobs of queue NAME again."""
    asyncio.run(_set(ctx.ensure_object(Common), name, paused=False))


async def _set(common: Common, name: str, *, paused: bool) -> None:
    async with make_app(common) as app:
        await (app.pause_queue(name) if paused else app.resume_queue(name))
    say(f"queue {cell(name)}: {'paused, none of its jobs starts' if paused else 'not paused'}")
