"""The plans that really run inside the functions: auto_explain's nested plans, caught as notices.

The data set is made once: 100,000 rows in every table, never analysed, no autovacuum.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

from aioqueue.job import lane
from aioqueue.sql import as_sql

ROWS = 100_000
LANE = lane("default", 0)
CLAIMED = 20_000
WORKER = 4_711
Node = dict[str, Any]

ID = """
CREATE FUNCTION pg_temp.id(part integer, n integer) RETURNS uuid LANGUAGE sql AS
    $$ SELECT (lpad(to_hex(part), 8, '0') || lpad(to_hex(n), 4, '0') || '7000' || '8000' || lpad(to_hex(n), 12, '0'))::uuid $$;
"""
FILL = """
ALTER TABLE aioqueue.live SET (autovacuum_enabled = off);
ALTER TABLE aioqueue.scheduled SET (autovacuum_enabled = off);
ALTER TABLE aioqueue.job_default SET (autovacuum_enabled = off);
ALTER TABLE aioqueue.outcome_default SET (autovacuum_enabled = off);
ALTER TABLE aioqueue.attempt_default SET (autovacuum_enabled = off);
INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at)
SELECT pg_temp.id(part, n), 't', 'default', 'T' || n % 500, 0, 5, '{}', now()
  FROM generate_series(1, 3) part, generate_series(1, :rows) n;
INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, worker, claimed_at)
SELECT :lane, n * 100, pg_temp.id(1, n), 'T' || n % 500, CASE WHEN n <= :claimed THEN 1 ELSE 0 END,
       CASE WHEN n <= :claimed THEN :worker END, CASE WHEN n <= :claimed THEN now() END FROM generate_series(1, :rows) n;
INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)
SELECT '2020-01-01Z'::timestamptz + n * interval '1 hour', pg_temp.id(2, n), :lane, 'T' || n % 500
  FROM generate_series(1, :rows) n;
INSERT INTO aioqueue.outcome (job_id, state, attempt, spared, result, finished_at)
SELECT pg_temp.id(3, n), CASE WHEN n % 10 = 0 THEN 'dead' ELSE 'succeeded' END, 1, 0, '1', now()
  FROM generate_series(1, :rows) n;
INSERT INTO aioqueue.attempt (job_id, attempt, reason, error_type, finished_at)
SELECT pg_temp.id(3, n), 1, 'error', 'E', now() FROM generate_series(1, :rows) n;
INSERT INTO aioqueue.worker (id, host, pid, version, queues, concurrency, started_at, beat_at, lease_until)
VALUES (:worker, 'h', 1, '0', '{}', 1, now(), now(), now() + interval '1 day');
"""

TABLES = ("live", "scheduled", "job_default", "outcome_default", "attempt_default")
ANALYZE = "ANALYZE " + ", ".join(f"aioqueue.{table}" for table in TABLES) + ";"
EMPTY = """
CREATE TEMP TABLE few AS SELECT n FROM generate_series(1, :rows) n
 WHERE n <= 500 OR n BETWEEN :claimed - 60 AND :claimed + 200 OR n BETWEEN 50000 AND 50200 OR n > :rows - 500;
CREATE TEMP TABLE few_ids AS SELECT pg_temp.id(part, n) AS id FROM generate_series(1, 3) part, few;
DELETE FROM aioqueue.live WHERE job_id NOT IN (SELECT id FROM few_ids);
DELETE FROM aioqueue.scheduled WHERE job_id NOT IN (SELECT id FROM few_ids);
DELETE FROM aioqueue.job WHERE id NOT IN (SELECT id FROM few_ids);
DELETE FROM aioqueue.outcome WHERE job_id NOT IN (SELECT id FROM few_ids);
DELETE FROM aioqueue.attempt WHERE job_id NOT IN (SELECT id FROM few_ids);
"""
SAVE = "".join(f"CREATE TEMP TABLE kept_{table} AS SELECT * FROM aioqueue.{table};" for table in TABLES)
TRUNCATE = "".join(f"TRUNCATE aioqueue.{table};" for table in TABLES)
PUT_BACK = "".join(f"INSERT INTO aioqueue.{table} SELECT * FROM kept_{table};" for table in TABLES)
BY_JOB = ("live_pkey", "live_job")
"""A running job's row is found by its position or, as well, by its id."""
STATES = {
    "never analysed": "",
    "emptied after ANALYZE": ANALYZE + EMPTY,
    "emptied, then ANALYZE": EMPTY + ANALYZE,
    "filled after ANALYZE": SAVE + TRUNCATE + ANALYZE + PUT_BACK,
    "truncated and begun anew": ANALYZE + EMPTY + SAVE + TRUNCATE + PUT_BACK,
}
"""What was done to the full tables; none is vacuumed, and nobody looks at them by himself."""


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.get("Plans", ()):
        yield from walk(child)


@dataclass
class Plans:
    """What ran for one call, outermost statement last."""

    found: list[Node] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        for plan in self.found:
            yield from walk(plan["Plan"])

    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    def check(
        self, *indexes: str | tuple[str, ...], small: tuple[str, ...] = ("worker", "cancel", "task", "queue", "limits", "tenant")
    ) -> None:
        """Each index is used, of several one; nothing but an index reads any but the small tables; no table's rows are sorted."""
        for index in indexes:
            one_of = {index} if isinstance(index, str) else set(index)
            assert one_of & self.indexes(), f"{index} expected, got {self.indexes()}"
        for node in self.nodes():
            kind = node["Node Type"]
            if kind in ("Seq Scan", "Bitmap Heap Scan"):
                assert node["Relation Name"] in small, node
            if "Sort" in kind:
                tables = {child["Relation Name"] for child in walk(node) if "Relation Name" in child}
                assert not tables, f"{kind} of rows of {tables}"
            if "Join" in kind:
                assert kind not in ("Hash Join", "Merge Join"), node

    def rows_touched(self) -> int:
        """The largest number of rows that one scan of a table returned or threw away."""
        return max(
            int(
                (
                    node.get("Actual Rows", 0)
                    + node.get("Rows Removed by Filter", 0)
                    + node.get("Rows Removed by Index Recheck", 0)
                )
                * node.get("Actual Loops", 1)
            )
            for node in self.nodes()
            if "Relation Name" in node
        )


class Watched:
    """A superuser's session whose every nested plan is caught."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.schema = schema
        self.conn = psycopg.connect(dsn, autocommit=True)
        self.caught = Plans()
        self.conn.add_notice_handler(self._take)
        try:
            self.conn.execute("LOAD 'auto_explain'")
        except psycopg.errors.UndefinedFile:
            version = self.conn.info.server_version // 10_000
            self.conn.close()
            if version != 16:
                raise
            pytest.skip("the package with PostgreSQL 16 has no auto_explain: another version shows the plans")
        for name, value in {
            "log_min_duration": "0", "log_nested_statements": "on", "log_analyze": "on", "log_buffers": "on", "log_timing": "off",
            "log_format": "json", "log_level": "notice",
        }.items():  # fmt: skip
            self.conn.execute(as_sql(f"SET auto_explain.{name} = '{value}'", schema))

    def _take(self, notice: psycopg.errors.Diagnostic) -> None:
        _, marker, plan = (notice.message_primary or "").partition("plan:\n")
        if marker:
            self.caught.found.append(json.loads(plan))

    def run(self, statement: str, *params: object, keep: bool = False) -> tuple[Plans, list[tuple[Any, ...]]]:
        """Call one function; its plans and rows. Nothing of it stays unless asked for."""
        self.caught = Plans()
        with self.conn.transaction(force_rollback=not keep):
            cursor = self.conn.execute(as_sql(statement, self.schema), params or None)
            rows = cursor.fetchall() if cursor.description else []
        return self.caught, rows

    def close(self) -> None:
        self.conn.close()


def fill(dsn: str, schema: str) -> None:
    """Make the data set; quick, since it goes around the functions."""
    change(dsn, schema, FILL)


def change(dsn: str, schema: str, statements: str) -> None:
    """Run these on the data set."""
    statements = ID + statements
    for name, value in {"rows": ROWS, "lane": LANE, "claimed": CLAIMED, "worker": WORKER}.items():
        statements = statements.replace(f":{name}", str(value))
    with psycopg.connect(dsn) as conn:
        conn.execute(as_sql(statements, schema))


def job_id(part: int, n: int) -> str:
    """The id of row n: part 1 live, 2 scheduled, 3 ended."""
    return f"{part:08x}-{n:04x}-7000-8000-{n:012x}"
