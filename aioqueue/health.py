"""Answers probes of a worker over HTTP: /livez (the process turns) and /readyz (it can do its work), 503 with the reasons.

Two fixed answers to two fixed paths, so no web framework; a blocked event loop does not answer at all, which is the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from .errors import ConfigurationError

REQUEST_SECONDS = 5.0
"""Seconds a client has for its request."""
REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HealthServer:
    """Serves the probes of one worker; `problems` returns what is wrong, nothing when all is well."""

    def __init__(self, problems: Callable[[], Sequence[str]]) -> None:
        self._problems = problems

    @contextlib.asynccontextmanager
    async def listen(self, port: int, *, host: str = "127.0.0.1") -> AsyncIterator[int]:
        """Listen for as long as the block runs; yields the port (0 asks for a free one). Raises ConfigurationError."""
        try:
            server = await asyncio.start_server(self._answer, host, port)
        except OSError as error:
            raise ConfigurationError(f"the health probes cannot listen on {host}:{port}: {error.strerror}") from error
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, body = self._look(head)
                writer.write(
                    f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
                    f"Content-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n{body}".encode()
                )
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that says nothing, too much, or leaves
        finally:
            writer.close()

    def _look(self, head: bytes) -> tuple[int, str]:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in ("/livez", "/readyz"):
            return 404, "expected /livez or /readyz\n"
        if method not in ("GET", "HEAD"):
            return 405, "expected GET\n"
        problems = self._problems() if path == "/readyz" else ()
        if problems:
            return 503, "".join(f"{problem}\n" for problem in problems)
        return 200, "ok\n"
