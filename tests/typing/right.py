"""Right calls and their types: no type checker may find an error here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import assert_type, cast

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from aioqueue import AioQueue
from aioqueue.context import JobContext, JobTransaction
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.job import Job, JobState
from tests.typing.resources import Clients, fetch, in_thread, store, uses_none
from tests.typing.resources import app as app_with_resources
from tests.typing.tasks import (
    Order,
    OwnSession,
    Total,
    add,
    add_bare,
    bill,
    bill_bare,
    mail,
    mail_bare,
    nothing,
    optional,
    plain,
    plain_bare,
    plain_context,
    plain_context_bare,
    stored,
    stored_bare,
    stored_own,
)


async def enqueue(order: Order) -> None:
    assert_type(await bill.enqueue(order, note="x"), Job[Total])
    assert_type(await bill.enqueue(order=order), Job[Total])
    assert_type(await (await bill.enqueue(order)).result(timeout=3), Total)
    assert_type(await bill_bare.enqueue(order), Job[Total])
    assert_type(await bill.options(tenant="42", on=object()).enqueue(order), Job[Total])
    assert_type(await bill.enqueue_many([order]), list[Job[Total]])
    assert_type(await add.options(delay=3).enqueue_many([(1,), {"n": 2}]), list[Job[int]])
    assert_type(await mail.enqueue("x"), Job[None])
    assert_type(await mail_bare.enqueue(to="x"), Job[None])
    assert_type(await add.enqueue(1), Job[int])
    assert_type(await add_bare.enqueue(1), Job[int])
    assert_type(await plain.enqueue(1), Job[int])
    assert_type(await plain_bare.enqueue(1), Job[str])
    assert_type(await plain_context.enqueue(1), Job[bytes])
    assert_type(await plain_context_bare.enqueue(1), Job[bytes])
    assert_type(await nothing.enqueue(), Job[int])
    assert_type(await optional.enqueue(), Job[list[int]])
    assert_type(await stored.enqueue(order, note="x"), Job[Total])
    assert_type(await stored_bare.options(tenant="42").enqueue(1), Job[str])
    assert_type(await stored_own.enqueue(n=1), Job[str])


def enqueue_sync(order: Order) -> None:
    assert_type(bill.options(tenant="42", on=object()).enqueue_sync(order, note="x"), Job[Total])
    assert_type(bill.options(on=object()).enqueue_many_sync([order]), list[Job[Total]])
    assert_type(mail.enqueue_sync("x"), Job[None])
    assert_type(plain_context.enqueue_sync(1), Job[bytes])


async def cancel(job: Job[Total]) -> None:
    assert_type(await job.cancel(), JobState)
    assert_type(await job.cancel(on=object()), JobState)


async def resources() -> None:
    assert_type(app_with_resources, AioQueue[Clients])
    assert_type(await fetch.enqueue("x"), Job[int])
    assert_type(await store.enqueue("x"), Job[int])
    assert_type(await in_thread.enqueue(1), Job[int])
    assert_type(await uses_none.enqueue(1), Job[int])
    assert_type(await fetch(cast(JobContext[Clients], None), "x"), int)


async def options(order: Order) -> None:
    await bill.options(run_at=datetime.now(UTC), priority=2, queue="q", max_attempts=1).enqueue(order)


async def call(order: Order) -> None:
    transaction = cast(JobTransaction, None)
    context = cast(JobContext, None)
    assert_type(await bill(transaction, order), Total)
    assert_type(await mail(context, "x"), None)
    assert_type(await add(1), int)
    assert_type(await plain(1), int)


async def sessions(engine: AsyncEngine, session: JobSession) -> None:
    AioQueue(session=async_sessionmaker(engine))
    AioQueue(session=async_sessionmaker(engine, class_=OwnSession))
    assert_type(await stored_bare(session, 1), str)
    as_any_other: AsyncSession = session
    await as_any_other.flush()
    async with session.tenant("43"), session.begin_nested():
        assert_type(session.attempt, int)
