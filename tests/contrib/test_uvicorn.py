"""The router and the worker in the lifespan under the real server: reloads, several processes, failures, open streams."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from tests.kit import PATIENCE, passed, until, until_true
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

LIVE = "SELECT count(*) = %s FROM aioqueue.worker WHERE NOT dead"


class Served:
    """A server's process, and a client of it."""

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.directory = directory
        transport = httpx.AsyncHTTPTransport(uds=str(directory / "socket"))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://web", timeout=PATIENCE)

    async def answer(self, path: str, *, method: str = "GET") -> Any:
        """What the server answers; where it is starting, once it has."""
        response = await self.http.request(method, path)
        response.raise_for_status()
        return response.json()

    async def state(self, job_id: str, state: str) -> Any:
        """Follow the job until it is in that state, in the next process where one ends meanwhile; what is told of it then."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    async with self.http.stream("GET", f"/jobs/{job_id}/events") as response:
                        async for line in response.aiter_lines():
                            if line.startswith("data: ") and (view := json.loads(line[6:]))["state"] == state:
                                return view
                assert self.process.returncode is None, "the server has ended"

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Wait for the end after a signal; the exit code."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(worker_dsn: str, schema: str) -> Serve:
    """Starts uvicorn on a copy of web.py."""

    @asynccontextmanager
    async def serving(*options: str, **environ: str) -> AsyncIterator[Served]:
        directory = Path(tempfile.mkdtemp(prefix="aioqueue-web-", dir="/tmp"))
        shutil.copy(Path(__file__).with_name("web.py"), directory)
        environment = {**os.environ, "AIOQUEUE_DSN": worker_dsn, "AIOQUEUE_SCHEMA": schema, **environ}
        # Who connects before the server has started waits for it.
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(directory / "socket"))
            listening.listen()
            number = listening.fileno()
            command = ["-m", "uvicorn", "web:web", "--fd", str(number), "--log-level", "warning", *options]
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, cwd=directory, env=environment, start_new_session=True, pass_fds=[number]
            )
        served = Served(process, directory)
        try:
            yield served
        finally:
            await served.http.aclose()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            shutil.rmtree(directory)

    return serving


async def test_a_reload_hands_its_jobs_to_the_new_process(serve: Serve) -> None:
    async with serve("--reload") as served:
        job_id = await served.answer("/hold", method="POST")
        await served.state(job_id, "running")
        code = served.directory / "web.py"
        code.write_text(code.read_text().replace('"WEB_VERSION", "1"', '"WEB_VERSION", "2"'))
        view = await served.state(job_id, "succeeded")
        assert (view["result"], view["attempt"]) == (2, 2)


async def test_a_job_of_a_server_that_was_killed_ends_with_one_result_after_the_restart(serve: Serve, boss: Session) -> None:
    async with serve(WEB_LEASE="2") as served:
        job_id = await served.answer("/hold", method="POST")
        await served.state(job_id, "running")
        await served.end(signal.SIGKILL)
    assert await boss.value("SELECT count(*) FROM aioqueue.outcome") == 0
    async with serve(WEB_VERSION="2") as served:
        assert (await served.state(job_id, "succeeded"))["result"] == 2
    assert await boss.value("SELECT count(*) FROM aioqueue.outcome WHERE job_id = %s", UUID(job_id)) == 1


async def test_several_processes_share_the_jobs_and_leave_no_worker_behind(serve: Serve, boss: Session) -> None:
    async with serve("--workers", "2", "--timeout-worker-healthcheck", "60") as served:
        await until(boss, LIVE, 2)
        pids = {pid for (pid,) in await boss.rows("SELECT pid FROM aioqueue.worker WHERE NOT dead")}
        job_ids = [await served.answer("/process", method="POST") for _ in range(20)]
        results = [(await served.state(job_id, "succeeded"))["result"] for job_id in job_ids]
        assert set(results) <= pids
        await served.end()
        assert await boss.value(LIVE, 0)


async def test_a_lifespan_that_fails_ends_the_server_and_hands_its_jobs_back(serve: Serve, boss: Session) -> None:
    job_id = await boss.enqueue_one(task="hold")
    async with serve(WEB_FAILS="1") as served:
        assert await served.ended() == 3  # uvicorn's word for an application that did not start
    assert await boss.rows("SELECT state, attempt, spared FROM aioqueue.jobs WHERE id = %s", job_id) == [("ready", 1, 1)]
    assert await boss.value(LIVE, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_open_streams_do_not_keep_the_server(serve: Serve, boss: Session, number: signal.Signals) -> None:
    async with serve() as served:
        job_id = await served.answer("/hold", method="POST")
        each = [asyncio.Event() for _ in range(3)]
        following = [asyncio.create_task(follow(served, job_id, begun)) for begun in each]
        for begun in each:
            await passed(begun)
        await served.end(number)
        for lines in await asyncio.gather(*following):
            names = [line for line in lines if line.startswith("event")]
            assert names[-2:] == ["event: state", "event: progress"]
            assert any('"progress":{"value":0.5,"message":"half"}' in line for line in lines)
    assert await boss.state(UUID(job_id)) == "ready"
    assert await boss.value(LIVE, 0)


async def test_followers_who_leave_leave_nothing(serve: Serve) -> None:
    async with serve() as served:
        job_id = await served.answer("/hold", method="POST")
        each = [asyncio.Event() for _ in range(3)]
        following = [asyncio.create_task(follow(served, job_id, begun)) for begun in each]
        for begun in each:
            await passed(begun)
        assert await served.answer("/waiting") == [1]
        for task in following:
            task.cancel()
        await asyncio.wait(following)

        async def nobody_waits() -> bool:
            return bool(await served.answer("/waiting") == [0])

        await until_true(nobody_waits)


async def follow(served: Served, job_id: str, begun: asyncio.Event) -> list[str]:
    lines = []
    async with served.http.stream("GET", f"/jobs/{job_id}/events") as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if line in ("event: progress", "event: result"):
                begun.set()
    return lines


async def test_a_stream_ends_with_the_result(serve: Serve) -> None:
    async with serve() as served:
        job_id = await served.answer("/process", method="POST")
        lines = await follow(served, job_id, asyncio.Event())
        assert "event: result" in lines
        assert any(f'"result":{served.process.pid}' in line for line in lines)
