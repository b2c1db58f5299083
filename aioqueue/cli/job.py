"""The commands `job show`, `list`, `cancel` and `retry`. Listing reads as a worker; the others may be a client.

A client is shown what its functions tell: no payload, and of the failed attempts the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict
from json import loads
from typing import Any
from uuid import UUID

import click
import psycopg
from psycopg import AsyncConnection

from aioqueue.app import AioQueue
from aioqueue.errors import JobNotFound, RetryRefused
from aioqueue.job import JobState
from aioqueue.lines import one_line
from aioqueue.store import Store

from .failure import FAILED, Common, Failure, Misuse
from .options import as_json, common_options, connected, option, reading
from .output import dumps, moment, print_json, print_table, say, shorten, wrap

WINDOW = 10_000
"""Jobs that `job list` looks at for its filters at most."""
ATTEMPTS = 50
"""Attempts that `job show` shows at most; the latest."""
ERROR = 1_000
"""Characters of an error message that are shown without --full."""

Facts = dict[str, Any]

only_of = option("--tenant", help="Only if it is this tenant's; another's is as unknown as none.")


@click.group
@common_options
def job() -> None:
    """Show, list, cancel and retry jobs."""


@job.command
@common_options
@click.argument("job_id", metavar="ID", type=click.UUID)
@only_of
@option("--traceback", is_flag=True, help="With the tracebacks of its attempts (-v does that too).")
@option("--full", is_flag=True, help="Do not shorten payload, result and error messages.")
@as_json
@click.pass_context
def show(ctx: click.Context, job_id: UUID, tenant: str | None, traceback: bool, full: bool, json: bool) -> None:
    """Show one job: its state, times, payload, result, and every attempt that failed.

    As a client: without the payload, and with the latest of these attempts.
    """
    common = ctx.ensure_object(Common)
    found, attempts = asyncio.run(_show(common, job_id, tenant))
    if json:
        print_json({**found, "attempts": attempts})
    else:
        _print_job(found, attempts, tracebacks=traceback or common.verbose, full=full)


async def _show(common: Common, job_id: UUID, tenant: str | None) -> tuple[Facts, list[Facts]]:
    async with reading(common) as (conn, store):
        try:
            async with conn.transaction():
                found = await store.show_job(conn, job_id, tenant=tenant)
        except psycopg.errors.InsufficientPrivilege:
            return await _show_as_client(conn, store, job_id, tenant)
        if found is None:
            raise JobNotFound(job_id)
        return found, await store.list_attempts(conn, job_id, limit=ATTEMPTS)


async def _show_as_client(
    conn: AsyncConnection[Any], store: Store, job_id: UUID, tenant: str | None
) -> tuple[Facts, list[Facts]]:
    status = await store.job_status(conn, job_id, tenant=tenant)
    if status is None:
        raise JobNotFound(job_id)
    (ended,) = await store.read_outcomes(conn, [(job_id, tenant)])
    error = None if status.error is None else asdict(status.error)
    found = {
        **{name: value for name, value in asdict(status).items() if name != "error"},
        "error_type": None if error is None else error["error_type"],
        "error": ended.message or (None if error is None else error["error_message"]),
        "result": None if ended.result is None else loads(ended.result),
    }
    return found, [] if error is None else [error]


def _counted(found: Facts) -> int:
    return (found["attempt"] or 0) - (found["spared"] or 0)


def _progress(far: Facts | None) -> str | None:
    if far is None:
        return None
    return f"{far['value']:.0%}" + (f", {far['message']}" if far["message"] else "")


def _reason(found: Facts) -> str:
    """Say why a job is dead, was cancelled, or waits to run again."""
    named = found["error_type"] is not None and found["state"] != JobState.CANCELLED
    return f"{found['error_type']}: {found['error'] or ''}" if named else found["error"] or ""


def _print_job(found: Facts, attempts: list[Facts], *, tracebacks: bool, full: bool) -> None:
    def line(name: str, value: object) -> None:
        if value is not None:
            text = str(value)
            say(f"{name + ':':<13} {text if full else shorten(text, indent=14)}")

    def error(name: str, text: str) -> None:
        shown = text if full else wrap(one_line(text, ERROR), indent=14)
        say(f"{name:<13} {shown}".rstrip())

    line("id", found["id"])
    line("state", f"{found['state']}, waits for a limit" if found.get("parked") else found["state"])
    line("task", found["task"])
    line("queue", f"{found['queue']}, priority {found['priority']}")
    line("tenant", found["tenant"])
    line("key", found.get("key"))
    spared = f", and {found['spared']} not held against it" if found["spared"] else ""
    line("attempts", f"{_counted(found)} of {found['max_attempts']}{spared}")
    line("created", moment(found["created_at"]))
    line("due", None if found["run_at"] is None else moment(found["run_at"]))
    line("started", None if found["started_at"] is None else moment(found["started_at"]))
    line("finished", None if found["finished_at"] is None else moment(found["finished_at"]))
    line("worker", found["worker"])
    line("progress", _progress(found["progress"]))
    line("retry of", found["retry_of"])
    if found.get("unknown_task") is not None:
        line("waits", "no worker that claimed it knows its task")
    if "payload" in found:
        line("payload", _json(found["payload"]))
    if found["state"] == JobState.SUCCEEDED:
        line("result", _json(found["result"]))
    elif found["state"] in (JobState.DEAD, JobState.CANCELLED):
        error("reason:", _reason(found))
    for attempt in attempts:
        say(f"attempt {str(attempt['attempt']) + ':':<5} {moment(attempt['finished_at'])}, {attempt['reason']}")
        text = ": ".join(part for part in (attempt["error_type"], attempt["error_message"]) if part)
        if text:
            error("", text)
        if tracebacks and attempt["traceback"]:
            say("".join(f"    {part}\n" for part in attempt["traceback"].rstrip().splitlines()), nl=False)
    if len(attempts) == ATTEMPTS:
        say(f"(the latest {ATTEMPTS} attempts that failed)")


def _json(value: object) -> str:
    return dumps(value)


@job.command("list")
@common_options
@option("--state", type=click.Choice([str(state) for state in JobState]), help="Only jobs in this state.")
@option("--queue", help="Only jobs of this queue.")
@option("--tenant", help="Only jobs of this tenant; '' for those of none.")
@option("--task", help="Only jobs of this task.")
@option("--before", type=click.UUID, metavar="ID", help="Only jobs made before this one; for the next page.")
@option("--limit", type=click.IntRange(1, WINDOW), default=50, show_default=True, help="Jobs at most.")
@as_json
@click.pass_context
def list_jobs(
    ctx: click.Context,
    state: str | None,
    queue: str | None,
    tenant: str | None,
    task: str | None,
    before: UUID | None,
    limit: int,
    json: bool,
) -> None:
    """List jobs, the newest first; ready ones as they will be claimed, scheduled, dead and cancelled ones by their time.

    Looks at a bounded number of jobs only: 10,000 when there is a filter (of each queue and priority for ready and running
    ones). When that may have left some out, a line on standard error says so and how to go on.
    """
    newest = state in (None, JobState.SUCCEEDED)
    if before is not None and not newest:
        raise Misuse("--before goes without --state, or with --state succeeded")
    filtered = any(value is not None for value in (queue, tenant, task)) or state == JobState.SUCCEEDED
    window = WINDOW if filtered or state == JobState.RUNNING else limit

    async def read() -> Any:
        async with reading(ctx.ensure_object(Common)) as (conn, store):
            return await store.list_jobs(
                conn, state=state, queue=queue, tenant=tenant, task=task, before=before, window=window, limit=limit
            )

    page = asyncio.run(read())
    if json:
        print_json(page.jobs)
    elif page.jobs:
        headers = ("ID", "STATE", "TASK", "QUEUE", "TENANT", "ATTEMPT", "CREATED", "ERROR")
        print_table(headers, [_row(found) for found in page.jobs], right=("ATTEMPT",))
    else:
        say("no such job")
    if filtered and len(page.jobs) < limit and page.scanned >= WINDOW:
        further = f"; go on with --before {page.last}" if newest else ""
        say(f"only {WINDOW} jobs were looked at, there may be more{further}", err=True)


def _row(found: Facts) -> tuple[str, ...]:
    error = "" if found["state"] == JobState.SUCCEEDED else _reason(found)
    return (
        str(found["id"]),
        found["state"] or "-",
        found["task"],
        found["queue"] if not found["priority"] else f"{found['queue']} ({found['priority']:+d})",
        found["tenant"] or "-",
        f"{_counted(found)}/{found['max_attempts']}",
        moment(found["created_at"]),
        one_line(error),
    )


@job.command
@common_options
@click.argument("job_ids", metavar="ID...", type=click.UUID, nargs=-1, required=True)
@only_of
@click.pass_context
def cancel(ctx: click.Context, job_ids: tuple[UUID, ...], tenant: str | None) -> None:
    """Cancel jobs: a waiting one at once, a running one soon; one that has ended keeps its end.

    Prints each id with its state, "running" for one whose worker is asked to end it. Exit code 1 when an id is unknown.
    """

    async def run() -> bool:
        unknown = False
        async with connected(ctx.ensure_object(Common)) as (conn, store):
            for job_id in job_ids:
                state = await store.cancel_job(conn, job_id, tenant=tenant)
                unknown = unknown or state is None
                say(f"{job_id} {state or 'unknown'}")
            with contextlib.suppress(psycopg.Error):
                await store.notify(conn, "ready")
                await store.notify(conn, "done")
        return unknown

    ctx.exit(FAILED if asyncio.run(run()) else 0)


@job.command
@common_options
@click.argument("job_ids", metavar="ID...", type=click.UUID, nargs=-1, required=True)
@only_of
@click.pass_context
def retry(ctx: click.Context, job_ids: tuple[UUID, ...], tenant: str | None) -> None:
    """Run dead or cancelled jobs again, each as a new job whose id is printed; the old one keeps its end."""

    async def run() -> bool:
        failed = False
        async with connected(ctx.ensure_object(Common)) as (conn, store):
            app = AioQueue(schema=store.schema)  # it need not be open to act on a connection
            for job_id in job_ids:
                try:
                    new = await app.job(job_id, tenant=tenant).retry(on=conn)
                except (JobNotFound, RetryRefused) as error:
                    failed = True
                    Failure(str(error)).show()
                else:
                    say(str(new.id))
            with contextlib.suppress(psycopg.Error):
                await store.notify(conn, "ready")
        return failed

    ctx.exit(FAILED if asyncio.run(run()) else 0)
