"""How an idle worker learns of work: a wake-up from another process, or the poll where nobody sent one."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from psycopg import AsyncConnection, sql

from tests.flow.processes import Flow
from tests.flow.tasks import made
from tests.kit import PATIENCE, until, until_true
from tests.postgres import Server
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_an_enqueue_of_another_process_wakes_an_idle_worker_up(flow: Flow) -> None:
    # Nothing but the wake-up could start them within the patience of this test: the polls are an hour apart.
    worker = await flow.start(lease=30, poll=3600)
    async with made(flow.dsn, schema=flow.schema) as app:
        for number in range(3):
            job = await app.get("quick").enqueue(number=number)
            await flow.until_ended([job.id])
            assert await job.result(timeout=30) == number
    assert worker.process.poll() is None


async def test_an_enqueue_in_plain_sql_is_found_by_the_poll(flow: Flow) -> None:
    await flow.start(lease=30, poll=1)
    for _ in range(3):
        # Nobody sends a hint.
        job = await flow.value("aioqueue.enqueue('quick')")
        await flow.until_ended([job])
        waited = await flow.value("extract(epoch FROM started_at - created_at)::float FROM aioqueue.jobs WHERE id = %s", job)
        assert waited < 30, "a poll is a second"


async def test_a_worker_whose_listening_session_is_ended_again_and_again_is_woken_up_all_the_same(
    flow: Flow, superuser_dsn: str
) -> None:
    worker = await flow.start(lease=30, poll=3600)
    listens = "FROM pg_stat_activity WHERE application_name = 'aioqueue' AND query LIKE 'LISTEN%%' AND pid <> ALL (%s)"
    ended: list[int] = []
    async with (
        await AsyncConnection.connect(superuser_dsn, autocommit=True) as boss,
        made(flow.dsn, schema=flow.schema) as app,
    ):

        async def listener() -> int:
            async def found() -> Any:
                return await (await boss.execute(f"SELECT pid {listens}", (ended,))).fetchone()

            (pid,) = await until_true(found)
            return int(pid)

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
    await flow.start("-q", queue, lease=30, poll=3600)
    async with made(flow.dsn, schema=flow.schema) as app:
        task = app.get("quick").options(queue=queue, tenant="\N{OWL}" * 200)
        first = await task.enqueue(number=1)
        await flow.until_ended([first.id])
        many = await task.enqueue_many([{"number": number} for number in range(2000)])
        large = await app.get("weigh").options(queue=queue).enqueue(text="\N{OWL}" * 240_000)
        assert await large.result(timeout=PATIENCE) == 240_000
        await flow.until_ended([job.id for job in many])


async def test_a_listening_session_that_is_ended_forty_times_is_one_at_every_moment(flow: Flow, superuser: Session) -> None:
    worker = await flow.start("--log-level", "debug", lease=30, poll=3600)
    listening = "FROM pg_stat_activity WHERE application_name = 'aioqueue' AND query LIKE 'LISTEN%%'"
    for number in range(40):
        await worker.logged("listening for wake-ups", number + 1)
        await until(superuser, f"SELECT count(*) = 1 {listening}")
        assert await superuser.value(f"SELECT count(pg_terminate_backend(pid, 5000)) {listening}") == 1
    await worker.logged("listening for wake-ups", 41)
    await until(superuser, f"SELECT count(*) = 1 {listening}")
    assert await superuser.value("SELECT count(*) <= 6 FROM pg_stat_activity WHERE application_name = 'aioqueue'")


async def test_commits_do_not_wait_for_notifications_of_others(own_server: tuple[Server, Flow, str]) -> None:
    """A commit with a NOTIFY keeps all others of the server waiting while it lasts; an enqueue and an outcome have none."""
    _, flow, owner = own_server
    superuser = flow.dsn.replace("aioqueue_worker", "postgres")
    async with await AsyncConnection.connect(superuser, autocommit=True) as boss:
        await boss.execute("ALTER ROLE ALL SET synchronous_commit = local")
        worker = await flow.start(lease=30, poll=0.5)
        # The commit of `stands` waits for a standby that there is not, and holds the lock meanwhile.
        await boss.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        await boss.execute("SELECT pg_reload_conf()")
        async with (
            await AsyncConnection.connect(superuser, autocommit=True) as stands,
            await AsyncConnection.connect(owner, autocommit=True) as enqueuer,
        ):
            await stands.execute("SET synchronous_commit = on")
            async with asyncio.timeout(PATIENCE):
                while True:  # the server has the setting a moment later
                    hangs = asyncio.create_task(
                        stands.execute("INSERT INTO flow.counted VALUES (gen_random_uuid()); NOTIFY something")
                    )
                    if not (await asyncio.wait([hangs], timeout=0.3))[0]:
                        break
            try:
                task = sql.SQL("SELECT {}.enqueue('quick')").format(sql.Identifier(flow.schema))
                jobs: list[UUID] = []
                async with asyncio.timeout(PATIENCE):
                    for _ in range(20):
                        async with enqueuer.transaction():
                            jobs += await (await enqueuer.execute(task)).fetchone() or ()
                await flow.until_ended(jobs)
                assert not hangs.done()
                assert worker.process.poll() is None
            finally:
                await boss.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await boss.execute("SELECT pg_reload_conf()")
                await hangs
