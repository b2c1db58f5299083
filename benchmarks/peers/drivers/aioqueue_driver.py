"""aioqueue itself, driven as its peers are."""

import asyncio
import gc
import time
from typing import Any

import psycopg
from protocol import Driver, main, payload
from pydantic import BaseModel

from aioqueue import AioQueue, WorkerSettings, migrate
from aioqueue.version import VERSION


class Mail(BaseModel):
    """The typed payload."""

    to: str
    n: int
    body: str


class Aioqueue(Driver):
    """Typed payload, stored results."""

    left = "SELECT EXISTS (SELECT FROM aioqueue.live)"

    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        super().__init__(dsn, options)
        settings = {name: options[name] for name in ("concurrency", "claim_batch") if name in options}
        self.app = AioQueue(dsn, worker=WorkerSettings(**settings))

        @self.app.task()
        async def send(mail: Mail) -> int:
            self.ran()
            return mail.n

        @self.app.task(timeout=None)
        async def sleeper(mail: Mail) -> int:
            await asyncio.sleep(options["sleep"])
            self.ran()
            return mail.n

        self.task = sleeper if "sleep" in options else send
        self.opened = False
        self.caller: psycopg.AsyncConnection[Any] | None = None
        self.worker: asyncio.Task[None] | None = None
        gc.collect()
        gc.freeze()  # what was imported, as `python -m aioqueue worker` does

    async def setup(self) -> dict[str, str]:
        await migrate.migrate(self.dsn)
        worker = self.app.settings.worker
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        return {
            "version": VERSION,
            "settings": f"concurrency={worker.concurrency}, pool={self.app.settings.pool.size}, {loop}, gc.freeze()",
        }

    async def open(self) -> None:
        if not self.opened:
            self.opened = True
            await self.app.__aenter__()

    async def bulk(self, first: int, n: int) -> None:
        await self.open()
        for start in range(first, first + n, 10_000):
            mails = [Mail(**payload(number)) for number in range(start, min(start + 10_000, first + n))]
            await self.task.enqueue_many(mails)

    async def single(self, number: int) -> None:
        await self.open()
        await self.task.enqueue(Mail(**payload(number)))

    async def in_transaction(self, milliseconds: float) -> float:
        """Enqueue one in a transaction of a connection of our own, left open for so long; when its COMMIT was sent."""
        await self.open()
        if self.caller is None:
            self.caller = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        async with self.caller.transaction():
            await self.task.options(on=self.caller).enqueue(Mail(**payload(self.next)))
            await asyncio.sleep(milliseconds / 1000)
            at = time.time()
        return at

    async def answer(self, command: list[Any]) -> dict[str, Any]:
        """Beside the commands of all: ["open", milliseconds] → {"at"}."""
        match command:
            case ["open", milliseconds]:
                return {"at": await self.in_transaction(milliseconds)}
        return await super().answer(command)

    async def start(self) -> None:
        await self.open()
        self.context = self.app.worker()
        await self.context.__aenter__()

    async def stop(self) -> None:
        await self.context.__aexit__(None, None, None)


if __name__ == "__main__":
    main(Aioqueue)
