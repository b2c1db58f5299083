"""dbos: durable workflows on one of its queues."""

import asyncio
from importlib.metadata import version

from dbos import DBOS, DBOSClient
from protocol import Driver, main, payload

THE: list["Dbos"] = []


@DBOS.workflow()
async def send(to: str, n: int, body: str) -> int:
    THE[0].ran()
    return n


class Dbos(Driver):
    """Its worker starts with the process: it is launched to drain, and jobs are enqueued by a client."""

    left = "SELECT EXISTS (SELECT FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING'))"

    async def setup(self) -> dict[str, str]:
        THE.append(self)
        self.concurrency = self.options.get("concurrency", 100)
        await asyncio.to_thread(self.launch)
        await asyncio.to_thread(DBOS.destroy)
        self.client = DBOSClient(system_database_url=self.dsn)
        return {"version": version("dbos"), "settings": f"worker_concurrency={self.concurrency}, polling_interval_sec=0.1"}

    def launch(self) -> None:
        DBOS(config={"name": "bench", "system_database_url": self.dsn, "console_log_level": "ERROR", "log_level": "ERROR"})
        DBOS.launch()
        DBOS.register_queue("bench", worker_concurrency=self.concurrency, polling_interval_sec=0.1)

    async def bulk(self, first: int, n: int) -> None:
        gate = asyncio.Semaphore(20)

        async def one(number: int) -> None:
            async with gate:
                await self.single(number)

        await asyncio.gather(*(one(number) for number in range(first, first + n)))

    async def single(self, number: int) -> None:
        await self.client.enqueue_async({"queue_name": "bench", "workflow_name": "send"}, **payload(number))

    async def start(self) -> None:
        await asyncio.to_thread(self.launch)

    async def stop(self) -> None:
        await asyncio.to_thread(DBOS.destroy)


if __name__ == "__main__":
    main(Dbos)
