"""How an idle worker learns of work: a wake-up from another process, or the poll where nobody sent one."""

import pytest

from tests.flow.processes import Flow
from tests.flow.tasks import made

pytestmark = pytest.mark.anyio


async def test_an_enqueue_of_another_process_wakes_an_idle_worker_up(flow: Flow) -> None:
    # Nothing but the wake-up could start them within the patience of this test: the polls are an hour apart.
    worker = await flow.start(poll=3600)
    async with made(flow.dsn, schema=flow.schema) as app:
        for number in range(3):
            job = await app.get("quick").enqueue(number=number)
            await flow.until_ended([job.id])
            assert await job.result(timeout=30) == number
    assert worker.process.poll() is None


async def test_an_enqueue_in_plain_sql_is_found_by_the_poll(flow: Flow) -> None:
    await flow.start(poll=1)
    for _ in range(3):
        # Nobody sends a hint.
        job = await flow.value("aioqueue.enqueue('quick')")
        await flow.until_ended([job])
        waited = await flow.value("extract(epoch FROM started_at - created_at)::float FROM aioqueue.jobs WHERE id = %s", job)
        assert waited < 30, "a poll is a second"
