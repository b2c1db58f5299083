"""count_parked: what waits for which limit, and how many run under it."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_by_limit_the_longest_line_first(one: Session) -> None:
    assert await one.store.count_parked(one.conn, cap=100) == []
    await one.limit_task("t", 2, per_key=1)
    await one.limit("T", 1)
    await one.enqueue(4, task="v", tenant="T")
    await one.enqueue(3, task="t", key="k", tenant="U")
    await one.enqueue(2, task="v", tenant="V")
    worker = await one.register()
    await one.claim(worker, 20)
    await one.limit("V", None, paused=True)
    await one.enqueue(1, task="v", tenant="V")
    await one.claim(worker, 20)
    rows = [tuple(row.values()) for row in await one.store.count_parked(one.conn, cap=100)]
    assert rows == [
        ("tenant", "T", None, 1, False, 3, 1),
        ("key", "t", "k", 1, False, 2, 1),
        ("tenant", "V", None, None, True, 1, 0),
    ]
    await one.limit("T", None)
    rows = [tuple(row.values()) for row in await one.store.count_parked(one.conn, cap=100)]
    assert rows[0] == ("none", "T", None, None, False, 3, 1), "until it is swept"
    assert sum(row["jobs"] for row in await one.store.count_parked(one.conn, cap=4)) == 4
