"""What a worker does before it takes its first job: it looks whether the database keeps tenants apart.

A policy on the queue's own tables stops it always, all else if the application has said so (TenantSettings.strict_rls);
otherwise it warns, with the command that mends it.
"""

from __future__ import annotations

import logging

import psycopg

from aioqueue.database import Database
from aioqueue.errors import UnsafeDatabase
from aioqueue.events import Observers, RisksFound
from aioqueue.finding import Finding, Kind, Severity
from aioqueue.server import connection_lost
from aioqueue.session_factory import EngineSession
from aioqueue.settings import TenantSettings
from aioqueue.store import Store

from .examination import Examination
from .examine import examine_start
from .queue_policies import POLICY

logger = logging.getLogger("aioqueue")

UNCHECKED = Kind(
    "not-checked",
    Severity.ERROR,
    "whether tenants are kept apart is not known; a worker with strict_rls does not start then",
)
SECONDS = 30.0
"""Seconds that all checks of a start may take."""


async def check_start(
    database: Database, store: Store, observers: Observers, tenants: TenantSettings, engine: EngineSession | None = None
) -> None:
    """Make the checks of a worker's start, for its own role and that of the `engine` of its jobs' sessions.

    Raises UnsafeDatabase; psycopg.OperationalError where the database is not there.
    """
    findings = await _look(database, store, tenants, engine)
    if not findings:
        return
    if tenants.strict_rls or any(finding.code == POLICY.code for finding in findings):
        raise UnsafeDatabase(findings)
    for finding in findings:
        logger.warning("%s", finding)
    observers.emit(RisksFound(tuple(findings)))


async def _look(database: Database, store: Store, tenants: TenantSettings, engine: EngineSession | None) -> list[Finding]:
    try:
        async with database.runtime(SECONDS) as conn:
            taken = tenants.role if isinstance(tenants.role, str) else None
            examination = Examination(
                conn=conn, store=store, setting=tenants.setting, strict=tenants.strict_rls, taken=taken, engine=engine
            )
            return await examine_start(examination)
    except psycopg.Error as error:
        if connection_lost(error):
            raise
        what = f"the checks of the start failed: {' '.join(str(error).split())}"
        return [UNCHECKED.found(what, fix="python -m aioqueue doctor, which says more")]
