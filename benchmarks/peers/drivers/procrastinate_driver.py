"""procrastinate, with concurrency."""

import asyncio
import contextlib
from importlib.metadata import version
from typing import Any

import procrastinate
from protocol import Driver, main, payload


class Procrastinate(Driver):
    """One worker on a psycopg pool."""

    left = "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))"

    def __init__(self, dsn: str, options: dict[str, Any]) -> None:
        super().__init__(dsn, options)
        self.concurrency = options.get("concurrency", 100)
        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))

        @self.app.task(name="send")
        async def send(to: str, n: int, body: str) -> int:
            self.ran()
            return n

        self.task = send

    async def setup(self) -> dict[str, str]:
        await self.app.open_async()
        if not await self.app.check_connection_async():
            await self.app.schema_manager.apply_schema_async()
        return {"version": version("procrastinate"), "settings": f"concurrency={self.concurrency}, pool of 10"}

    async def bulk(self, first: int, n: int) -> None:
        for start in range(first, first + n, 10_000):
            await self.task.batch_defer_async(*[payload(number) for number in range(start, min(start + 10_000, first + n))])

    async def single(self, number: int) -> None:
        await self.task.defer_async(**payload(number))

    async def start(self) -> None:
        self.running = asyncio.create_task(self.app.run_worker_async(concurrency=self.concurrency, install_signal_handlers=False))

    async def stop(self) -> None:
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.running


if __name__ == "__main__":
    main(Procrastinate)
