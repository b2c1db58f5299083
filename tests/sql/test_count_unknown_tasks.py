"""count_unknown_tasks: jobs that wait because nobody knew their task."""

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio


async def test_by_name_until_a_worker_knows_it(one: Session) -> None:
    await one.enqueue(2, task="mail")
    await one.enqueue(1, task="report")
    worker = await one.register()
    for job in await one.claim(worker):
        await one.record(worker, entry(job, "unknown task", d=60, s=True, u=job.task))
    found = await one.store.count_unknown_tasks(one.conn, cap=10)
    assert found == [{"task": "mail", "jobs": 2}, {"task": "report", "jobs": 1}]
    assert await one.store.count_unknown_tasks(one.conn, cap=1) == [{"task": "mail", "jobs": 1}]
    await one.register(tasks=[{"name": "mail", "queue": "default", "priority": 0, "max_attempts": 5}])
    assert await one.store.count_unknown_tasks(one.conn, cap=10) == [{"task": "report", "jobs": 1}]
