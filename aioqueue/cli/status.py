"""The command `status`: one screen of queues, tenants, workers and what is wrong. Reads only, and never counts without bound."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from aioqueue.doctor.queues import CAP, judge
from aioqueue.lines import age

from .failure import UNHEALTHY, Common
from .options import as_json, common_options, option, reading
from .output import cell, moment, print_json, print_table, say

TOP_TENANTS = 10
SHOWN_HANDED_BACK = 20
SHOWN_PAUSED = 100
SHOWN_LIMITS = 10

Facts = dict[str, Any]


@click.command
@common_options
@option("--check", is_flag=True, help="Exit with 3 when there is a problem: for probes and alarms.")
@as_json
@click.pass_context
def status(ctx: click.Context, check: bool, json: bool) -> None:
    """Show queues, tenants, scheduled jobs, how many are dead, workers and problems.

    Problems, for --check: dead workers that still hold jobs, jobs ready for more than a minute in a queue that no living
    worker serves, jobs of tasks that no worker knows. Needs a role with the rights of a worker.
    """
    found = asyncio.run(_read(ctx.ensure_object(Common)))
    if json:
        print_json(found)
    else:
        _print(found)
    if check and found["problems"]:
        ctx.exit(UNHEALTHY)


async def _read(common: Common) -> Facts:
    async with reading(common) as (conn, store):
        workers = await store.list_workers(conn, cap=CAP)
        found: Facts = {
            "schema": store.schema,
            "queues": await store.count_lanes(conn, cap=CAP),
            "scheduled": await store.count_scheduled(conn, cap=CAP),
            "parked": await store.count_parked(conn, cap=CAP),
            "paused": await store.list_paused(conn, limit=SHOWN_PAUSED),
            "tenants": await store.count_tenants(conn, cap=CAP, limit=TOP_TENANTS),
            "dead": await store.count_dead(conn, cap=CAP),
            "workers": [_worker(row) for row in workers],
            "unknown_tasks": await store.count_unknown_tasks(conn, cap=CAP),
            "handed_back": await store.list_handed_back(conn, cap=CAP, limit=SHOWN_HANDED_BACK),
        }
    problems = [f"{finding.what}; {finding.fix}" for finding in judge(workers, found["queues"], found["unknown_tasks"])]
    return {**found, "cap": CAP - 1, "problems": problems}


def _worker(row: Facts) -> Facts:
    """One number for what runs: the jobs that name the worker. What it said itself is as old as its last beat.

    Its id is text: many readers of JSON lose the last of 63 bits.
    """
    changed = {"id": str(row["id"]), "running": row["holds"]}
    return {name: changed.get(name, value) for name, value in row.items() if name != "holds"}


def _count(number: int, more: bool = False) -> str:
    return f"{min(number, CAP - 1)}+" if more or number >= CAP else str(number)


def _place(worker: Facts) -> str:
    return str(worker["id"]) if worker["host"] is None else f"{worker['host']}:{worker['pid']}"


def _print(found: Facts) -> None:
    _print_queues(found["queues"])
    scheduled = found["scheduled"]
    if scheduled["scheduled"]:
        seconds = scheduled["next_due_seconds"]
        due = "is due now" if seconds <= 0 else f"is due in {age(seconds)}, at {moment(scheduled['next_due'])}"
        say(f"\nscheduled: {_count(scheduled['scheduled'])}, of which {_count(scheduled['retrying'])} ran before; the next {due}")
    else:
        say("\nscheduled: none")
    if found["dead"]:
        say(f"\ndead in the last 7 days: {_count(found['dead'])}; job list --state dead shows them")
    _print_limits(found["parked"], found["paused"])
    if any(t["tenant"] is not None for t in found["tenants"]):
        say("\ntenants with most ready jobs:")
        tenants = [(t["tenant"] or "(none)", _count(t["ready"])) for t in found["tenants"]]
        print_table(("TENANT", "READY"), tenants, right=("READY",), indent=2)
    _print_workers(found["workers"])
    if found["unknown_tasks"]:
        say("\ntasks that no worker knew:")
        print_table(("TASK", "JOBS"), [(t["task"], _count(t["jobs"])) for t in found["unknown_tasks"]], right=("JOBS",), indent=2)
    if found["handed_back"]:
        say("\nwarning: handed back more than 20 times in a row:")
        rows = [(str(j["id"]), j["task"], j["tenant"] or "-", str(j["spared"]), j["reason"]) for j in found["handed_back"]]
        print_table(("ID", "TASK", "TENANT", "SPARED", "LAST REASON"), rows, right=("SPARED",), indent=2)
    for problem in found["problems"]:
        say(f"\nproblem: {problem}")


def _print_queues(queues: list[Facts]) -> None:
    if not queues:
        say("no job is ready or running")
        return
    rows = [
        (
            q["queue"],
            str(q["priority"]),
            _count(q["ready"], q["more"]),
            _count(q["running"], q["more"] and not q["ready"]),
            age(q["oldest_ready_seconds"]),
        )
        for q in queues
    ]
    headers = ("QUEUE", "PRIORITY", "READY", "RUNNING", "OLDEST READY")
    print_table(headers, rows, right=headers[1:])


def _print_limits(parked: list[Facts], paused: list[Facts]) -> None:
    if paused:
        say(f"\npaused: {', '.join(p['kind'] + ' ' + cell(p['name']) for p in paused)}")
    if not parked:
        return
    number = sum(limit["jobs"] for limit in parked)
    say(f"\nready, but waiting for a limit: {_count(number)}")
    rows = [
        (
            f"{limit['kind']} {limit['name'] or '-'}" + (f", key {limit['key']}" if limit["key"] is not None else ""),
            "paused" if limit["paused"] else str(limit["max_running"] or "none any more"),
            _count(limit["running"]),
            _count(limit["jobs"]),
        )
        for limit in parked[:SHOWN_LIMITS]
    ]
    print_table(("OF", "LIMIT", "RUNNING", "WAITING"), rows, right=("LIMIT", "RUNNING", "WAITING"), indent=2)


def _print_workers(workers: list[Facts]) -> None:
    if not workers:
        say("\nworkers: none")
        return
    say("\nworkers:")
    rows = [
        (
            w["id"],
            _place(w),
            w["version"] or "-",
            ",".join(w["queues"] or ("-",)),
            f"{w['running']}/{w['concurrency'] or '-'}",
            f"{age(w['beat_seconds'])} ago" if w["beat_seconds"] is not None else "no row",
            "alive" if not w["dead"] else "dead" if w["running"] else "stopped",
        )
        for w in workers
    ]
    headers = ("ID", "HOST:PID", "VERSION", "QUEUES", "RUNNING", "LAST BEAT", "STATE")
    print_table(headers, rows, right=("RUNNING", "LAST BEAT"), indent=2)
