"""A long history for the plans of reading statements, and what such a plan scans."""

from collections.abc import Mapping
from typing import Any

from psycopg import sql

from tests.sql.engine import Session

FINISHED = 100_000


async def fill(boss: Session, waiting: int = 30_000) -> None:
    """Finished jobs, one in a hundred dead, then waiting ones, ready and scheduled; with the planner's statistics.

    More wait than a statement looks at: to read a lane from end to end is right when all of it is wanted.
    """
    await boss.rows(
        "INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at)"
        " SELECT (lpad(to_hex(n), 12, '0') || '7000800000000000000' || '0')::uuid, 't', 'default', (n %% 10)::text, 0, 5,"
        " '{}', '2020-01-01Z' FROM generate_series(1, %s) AS n",
        FINISHED,
    )
    await boss.rows(
        "INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, started_at, finished_at)"
        " SELECT id, CASE WHEN row_number() OVER () %% 100 = 0 THEN 'dead' ELSE 'succeeded' END, 1, 0, 'null',"
        " created_at, created_at + interval '1 s' * row_number() OVER () FROM aioqueue.job WHERE %s",
        True,
    )
    await boss.rows(
        "INSERT INTO aioqueue.attempt (job_id, attempt, reason, error_message, finished_at)"
        " SELECT job_id, 1, 'error', 'broken', finished_at FROM aioqueue.outcome WHERE state = 'dead'"
    )
    await boss.enqueue(waiting)
    await boss.enqueue(waiting, delay=3600)
    await boss.rows("ANALYZE")


async def scanned(session: Session, name: str, params: Mapping[str, Any]) -> set[str]:
    """The tables that the statement's plan reads from end to end."""
    query = sql.SQL("EXPLAIN (FORMAT JSON) {}").format(session.store.sql[name])
    cursor = await session.conn.execute(query, params)
    row = await cursor.fetchone()
    assert row is not None
    found: set[str] = set()

    def walk(node: dict[str, Any]) -> None:
        if node["Node Type"] == "Seq Scan":
            found.add(node["Relation Name"])
        for child in node.get("Plans", []):
            walk(child)

    walk(row[0][0]["Plan"])
    return found
