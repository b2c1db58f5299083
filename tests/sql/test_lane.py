"""lane: the same number in SQL and in the client, for ever."""

import pytest

from aioqueue.job import lane
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("queue", ["default", "q", "a b", "Ünï 🐘", "x" * 200, "'\"\\%"])
async def test_sql_and_client_agree(one: Session, queue: str) -> None:
    for priority in (-2, -1, 0, 1, 2, 9):
        assert await one.value("SELECT aioqueue.lane(%s, %s)", queue, priority) == lane(queue, priority)


async def test_the_number_stays_what_it_is(one: Session) -> None:
    """It stands in stored rows."""
    assert await one.value("SELECT aioqueue.lane('default', 0)") == lane("default", 0) == -515155160543296198
