"""pgqueuer, on asyncpg or psycopg; with the batch size that its documentation raises for throughput."""

import asyncio
import contextlib
import json
from importlib.metadata import version
from typing import Any

import asyncpg
import psycopg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver, PsycopgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from protocol import Driver, main, payload


class Pgqueuer(Driver):
    """One QueueManager; its log table stands for results."""

    left = "SELECT EXISTS (SELECT FROM pgqueuer)"

    async def driver(self) -> Any:
        if self.options["driver"] == "asyncpg":
            return AsyncpgPoolDriver(await asyncpg.create_pool(self.dsn, min_size=4, max_size=4))
        return PsycopgDriver(await psycopg.AsyncConnection.connect(self.dsn, autocommit=True))

    async def setup(self) -> dict[str, str]:
        self.queries = Queries(await self.driver())
        with contextlib.suppress(asyncpg.DuplicateObjectError, psycopg.errors.DuplicateObject):
            await self.queries.install()
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        batch = self.options.get("batch", 10)
        return {"version": version("pgqueuer"), "settings": f"{self.options['driver']}, batch_size={batch}, {loop}"}

    async def bulk(self, first: int, n: int) -> None:
        for start in range(first, first + n, 10_000):
            numbers = range(start, min(start + 10_000, first + n))
            bodies: list[bytes | None] = [json.dumps(payload(number)).encode() for number in numbers]
            await self.queries.enqueue(["send"] * len(bodies), bodies, [0] * len(bodies))

    async def single(self, number: int) -> None:
        await self.queries.enqueue("send", json.dumps(payload(number)).encode())

    async def start(self) -> None:
        self.pgq = PgQueuer(await self.driver())

        @self.pgq.entrypoint("send")
        async def send(job: Job) -> None:
            json.loads(job.payload or b"")
            self.ran()

        self.running = asyncio.create_task(self.pgq.run(batch_size=self.options.get("batch", 10)))

    async def stop(self) -> None:
        self.pgq.shutdown.set()
        await self.running


if __name__ == "__main__":
    main(Pgqueuer)
