"""Tasks that the kit's tests run: of every kind, that fail, that come again, that enqueue, that wait."""

import asyncio
from typing import Any

from pydantic import BaseModel

from aioqueue import AioQueue, Cancel, JobContext, JobTransaction, Retry, Snooze


class Order(BaseModel):
    customer: str
    cents: list[int] = []


class Broken(Exception):
    """What a task raises."""


def register(app: AioQueue[Any]) -> None:
    """Register them with an app."""

    @app.task(name="order", queue="shop")
    async def order(tx: JobTransaction, order: Order) -> int:
        return sum(order.cents)

    @app.task(name="note")
    async def note(tx: JobTransaction, text: str) -> str:
        await tx.execute("INSERT INTO notes.note (tenant, text) VALUES (%s, %s)", [str(tx.tenant), text])
        return text

    @app.task(name="break", retry=Retry(max_attempts=3))
    async def break_(text: str = "broken") -> None:
        raise Broken(text)

    @app.task(name="parent")
    async def parent(ctx: JobContext, children: int) -> None:
        for number in range(children):
            await app.get("add").enqueue(number)

    @app.task(name="steps")
    async def steps(ctx: JobContext, text: str) -> int:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO notes.note (tenant, text) VALUES (%s, %s)", [str(tx.tenant), text])
        return ctx.attempt

    @app.task(name="thread")
    def thread(ctx: JobContext, number: int) -> int:
        return number * ctx.attempt

    @app.task(name="again")
    async def again(ctx: JobContext, times: int) -> int:
        if ctx.attempt <= times:
            raise Snooze(3600)
        return ctx.attempt

    @app.task(name="cancel")
    async def cancel() -> None:
        raise Cancel("enough")

    @app.task(name="wait", timeout=60)
    async def wait() -> None:
        await asyncio.Event().wait()

    @app.task(name="meet")
    async def meet(ctx: JobContext, text: str) -> str:
        """Wait for the job that it enqueues."""
        job = await app.get("add").enqueue(1)
        return f"{text} {await job.result(timeout=30)}"
