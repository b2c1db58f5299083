"""chancy with its asyncio executor."""

import logging
from importlib.metadata import version

from chancy import Chancy, Queue, Worker, job
from protocol import Driver, main, payload

THE: list["ChancyDriver"] = []


@job()
async def send(*, to: str, n: int, body: str) -> int:
    THE[0].ran()
    return n


class ChancyDriver(Driver):
    """One worker, one queue; polls and is notified."""

    left = "SELECT EXISTS (SELECT FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying'))"

    async def setup(self) -> dict[str, str]:
        THE.append(self)
        concurrency = self.options.get("concurrency", 100)
        self.chancy = Chancy(self.dsn, log=logging.getLogger("chancy"))
        await self.chancy.__aenter__()
        await self.chancy.migrate()
        queue = Queue(
            "default", concurrency=concurrency, executor="chancy.executors.asyncex.AsyncExecutor",
            polling_interval=1, eager_polling=True,
        )  # fmt: skip
        await self.chancy.declare(queue, upsert=True)
        return {"version": version("chancy"), "settings": f"asyncio executor, concurrency={concurrency}, eager_polling"}

    async def bulk(self, first: int, n: int) -> None:
        jobs = [send.job.with_kwargs(**payload(number)) for number in range(first, first + n)]
        async for _ in self.chancy.push_many(jobs):
            pass

    async def single(self, number: int) -> None:
        await self.chancy.push(send.job.with_kwargs(**payload(number)))

    async def start(self) -> None:
        self.worker = Worker(self.chancy, register_signal_handlers=False)
        await self.worker.start()

    async def stop(self) -> None:
        await self.worker.stop()


if __name__ == "__main__":
    main(ChancyDriver)
