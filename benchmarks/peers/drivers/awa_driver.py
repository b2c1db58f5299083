"""awa-pg: a runtime in Rust whose handlers are Python coroutines."""

from dataclasses import dataclass
from importlib.metadata import version

import awa
from protocol import Driver, main, payload


@dataclass
class Send:
    to: str
    n: int
    body: str


class Awa(Driver):
    """One client; COPY for bulk."""

    left = "SELECT EXISTS (SELECT FROM awa.jobs WHERE state IN ('available', 'running', 'scheduled'))"

    async def setup(self) -> dict[str, str]:
        self.workers = self.options.get("concurrency", 100)
        # Its driver wants a host before the one of the socket.
        self.client = awa.AsyncClient(self.dsn.replace("@/", "@localhost/"))
        await self.client.migrate()

        @self.client.task(Send, queue="default")
        async def send(job: awa.Job) -> None:
            self.ran()

        return {"version": version("awa-pg"), "settings": f"workers={self.workers}, claimers=2, claim_batch_size=512"}

    async def bulk(self, first: int, n: int) -> None:
        for start in range(first, first + n, 10_000):
            jobs = [Send(**payload(number)) for number in range(start, min(start + 10_000, first + n))]
            await self.client.insert_many_copy(jobs, queue="default")

    async def single(self, number: int) -> None:
        await self.client.insert(Send(**payload(number)), queue="default")

    async def start(self) -> None:
        await self.client.start([{"name": "default", "max_workers": self.workers, "claimers": 2, "claim_batch_size": 512}])

    async def stop(self) -> None:
        await self.client.shutdown()


if __name__ == "__main__":
    main(Awa)
