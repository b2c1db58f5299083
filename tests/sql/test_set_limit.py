"""set_limit: one row per limit, none where there is nothing to hold, unsettled whenever it changes."""

import pytest

from tests.sql.engine import Session, limit_key

pytestmark = pytest.mark.anyio
SET = "SELECT aioqueue.set_limit(%s, %s, %s, %s)"
ROWS = "SELECT kind, name, max_running, paused, settled FROM aioqueue.limits ORDER BY kind, name"


async def test_written_only_when_it_changes(boss: Session) -> None:
    assert await boss.value(SET, "task", "t", None, False) is False
    assert await boss.value(SET, "task", "t", 5, False) is True
    assert await boss.rows(ROWS) == [("task", "t", 5, False, False)]
    await boss.store.settle_limits(boss.conn)
    assert await boss.value(SET, "task", "t", 5, False) is False
    assert await boss.rows(ROWS) == [("task", "t", 5, False, True)]
    assert await boss.value(SET, "task", "t", 4, False) is True
    assert await boss.value(SET, "tenant", "t", None, True) is True
    assert await boss.rows(ROWS) == [("task", "t", 4, False, False), ("tenant", "t", None, True, False)]
    assert await boss.value(SET, "task", "t", None, False) is True
    assert await boss.rows(ROWS) == [("tenant", "t", None, True, False)]
    assert await boss.value("SELECT key FROM aioqueue.limits") == limit_key("tenant", "t")
