"""A way to the test server that is encrypted: it listens on a socket of Unix only, and some of its builds know no TLS."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo


def _context(folder: Path) -> ssl.SSLContext:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        # Much at a time: then what is encrypted comes in pieces as long as there can be, longer than libpq's own buffer.
        while data := await source.read(1_000_000):
            sink.write(data)
            await sink.drain()
    sink.close()
    with contextlib.suppress(OSError):
        await sink.wait_closed()


@contextlib.asynccontextmanager
async def encrypted(dsn: str, folder: Path) -> AsyncIterator[str]:
    """A DSN that leads to the same server over TLS, for connections that end in the block; `folder` is for the key."""
    context = _context(folder)
    given = conninfo_to_dict(dsn)
    socket = f"{given['host']}/.s.PGSQL.{given['port']}"
    led: list[asyncio.Task[None]] = []

    async def lead_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)  # the client asks for TLS
        writer.write(b"S")
        await writer.drain()
        await writer.start_tls(context)
        from_server, to_server = await asyncio.open_unix_connection(socket)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, to_server))
            both.create_task(_copy(from_server, writer))

    def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        led.append(asyncio.get_running_loop().create_task(lead_on(reader, writer)))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="require")
    finally:
        server.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*led)
        await server.wait_closed()
