"""The rights of a worker's and of a client's role in the schema: which functions and tables, as GRANTs; which roles have them.

Grants nothing itself: migrate.py runs the text, or its reader does.
"""

from __future__ import annotations

from typing import Literal

import psycopg
from psycopg import sql

from .settings import DEFAULT_SCHEMA
from .sql import quote_schema

Kind = Literal["worker", "client"]

CLIENT_FUNCTIONS = (
    "enqueue", "enqueue_many", "enqueue_alike", "cancel_job", "retry_job", "read_outcomes", "job_status", "notify",
    "known_tasks", "follow",
)  # fmt: skip
WORKER_FUNCTIONS = (
    *CLIENT_FUNCTIONS, "claim", "tick", "promote", "record", "finish", "confirm", "register_worker", "beat", "resign",
    "rescue", "rescue_orphans", "scrub", "lane", "read_back", "make_ranges", "prune_range", "prune_default",
    "unknown_claims", "set_tenant", "set_queue", "wait_for_claims", "settle_limits", "park_tenant", "sweep_parked", "unpark",
    "report", "sweep_progress",
)  # fmt: skip
WORKER_TABLES = (
    "job", "live", "scheduled", "outcome", "attempt", "cancel", "worker", "task", "jobs", "tenant", "limits", "queue",
    "held", "parked", "progress",
)  # fmt: skip
"""To be read only."""


def grants(*, role: str, schema: str = DEFAULT_SCHEMA, kind: Kind = "worker") -> str:
    """Return the exact rights of a role: 'worker' (runs jobs, sees all) or 'client' (enqueue, cancel, status, result)."""
    who = sql.Identifier(role).as_string(None)
    name = quote_schema(schema)
    lines = [f"GRANT USAGE ON SCHEMA {name} TO {who};", f"GRANT SELECT ON {name}.schema_version TO {who};"]
    if kind == "worker":
        lines += [f"GRANT SELECT ON {name}.{table} TO {who};" for table in WORKER_TABLES]
    # Function signatures are left to the server: every function has one.
    allowed = WORKER_FUNCTIONS if kind == "worker" else CLIENT_FUNCTIONS
    lines += [f"GRANT EXECUTE ON FUNCTION {name}.{function} TO {who};" for function in allowed]
    return "\n".join(lines)


async def holders(conn: psycopg.AsyncConnection, *, schema: str) -> list[tuple[Kind, str]]:
    """Roles that hold a worker's or a client's rights by now: they are given those to new functions as well."""
    cursor = await conn.execute(
        "SELECT p.proname, r.rolname FROM pg_catalog.pg_proc p"
        " JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace,"
        " LATERAL pg_catalog.aclexplode(p.proacl) a JOIN pg_catalog.pg_roles r ON r.oid = a.grantee"
        " WHERE n.nspname = %s AND p.proname IN ('claim', 'enqueue') AND a.grantee <> p.proowner",
        (schema,),
    )
    rows = await cursor.fetchall()
    workers = {role for function, role in rows if function == "claim"}
    clients = {role for function, role in rows if function == "enqueue"} - workers
    found: list[tuple[Kind, str]] = [("worker", role) for role in sorted(workers)]
    return found + [("client", role) for role in sorted(clients)]
