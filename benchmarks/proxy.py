"""A TCP proxy in a thread of its own, so that it goes on while others block their event loop: passes, swallows, cuts, refuses."""

import asyncio
import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Literal

Mode = Literal["pass", "swallow", "refuse"]


class Proxy:
    """Stands before a server; a context manager.

    `mode`: "pass"; "swallow" keeps every connection open, new ones too, and drops all bytes both ways; "refuse" resets new
    connections. `cut()` resets those there are. `cut_commits(n)` resets the next n connections that send COMMIT, in turn
    before the server gets it and after it has answered.
    """

    def __init__(self, target: int | str) -> None:
        """`target`: a port of 127.0.0.1, or the path of a socket."""
        self.mode: Mode = "pass"
        self.target = target
        self.port = 0
        self.accepted = 0
        """Connections accepted so far."""
        self.commits_cut = 0
        """Connections reset at their COMMIT so far."""
        self._commits = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._listening = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> "Proxy":
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def cut(self) -> None:
        """Reset every connection."""
        done = threading.Event()

        def cut() -> None:
            for writer in list(self._writers):
                _reset(writer)
            done.set()

        self._loop.call_soon_threadsafe(cut)
        assert done.wait(10)

    def cut_commits(self, number: int) -> None:
        """Reset the next connections that send COMMIT; 0: no more of them."""
        self._commits = number

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        for writer in list(self._writers):
            _reset(writer)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            if self.mode == "refuse":
                return
            while self.mode == "swallow" and await reader.read(65536):
                pass
            if self.mode == "swallow":
                return
            if isinstance(self.target, str):
                there, back = await asyncio.open_unix_connection(self.target)
            else:
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(back)
            answers = asyncio.Event()  # set: the next answer cuts
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, back, commits=answers))
                    group.create_task(self._pump(there, writer, cuts=answers))
            finally:
                self._writers.discard(back)
                _reset(back)
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            _reset(writer)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        commits: asyncio.Event | None = None,
        cuts: asyncio.Event | None = None,
    ) -> None:
        while received := await reader.read(65536):
            if cuts is not None and cuts.is_set():
                raise ConnectionResetError
            if commits is not None and self._commits and b"COMMIT\0" in received:
                self._commits -= 1
                self.commits_cut += 1
                if self.commits_cut % 2:
                    raise ConnectionResetError
                commits.set()
            if self.mode != "swallow":
                writer.write(received)
                await writer.drain()
        if self.mode == "swallow":
            # Whoever goes away behind a network that swallows everything is not heard of.
            await self._stop.wait()
        raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
