"""Wrong calls: both type checkers flag each line marked `# E`, and no other; see tests/test_typing.py."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import sessionmaker

from aioqueue import AioQueue, CallNext
from aioqueue.context import JobContext, JobTransaction
from tests.typing.resources import app as app_with_resources
from tests.typing.resources import fetch, store
from tests.typing.tasks import (
    Order,
    add,
    add_bare,
    app,
    bill,
    bill_bare,
    mail,
    mail_bare,
    nothing,
    plain,
    plain_bare,
    plain_context_bare,
    stored,
    stored_bare,
    stored_own,
)


async def enqueue(order: Order) -> None:
    await bill.enqueue("no")  # E
    await bill.enqueue()  # E
    await bill.enqueue(order, nota="x")  # E
    await bill.enqueue(order, "x")  # E
    await bill_bare.enqueue(1)  # E
    await mail.enqueue(1)  # E
    await mail_bare.enqueue()  # E
    await add.enqueue(tx=1)  # E
    await add.enqueue("1")  # E
    await add_bare.enqueue(1, "2")  # E
    await plain.enqueue("1")  # E
    await plain_bare.enqueue("1")  # E
    await plain_context_bare.enqueue("1")  # E
    await nothing.enqueue(1)  # E
    await bill.enqueue_many([1])  # E
    await stored.enqueue("no")  # E
    await stored_bare.enqueue()  # E
    await stored_own.enqueue("1")  # E


def enqueue_sync(order: Order) -> None:
    bill.enqueue_sync("no")  # E
    bill.options(on=object()).enqueue_sync(order, "x")  # E
    mail.enqueue_sync()  # E


async def options(order: Order) -> None:
    bill.options(priority="high")  # E
    bill.options(tenant=42)  # E
    bill.options(run_at="tomorrow")  # E
    bill.options(order=order)  # E
    await bill.options(tenant="42").enqueue("no")  # E


async def call(order: Order) -> None:
    context = cast(JobContext, None)
    await bill(order)  # E
    await bill(context, order)  # E
    await mail("x")  # E
    await add("1")  # E


@app.task(quueue="mail")  # E
async def misspelt(n: int) -> int:
    return n


@app_with_resources.task
async def of_other_resources(ctx: JobContext[str], n: int) -> int:
    return n


@app_with_resources.task
async def does_not_look(ctx: JobContext, n: int) -> str:
    return str(ctx.resources.http)  # E


async def resources() -> None:
    await fetch.enqueue(1)  # E
    await store.enqueue()  # E
    await of_other_resources.enqueue(1)  # E
    await fetch(cast(JobTransaction, None), "x")  # E


async def no_context(app: AioQueue) -> int:
    return 1


async def takes_nothing(ctx: JobContext) -> Any: ...


async def takes_a_context(ctx: JobContext, call_next: CallNext) -> Any: ...


AioQueue(resources=no_context)  # E
AioQueue(middleware=[takes_nothing])  # E
AioQueue(middleware=[takes_a_context])  # E


def sessions(engine: AsyncEngine, session: AsyncSession) -> None:
    AioQueue(session=sessionmaker())  # E
    AioQueue(session=engine)  # E
    AioQueue(session=session)  # E


async def not_a_job_s(session: AsyncSession) -> None:
    await stored_bare(session, 1)  # E
