"""The database cannot be reached when a worker or an application starts: it is waited for, up to a limit, with one line."""

import asyncio
import contextlib
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from aioqueue import AioQueue, PoolSettings
from benchmarks.proxy import Proxy
from tests.kit import until_true
from tests.outage.scene import PATIENCE, make_scene
from tests.outage.server import OutageServer, free_port

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
APP = "import os\nfrom aioqueue import AioQueue\napp = AioQueue(schema=os.environ['AIOQUEUE_SCHEMA'])\n"


@contextlib.asynccontextmanager
async def worker(directory: Path, server: OutageServer, *arguments: str, port: int | None = None) -> AsyncIterator[Process]:
    """A worker process that is asked to start."""
    (directory / "told.py").write_text(APP + "@app.task\nasync def nothing() -> None: ...\n")
    dsn = server.tcp(port=port, connect_timeout="2")
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "aioqueue", "worker", "-A", "told:app", "--dsn", dsn, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}", "AIOQUEUE_SCHEMA": server.schema},
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line(process: Process, part: str) -> str:
    """Read what it says up to a line with this in it."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        while said := (await process.stderr.readline()).decode():
            if part in said:
                return said
    raise AssertionError(f"it ended without saying {part!r}")


async def probe(port: int, path: str) -> str:
    """Ask a health probe; the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


async def test_a_worker_waits_for_its_database_says_so_once_and_is_unhealthy_meanwhile(
    outage: OutageServer, proxy: Proxy, tmp_path: Path
) -> None:
    await asyncio.to_thread(outage.stop)
    async with worker(tmp_path, outage, "--health", "0", port=proxy.port) as process:
        (port,) = map(int, re.findall(r":(\d+)/livez", await line(process, "/livez")))
        await line(process, "cannot reach the database, and go on trying for 60 s")
        assert (await probe(port, "/livez")).startswith("HTTP/1.1 200")
        ready = await probe(port, "/readyz")
        assert ready.startswith("HTTP/1.1 503") and "cannot reach the database: " in ready
        tried = proxy.accepted
        await until_true(lambda: proxy.accepted >= tried + 3)
        await asyncio.to_thread(outage.start)
        assert process.stderr is not None
        assert b"serves" in await process.stderr.readline(), "and nothing else was said"

        async def is_ready() -> bool:
            return (await probe(port, "/readyz")).startswith("HTTP/1.1 200")

        await until_true(is_ready)
        process.terminate()
        assert await process.wait() == 0


@pytest.mark.parametrize("kind", ["down", "hung"])
async def test_a_worker_gives_up_after_its_limit_with_code_1(outage: OutageServer, tmp_path: Path, kind: str) -> None:
    if kind == "hung":
        outage.hold_still()
    port = free_port() if kind == "down" else None
    async with worker(tmp_path, outage, "--start-timeout", "0.5", port=port) as process:
        async with asyncio.timeout(PATIENCE):
            _, said = await process.communicate()
    assert process.returncode == 1
    *before, last = said.decode().splitlines()
    assert last.startswith("error: cannot reach the database: ")
    assert len(before) <= 1, "a server that hangs has had its one chance when the limit is over"


async def test_a_signal_ends_the_wait_at_once(outage: OutageServer, tmp_path: Path) -> None:
    async with worker(tmp_path, outage, port=free_port()) as process:
        await line(process, "cannot reach")
        process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_an_application_has_an_error_after_the_limit_and_stays_closed() -> None:
    app = AioQueue(f"postgresql://nobody@127.0.0.1:{free_port()}/nowhere", pool=PoolSettings(start_timeout=0.3))
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        await app.open()
    assert time.monotonic() - began >= 0.3
    assert not app.is_open
    with pytest.raises(psycopg.OperationalError, match="refused"):
        async with app.worker():
            pass
    assert not app.is_open


async def test_an_application_that_is_opened_before_its_database_is_there_waits_and_works(
    outage: OutageServer, caplog: pytest.LogCaptureFixture
) -> None:
    scene = make_scene(outage)
    await asyncio.to_thread(outage.stop)
    opening = asyncio.create_task(scene.app.open())
    await until_true(lambda: caplog.records)
    worker = scene.app.worker()
    assert "cannot reach the database" in worker.problems()[0]
    await asyncio.to_thread(outage.start)
    await opening
    async with worker:
        job = await scene.quick.enqueue(7)
        assert await job.result(timeout=PATIENCE) == 7
    await scene.app.close()
    assert len([record for record in caplog.records if "cannot reach" in record.message]) == 1


async def test_a_host_that_is_cancelled_while_it_waits_ends_at_once() -> None:
    app = AioQueue(f"postgresql://nobody@127.0.0.1:{free_port()}/nowhere")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await app.open()
    assert not app.is_open
