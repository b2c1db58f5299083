"""No reading statement scans the history, or all that waits, with 100,000 finished jobs behind it."""

from uuid import UUID

import pytest

from tests.sql.engine import LANE, Session, text
from tests.sql.history import fill, scanned

pytestmark = pytest.mark.anyio

NONE = {"queue": None, "tenant": None, "task": None, "limit": 50}
DEFAULT = {**NONE, "window": 50}
FILTERED = {**NONE, "window": 10_000, "tenant": "3", "task": "t"}
BIG = {"job_default", "outcome_default", "attempt_default", "live", "scheduled"}


async def test_every_statement_keeps_to_indexes(boss: Session, one: Session) -> None:
    await fill(boss)
    job_id = UUID(int=1)
    statements = {
        "list_newest": [
            {**DEFAULT, "before": None, "state": None},
            {**DEFAULT, "before": job_id, "state": None},
            {**FILTERED, "before": None, "state": "succeeded"},
        ],
        "list_ended": [{**DEFAULT, "state": "dead"}, {**FILTERED, "state": "cancelled"}],
        "list_scheduled": [DEFAULT, FILTERED],
        "list_live": [
            {**DEFAULT, "lanes": None, "running": False},
            {**FILTERED, "lanes": f"{{{LANE}}}", "running": True},
        ],
        "show_job": [{"id": job_id, "tenant": None}],
        "list_attempts": [{"id": job_id, "limit": 50}],
        "count_lanes": [{"cap": 10_001}],
        "count_tenants": [{"cap": 10_001, "limit": 10}],
        "count_scheduled": [{"cap": 10_001}],
        "count_dead": [{"cap": 10_001}],
        "count_unknown_tasks": [{"cap": 10_001}],
        "list_workers": [{"cap": 10_001}],
        "list_handed_back": [{"cap": 10_001, "limit": 20}],
    }
    whole = {}
    for name, calls in statements.items():
        for params in calls:
            found = await scanned(one, name, params) & BIG
            if found:
                whole[name] = found
    assert whole == {}


async def test_the_check_can_fail(boss: Session, one: Session) -> None:
    await fill(boss, waiting=1)
    one.store.sql["whole"] = text("SELECT max(o.result::text) FROM aioqueue.outcome o", one.store.schema)
    assert "outcome_default" in await scanned(one, "whole", {})
