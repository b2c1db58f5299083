"""Whether the engine of an application's sessions can carry jobs' transactions: looked at once, when a worker starts.

Whether policies hold for its role the doctor looks at, as for the worker's own (doctor/start.py).
"""

from __future__ import annotations

from typing import Any

import psycopg
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from .database import Database
from .errors import ConfigurationError
from .server import deadline
from .session_factory import EngineSession
from .settings import Settings
from .sql import quote_schema

_WHERE = "pg_catalog.current_database()::text || ' ' || pg_catalog.pg_postmaster_start_time()::text"
_LOOK = text(
    f"SELECT {_WHERE}, pg_catalog.pg_backend_pid(), current_user::text,"  # noqa: S608 - fixed parts
    " coalesce(pg_catalog.current_setting(:setting, true), ''),"
    " ARRAY(SELECT f FROM unnest(ARRAY['finish', 'scrub', 'enqueue_alike', 'cancel_job']) f WHERE NOT EXISTS (SELECT"
    " FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = :schema"
    " AND p.proname = f AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_function_privilege(p.oid,"
    " 'EXECUTE')))"
)


async def check_engine(engine: AsyncEngine, database: Database, settings: Settings) -> EngineSession:
    """Return whose its sessions are. Raises ConfigurationError: another database, no rights, or a pooler between."""
    async with database.runtime() as conn, deadline(conn, database.settings.deadline):
        row = await (await conn.execute(f"SELECT {_WHERE}")).fetchone()
    ours = None if row is None else row[0]
    try:
        async with engine.connect() as theirs:
            known = {"schema": settings.schema, "setting": settings.tenants.setting}
            where, pid, role, tenant, missing = (await theirs.execute(_LOOK, known)).one()
            driver: Any = (await theirs.get_raw_connection()).driver_connection
            told = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
    except (SQLAlchemyError, OSError) as error:
        raise psycopg.OperationalError(f"the engine of session=: {error}") from error
    if where != ours:
        raise ConfigurationError(
            "session: the engine leads to another database than the queue's, where a job's writes and its success could not be "
            "one commit"
        )
    if missing:
        raise ConfigurationError(
            f"session: the engine's role {role} has no worker's rights in schema {quote_schema(settings.schema)} "
            f"({', '.join(missing)}): as its owner, run python -m aioqueue migrate --grants {role}"
        )
    if pid != told:
        raise ConfigurationError(
            "session: the engine leads through a pooler in transaction mode, where what a job leaves on its session would be "
            "other clients': give the factory an engine that connects directly"
        )
    return EngineSession(role, tenant)
