"""An app whose workers open resources, and middleware, as users write them. Checked by the type checkers, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, assert_type

from aioqueue import AioQueue, CallNext, JobContext, JobFacts, JobTransaction


class Clients:
    http: str = ""


@asynccontextmanager
async def clients(app: AioQueue) -> AsyncIterator[Clients]:
    yield Clients()


async def timed(ctx: JobFacts, call_next: CallNext) -> Any:
    assert_type(ctx.attempt, int)
    return await call_next()


async def with_clients(ctx: JobContext[Clients] | JobTransaction[Clients], call_next: CallNext) -> Any:
    assert_type(ctx.resources, Clients)
    return await call_next()


app = AioQueue(resources=clients, middleware=[timed, with_clients])
plain = AioQueue()


@app.task
async def fetch(ctx: JobContext[Clients], path: str) -> int:
    assert_type(ctx.resources, Clients)
    async with ctx.transaction() as tx:
        assert_type(tx.resources.http, str)
    return len(path)


@app.task(queue="own")
async def store(tx: JobTransaction[Clients], path: str) -> int:
    assert_type(tx.resources, Clients)
    return len(path)


@app.task
def in_thread(ctx: JobContext[Clients], n: int) -> int:
    assert_type(ctx.resources, Clients)
    return n


@app.task(queue="other")
async def uses_none(ctx: JobContext, n: int) -> int:
    assert_type(ctx.resources, object)
    return n


@plain.task
async def of_no_resources(ctx: JobContext, n: int) -> int:
    return n


def takes_any_app(app: AioQueue) -> None: ...


takes_any_app(app)
takes_any_app(plain)
