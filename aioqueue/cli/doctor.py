"""The command `doctor`: makes every check of the database (aioqueue/doctor/) and prints what it found. Reads only."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import groupby
from typing import Any

import click
import psycopg

from aioqueue.app import AioQueue
from aioqueue.database import Database
from aioqueue.doctor.examination import Examination
from aioqueue.doctor.examine import Report, examine
from aioqueue.dsn import find_listen_dsn
from aioqueue.errors import ConfigurationError
from aioqueue.session_factory import EngineSession, engine_of
from aioqueue.settings import PoolSettings, TenantSettings
from aioqueue.store import Store

from .failure import UNHEALTHY, Common
from .loading import load_app
from .options import as_json, common_options, reach
from .output import print_json, say, wrap


@click.command
@common_options
@as_json
@click.pass_context
def doctor(ctx: click.Context, json: bool) -> None:
    """Look for all that keeps tenants from being kept apart, or the queue from its work; exit with 3 when something is wrong.

    As the role that workers have, or as the owner, who looks at the rights of every role that was given a worker's. With -A the
    app's tenant setting is known, otherwise it is app.tenant. Each finding has a code (docs/doctor.md), why it matters, and
    the command that mends it. Advice alone is exit code 0.
    """
    report = asyncio.run(_examine(ctx.ensure_object(Common)))
    if json:
        findings = [asdict(finding) for finding in report.findings]
        print_json({"wrong": report.wrong, "findings": findings, "unseen": report.unseen, "facts": report.facts})
    else:
        _print(report)
    if report.wrong:
        ctx.exit(UNHEALTHY)


async def _examine(common: Common) -> Report:
    app = None if common.app is None else load_app(common.app)
    tenants = TenantSettings() if app is None else app.settings.tenants
    with reach(common, role="worker") as place:
        listen_dsn = None if place.embedded else find_listen_dsn(None if app is None else app.listen_dsn)
        database = Database(place.dsn, PoolSettings(), listen_dsn=listen_dsn)
        engine, unknown = await _engine(app, database)
        async with await database.connect() as conn:
            examination = Examination(
                conn=conn,
                store=Store(place.schema),
                setting=tenants.setting,
                strict=tenants.strict_rls,
                taken=tenants.role if isinstance(tenants.role, str) else None,
                engine=engine,
                listen=database.connect_listener if database.can_listen else None,
                pooler=database.pooler,
            )
            examination.unseen.extend(unknown)
            if callable(tenants.role):
                examination.unseen.append(
                    "the roles that jobs take on: a function of the app chooses; the worker's own was looked at"
                )
            return await examine(examination)


async def _engine(app: AioQueue[Any] | None, database: Database) -> tuple[EngineSession | None, list[str]]:
    """Return whose the sessions of the app's tasks are, where there are any; else what cannot be seen then."""
    tasks = [] if app is None else app.tasks.values()
    session = next((task.definition.session for task in tasks if task.definition.session is not None), None)
    if app is None or session is None:
        return None, []
    await database.open()
    try:
        return await session.opener.check(database, app.store, app.settings), []
    except (ConfigurationError, psycopg.OperationalError) as error:
        return None, [f"the role that jobs with a JobSession have: {error}"]
    finally:
        await engine_of(app.settings.session).dispose()
        await database.close()


def _print(report: Report) -> None:
    for (code, _), group in groupby(report.findings, key=lambda finding: (finding.code, finding.severity)):
        findings = list(group)
        say(f"{findings[0].severity} {code}")
        say(f"  why: {wrap(findings[0].why, indent=7)}")
        for finding in findings:
            say(f"  - {wrap(finding.what, indent=4)}")
            say(f"    {finding.fix}")
        say()
    for unseen in report.unseen:
        say(f"not seen: {wrap(unseen, indent=10)}\n")
    _print_facts(report)
    if not report.wrong:
        say("nothing is wrong")


def _print_facts(report: Report) -> None:
    if connections := report.facts.get("connections"):
        limits = ", ".join(f"{name} allows {limit}" for name, limit in connections["limits"].items())
        workers = "1 worker needs" if connections["workers"] == 1 else f"{connections['workers']} workers need"
        say(f"connections: {workers} up to {connections['need']}, others have {connections['others']} now; {limits}")
    if (seconds := report.facts.get("notify_seconds")) is not None:
        say(f"a notification takes {seconds * 1000:.1f} ms")
    say(f"this host's clock is {report.facts['clock_seconds']:+.3f} s beside the server's")
