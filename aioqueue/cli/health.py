"""The command `health`: whether a worker, or any, lives and can do its work, by what the database knows of it.

A worker says with each beat what keeps it from its work (worker.py, `problems`); a beat that is missing says the rest.
"""

from __future__ import annotations

import asyncio
from typing import Any

import click

from aioqueue.doctor.queues import CAP
from aioqueue.lines import age

from .failure import UNHEALTHY, Common
from .options import as_json, common_options, option, reading
from .output import print_json, say


@click.command
@common_options
@option("--worker", "worker_id", type=int, metavar="ID", help="Only this worker; its identity is in its first log line.")
@as_json
@click.pass_context
def health(ctx: click.Context, worker_id: int | None, json: bool) -> None:
    """Exit with 0 when a worker lives and can do its work, with 3 and the reasons otherwise.

    Of one worker (--worker): its last beat was accepted within its lease, its claim loop turns, its listener is connected, its
    event loop is not blocked. Without: at least one worker is like that. For a probe in the worker's own process see
    `worker --health`.
    """
    workers = asyncio.run(_read(ctx.ensure_object(Common)))
    found = judge(workers, worker_id)
    if json:
        print_json({"healthy": not found, "problems": found})
    else:
        say("\n".join(found) or "ok")
    if found:
        ctx.exit(UNHEALTHY)


async def _read(common: Common) -> list[dict[str, Any]]:
    async with reading(common) as (conn, store):
        return await store.list_workers(conn, cap=CAP)


def judge(workers: list[dict[str, Any]], worker_id: int | None) -> list[str]:
    """Say what is wrong; empty when all is well."""
    if worker_id is not None:
        workers = [worker for worker in workers if worker["id"] == worker_id]
        if not workers:
            return [f"worker {worker_id}: there is none of that identity; it has stopped, or was taken over under another"]
    elif not workers:
        return ["no worker runs on this database: start one with 'python -m aioqueue worker -A module:app'"]
    said = [(worker, _problems(worker)) for worker in workers]
    if any(not problems for _, problems in said):
        return []
    return [f"worker {worker['id']}: {problem}" for worker, problems in said for problem in problems]


def _problems(worker: dict[str, Any]) -> list[str]:
    if worker["dead"]:
        since = "" if worker["beat_seconds"] is None else f"; its last beat was {age(worker['beat_seconds'])} ago"
        return [f"it is dead{since}"]
    return list(worker["problems"] or ())
