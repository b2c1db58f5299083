"""paused_lanes: every lane of a paused queue, that of its suspects too."""

import pytest

from aioqueue.job import PRIORITIES, SUSPECT, lane
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_all_levels_of_what_is_paused(boss: Session, one: Session) -> None:
    lanes = "SELECT aioqueue.paused_lanes()"
    assert await boss.value(lanes) == []
    for queue in ("mail", "slow", "mail"):
        await one.store.set_queue(one.conn, queue, paused=True)
    await one.store.set_queue(one.conn, "slow", paused=False)
    assert sorted(await boss.value(lanes)) == sorted(lane("mail", level) for level in (*PRIORITIES, SUSPECT))
