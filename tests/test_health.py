"""Health: probes over HTTP tell the truth, and refuse what they do not know."""

import asyncio

import pytest

from aioqueue.errors import ConfigurationError
from aioqueue.health import HealthServer

pytestmark = pytest.mark.anyio


async def ask(port: int, request: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split(" ")[1]), answer.partition("\r\n\r\n")[2]


async def test_ready_until_there_is_a_problem_and_alive_all_the_while() -> None:
    problems: list[str] = []
    async with HealthServer(lambda: problems).listen(0) as port:
        assert await ask(port, "GET /readyz HTTP/1.1\r\n\r\n") == (200, "ok\n")
        problems.append("the lease is in doubt")
        assert await ask(port, "GET /readyz?verbose HTTP/1.1\r\nHost: x\r\n\r\n") == (503, "the lease is in doubt\n")
        assert await ask(port, "GET /livez HTTP/1.1\r\n\r\n") == (200, "ok\n")
        problems.clear()
        assert (await ask(port, "HEAD /readyz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_other_paths_and_methods_are_refused() -> None:
    async with HealthServer(list).listen(0) as port:
        assert (await ask(port, "GET / HTTP/1.1\r\n\r\n"))[0] == 404
        assert (await ask(port, "GET /readyz/../x HTTP/1.1\r\n\r\n"))[0] == 404
        assert (await ask(port, "POST /readyz HTTP/1.1\r\n\r\n"))[0] == 405


async def test_a_client_that_leaves_or_says_too_much_harms_nobody() -> None:
    async with HealthServer(list).listen(0) as port:
        for junk in (b"", b"GET", b"x" * 200_000):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            writer.close()
        assert await ask(port, "GET /livez HTTP/1.1\r\n\r\n") == (200, "ok\n")


async def test_a_port_in_use_is_a_clear_error() -> None:
    async with HealthServer(list).listen(0) as port:
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with HealthServer(list).listen(port):
                pass
