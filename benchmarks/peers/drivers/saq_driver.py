"""saq on its Postgres queue."""

import asyncio
from importlib.metadata import version

from protocol import Driver, main, payload
from saq import Queue, Worker


class Saq(Driver):
    """One worker; results are kept for its default time."""

    left = "SELECT EXISTS (SELECT FROM saq_jobs WHERE status IN ('new', 'queued', 'active'))"

    async def setup(self) -> dict[str, str]:
        self.concurrency = self.options.get("concurrency", 100)
        self.queue = Queue.from_url(self.dsn, max_size=20)
        await self.queue.connect()
        return {"version": version("saq"), "settings": f"concurrency={self.concurrency}, pool of 20"}

    async def bulk(self, first: int, n: int) -> None:
        # It has no call for many without waiting for their results: several at a time, as its pool allows.
        gate = asyncio.Semaphore(20)

        async def one(number: int) -> None:
            async with gate:
                await self.single(number)

        await asyncio.gather(*(one(number) for number in range(first, first + n)))

    async def single(self, number: int) -> None:
        await self.queue.enqueue("send", **payload(number))

    async def start(self) -> None:
        async def send(ctx: object, *, to: str, n: int, body: str) -> int:
            self.ran()
            return n

        self.worker = Worker(self.queue, functions=[("send", send)], concurrency=self.concurrency)
        self.running = asyncio.create_task(self.worker.start())

    async def stop(self) -> None:
        await self.worker.stop()


if __name__ == "__main__":
    main(Saq)
