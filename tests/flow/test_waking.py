"""How an idle worker learns of work: a wake-up from another process, or the poll where nobody sent one."""

import asyncio

import pytest
from psycopg import AsyncConnection

from tests.flow.processes import Flow
from tests.flow.tasks import made
from tests.kit import PATIENCE

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


async def test_a_worker_whose_listening_session_is_ended_again_and_again_is_woken_up_all_the_same(
    flow: Flow, superuser_dsn: str
) -> None:
    worker = await flow.start(poll=3600)
    listens = "FROM pg_stat_activity WHERE application_name = 'aioqueue' AND query LIKE 'LISTEN%%' AND pid <> ALL (%s)"
    ended: list[int] = []
    async with (
        await AsyncConnection.connect(superuser_dsn, autocommit=True) as boss,
        made(flow.dsn, schema=flow.schema) as app,
    ):

        async def listener() -> int:
            async with asyncio.timeout(PATIENCE):
                while (row := await (await boss.execute(f"SELECT pid {listens}", (ended,))).fetchone()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return int(row[0])

        for number in range(5):
            ended.append(await listener())
            await boss.execute("SELECT pg_terminate_backend(%s, 5000)", (ended[-1],))
            await listener()
            # No poll is near: the new session hears of it, or its first look finds it.
            job = await app.get("quick").enqueue(number=number)
            await flow.until_ended([job.id])
        await worker.logged("the listener cannot reach the database")
        count = await boss.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aioqueue' AND query LIKE 'LISTEN%'"
        )
        assert await count.fetchone() == (1,), "an old session ends before a new one begins"
    assert worker.log.count("the listener cannot reach the database") == 5


async def test_names_and_payloads_of_any_size_wake_a_worker_up(flow: Flow) -> None:
    queue = "\N{OWL}" * 200
    await flow.start("-q", queue, poll=3600)
    async with made(flow.dsn, schema=flow.schema) as app:
        task = app.get("quick").options(queue=queue, tenant="\N{OWL}" * 200)
        first = await task.enqueue(number=1)
        await flow.until_ended([first.id])
        many = await task.enqueue_many([{"number": number} for number in range(2000)])
        large = await app.get("weigh").options(queue=queue).enqueue(text="\N{OWL}" * 240_000)
        assert await large.result(timeout=PATIENCE) == 240_000
        await flow.until_ended([job.id for job in many])
