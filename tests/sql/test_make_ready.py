"""make_ready: new positions, a step apart for one (lane, tenant), in the order given. XID first: test_tick.py."""

from uuid import uuid4

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_lanes_and_tenants_of_a_batch_are_spread_each_for_itself(boss: Session) -> None:
    ids = [uuid4() for _ in range(6)]
    lanes, tenants = [1, 1, 2, 1, 1, 2], ["a", "a", "a", "b", "a", "a"]
    await boss.rows(
        "SELECT aioqueue.make_ready(%s::bigint[], %s::uuid[], %s::text[], %s::integer[], %s::integer[])",
        lanes, ids, tenants, [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0],
    )  # fmt: skip
    rows = {
        row[0]: row[1:] for row in await boss.rows("SELECT job_id, lane, vt, tenant, attempt, spared, worker FROM aioqueue.live")
    }
    vts = [1_000, 2_000, 1_000, 1_000, 3_000, 2_000]
    assert rows == {ids[n]: (lanes[n], vts[n], tenants[n], n, 5 - n, None) for n in range(6)}
