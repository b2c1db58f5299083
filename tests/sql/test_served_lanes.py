"""served_lanes: every lane of the queues that somebody serves."""

import pytest

from aioqueue.job import lane
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio
SERVED = "SELECT aioqueue.served_lanes()"


async def test_of_those_that_live(boss: Session) -> None:
    assert await boss.value(SERVED) is None
    await boss.register()
    await boss.rows("SELECT aioqueue.register_worker(3, 'h', 1, '', '{a,default}', 1, 60, '[]')")
    served = await boss.value(SERVED)
    assert sorted(served) == sorted(lane(queue, level) for queue in ("a", "default") for level in (-2, -1, 0, 1, 2, 9))
    await boss.end_lease(3)
    assert lane("a", 0) not in await boss.value(SERVED)
