"""oban for Python."""

from importlib.metadata import version

from oban import Job, Oban, worker
from oban.schema import install
from protocol import Driver, main, payload
from psycopg_pool import AsyncConnectionPool

THE: list["ObanDriver"] = []


@worker(queue="default")
class Send:
    async def process(self, job: Job) -> int:
        THE[0].ran()
        return job.args["n"]


class ObanDriver(Driver):
    """One queue with its limit raised."""

    left = "SELECT EXISTS (SELECT FROM oban_jobs WHERE state IN ('available', 'executing', 'scheduled', 'retryable'))"

    async def setup(self) -> dict[str, str]:
        THE.append(self)
        self.pool = AsyncConnectionPool(self.dsn, min_size=4, max_size=10, open=False)
        await self.pool.open()
        await install(self.pool)
        self.limit = self.options.get("concurrency", 100)
        self.client = Oban(pool=self.pool)
        return {"version": version("oban"), "settings": f"limit={self.limit}, pool of 10"}

    async def bulk(self, first: int, n: int) -> None:
        for start in range(first, first + n, 1000):
            await self.client.enqueue_many([Send.new(payload(number)) for number in range(start, min(start + 1000, first + n))])

    async def single(self, number: int) -> None:
        await self.client.enqueue(Send.new(payload(number)))

    async def start(self) -> None:
        self.oban = Oban(pool=self.pool, queues={"default": self.limit})
        await self.oban.start()

    async def stop(self) -> None:
        await self.oban.stop()


if __name__ == "__main__":
    main(ObanDriver)
