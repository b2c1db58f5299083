"""publish: virtual time goes forward only, and nobody waits for it."""

import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session, changed

pytestmark = pytest.mark.anyio


async def test_never_back(boss: Session) -> None:
    seen = []
    for vt in (1_000, 500, 3_000, None, 2_999, 3_000):
        await boss.rows("SELECT aioqueue.publish(7, %s::bigint)", vt)
        seen.append(await boss.value("SELECT aioqueue.virtual_time(7)"))
    assert seen == [1_000, 1_000, 3_000, 3_000, 3_000, 3_000]


async def test_a_rollback_does_not_take_it_back(boss: Session, one: Session) -> None:
    await boss.begin()
    await boss.publish(4_000, 7)
    await boss.rollback()
    assert await boss.value("SELECT aioqueue.virtual_time(7)") == 4_000


async def test_a_held_cell_is_left_to_its_holder(boss: Session, connect: Connect) -> None:
    other = await connect("owner")
    await other.rows("SET lock_timeout = '1ms'")
    await boss.begin()
    await boss.publish(4_000, 7)
    await other.publish(9_000, 7)
    await other.publish(9_000, 8)
    assert [await other.value("SELECT aioqueue.virtual_time(%s)", n) for n in (7, 8)] == [4_000, 9_000]
    await boss.commit()


async def test_sabotaged_without_the_comparison_it_goes_back(boss: Session) -> None:
    await boss.publish(4_000, 7)
    async with changed(boss, "publish", ("aioqueue.virtual_time(p_lane) < p_vt", "true")):
        await boss.publish(1_000, 7)
    assert await boss.value("SELECT aioqueue.virtual_time(7)") == 1_000
