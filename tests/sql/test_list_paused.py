"""list_paused: queues, then tenants."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_what_is_paused_and_no_more(one: Session) -> None:
    assert await one.store.list_paused(one.conn, limit=10) == []
    await one.limit("T", 4, paused=True)
    await one.limit("U", 4)
    for queue in ("b", "a", "c"):
        await one.store.set_queue(one.conn, queue, paused=True)
    await one.store.set_queue(one.conn, "c", paused=False)
    found = await one.store.list_paused(one.conn, limit=10)
    assert [(row["kind"], row["name"]) for row in found] == [("queue", "a"), ("queue", "b"), ("tenant", "T")]
