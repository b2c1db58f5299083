"""virtual_time: a lane's cell, outside transactions."""

import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_a_lane_that_nothing_moved_is_at_zero(boss: Session) -> None:
    for lane in (0, 1, -1, 2**63 - 1, -(2**63)):
        assert await boss.value("SELECT aioqueue.virtual_time(%s)", lane) == 0


async def test_lanes_with_equal_low_bits_share_a_cell_and_others_do_not(boss: Session) -> None:
    await boss.publish(5_000, 7)
    found = [await boss.value("SELECT aioqueue.virtual_time(%s)", lane) for lane in (7, 7 + 1024, 7 - 1024, 8)]
    assert found == [5_000, 5_000, 5_000, 0]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_an_old_snapshot_reads_todays(boss: Session, connect: Connect, level: str) -> None:
    old = await connect("owner")
    await old.begin(level)
    assert await old.value("SELECT aioqueue.virtual_time(7)") == 0
    await boss.publish(5_000, 7)
    assert await old.value("SELECT aioqueue.virtual_time(7)") == 5_000
    await old.rollback()
