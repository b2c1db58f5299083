"""known_tasks: what clients may name without a worker of their own."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_every_task_that_a_worker_registered(one: Session, guest: Session) -> None:
    assert await guest.store.known_tasks(guest.conn) == []
    for names in (["b", "a"], ["c", "a"]):
        await one.register(tasks=[{"name": name, "queue": "q", "priority": 0, "max_attempts": 1} for name in names])
    assert sorted(await guest.store.known_tasks(guest.conn)) == ["a", "b", "c"]
