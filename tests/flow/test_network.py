"""The network between a worker process and its database: it swallows everything, refuses, or is not there from the start."""

import asyncio
import re
import signal

import pytest

from benchmarks.proxy import Proxy
from tests.flow.processes import Flow
from tests.flow.tasks import made

pytestmark = pytest.mark.anyio

LISTENER_LOST = "the listener cannot reach the database"
LISTENER_BACK = "the listener reaches the database again"


async def test_a_half_open_connection_is_noticed_and_wake_ups_are_heard_again(flow: Flow, proxy: Proxy) -> None:
    # No poll is near; whatever starts was woken up.
    worker = await flow.start(lease=6, poll=3600, probe=0.5)
    assert flow.evidence is not None
    async with made(flow.evidence, schema=flow.schema) as app:
        first = await app.get("quick").enqueue(number=1)
        await flow.until_ended([first.id])
        proxy.mode = "swallow"
        await worker.logged(LISTENER_LOST)
        proxy.mode = "pass"
        await worker.logged(LISTENER_BACK)
        for number in range(3):
            job = await app.get("quick").enqueue(number=number)
            await flow.until_ended([job.id])
    assert worker.log.count(LISTENER_LOST) == 1


async def test_a_database_that_is_away_makes_no_busy_loop_and_few_words(flow: Flow, proxy: Proxy) -> None:
    worker = await flow.start()
    await worker.logged("serves")
    lines, connections = len(worker.log.splitlines()), proxy.accepted
    proxy.mode = "refuse"
    proxy.cut()
    await asyncio.sleep(5)  # that long it is away
    assert worker.process.poll() is None
    assert 0 < proxy.accepted - connections < 60, "some dozen tries of each loop, not thousands"
    assert len(worker.log.splitlines()) - lines <= 12
    proxy.mode = "pass"
    (job,) = await flow.enqueue("quick")
    await flow.until_ended([job])


async def test_an_outage_longer_than_the_lease_ends_no_worker(flow: Flow, proxy: Proxy) -> None:
    worker = await flow.start(lease=1)
    jobs = await flow.enqueue("hold", 3)
    await flow.until_started(3)
    proxy.mode = "refuse"
    proxy.cut()
    await flow.until("lease_until + interval '1 s' < clock_timestamp() FROM aioqueue.worker WHERE pid = %s", worker.pid)
    proxy.mode = "pass"
    flow.gate.open()
    jobs += await flow.enqueue("quick", 3)
    await flow.until_ended(jobs)
    assert {state for state, _ in (await flow.outcomes()).values()} == {"succeeded"}
    assert worker.process.poll() is None
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_stop_ends_in_time_while_the_network_swallows_everything(flow: Flow, proxy: Proxy) -> None:
    worker = await flow.start("--grace", "0.5", lease=30)
    (job,) = await flow.enqueue("for_ever")
    await flow.until_started(1)
    proxy.mode = "swallow"
    worker.signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await worker.ended() == 1, "it could not say what became of its job"
    assert await flow.owner.state(job) == "running", "its lease decides"
    assert "Traceback" not in worker.log


async def test_a_worker_that_cannot_reach_its_database_is_unhealthy_and_gives_up_after_its_limit(
    flow: Flow, proxy: Proxy
) -> None:
    proxy.mode = "swallow"
    worker = await flow.start("--health", "0", "--start-timeout", "3", ready=False)
    await worker.logged("cannot reach the database")
    found = re.search(r":(\d+)/livez", worker.log)
    assert found is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", int(found[1]))
    writer.write(b"GET /readyz HTTP/1.1\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 503")
    assert "cannot reach the database" in answer
    assert await worker.ended() == 1
    assert worker.log.splitlines()[-1].startswith("error: cannot reach the database: ")
