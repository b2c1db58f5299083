"""The commands `tenant set` and `tenant list`: weight, limit and pause of a tenant. Need a role with the rights of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from aioqueue.control import COUNTED, TenantStatus

from .failure import Common, Misuse
from .options import as_json, common_options, make_app, option
from .output import cell, print_json, print_table, say


@click.group
@common_options
def tenant() -> None:
    """Set and list weights, limits and pauses of tenants."""


@tenant.command("set")
@common_options
@click.argument("name")
@option("--weight", type=click.FloatRange(0.01, 100), metavar="W", help="Its share of a queue beside other tenants (1).")
@option("--limit", type=click.IntRange(1), metavar="N", help="Run so many of its jobs at once at most, over all workers.")
@option("--no-limit", is_flag=True, help="Run as many as there are.")
@option("--pause", is_flag=True, help="Start none of its jobs; those that run go on.")
@option("--resume", is_flag=True, help="Start its jobs again.")
@click.pass_context
def set_(
    ctx: click.Context, name: str, weight: float | None, limit: int | None, no_limit: bool, pause: bool, resume: bool
) -> None:
    """Change what is given of tenant NAME; what is left out stays as it is."""
    if limit is not None and no_limit:
        raise Misuse("give --limit or --no-limit, not both")
    if pause and resume:
        raise Misuse("give --pause or --resume, not both")
    changes: dict[str, Any] = {"weight": weight, "max_running": limit, "paused": pause if pause or resume else None}
    changes = {key: value for key, value in changes.items() if value is not None}
    if no_limit:
        changes["max_running"] = None
    if not changes:
        raise Misuse("nothing to change: give --weight, --limit, --no-limit, --pause or --resume")
    asyncio.run(_set(ctx.ensure_object(Common), name, changes))
    say(f"tenant {cell(name)}: {', '.join(_SPELL[key](value) for key, value in changes.items())}")


async def _set(common: Common, name: str, changes: dict[str, Any]) -> None:
    async with make_app(common) as app:
        await app.set_tenant(name, **changes)


_SPELL: dict[str, Callable[[Any], str]] = {
    "weight": lambda weight: f"weight {weight:g}",
    "max_running": lambda limit: "no limit" if limit is None else f"at most {limit} jobs at once",
    "paused": lambda paused: "paused" if paused else "not paused",
}


@tenant.command("list")
@common_options
@as_json
@click.pass_context
def list_(ctx: click.Context, json: bool) -> None:
    """List the tenants that have a weight, a limit or a pause of their own, with what runs and waits under the limit."""
    found = asyncio.run(_list(ctx.ensure_object(Common)))
    if json:
        print_json([asdict(each) for each in found])
    elif not found:
        say("every tenant has weight 1 and no limit")
    else:
        rows = [
            (
                t.tenant,
                f"{t.weight:g}",
                str(t.max_running or "-"),
                _count(t.running),
                _count(t.parked),
                "paused" if t.paused else "",
            )
            for t in found
        ]
        headers = ("TENANT", "WEIGHT", "LIMIT", "RUNNING", "WAITING", "")
        print_table(headers, rows, right=headers[1:5])


async def _list(common: Common) -> list[TenantStatus]:
    async with make_app(common) as app:
        return await app.list_tenants()


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number}+" if number >= COUNTED else str(number)
