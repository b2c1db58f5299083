"""Tasks of every kind, as users write them. Checked by the type checkers, never run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from aioqueue.context import JobContext, JobTransaction
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.job import Job
from aioqueue.new_jobs import NewJobs
from aioqueue.registry import TaskRegistry
from aioqueue.retry import Retry


class App(TaskRegistry):
    """As far as a registry is an app."""

    @property
    def payload_limit(self) -> int:
        return 1

    async def enqueue_jobs(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        raise NotImplementedError

    def enqueue_jobs_sync(self, jobs: NewJobs, parts: Iterable[NewJobs] = (), *, on: object | None) -> None:
        raise NotImplementedError

    def handle(self, job_id: UUID, decode: Callable[[str], Any] | None, tenant: str | None, *, on: object | None) -> Job[Any]:
        raise NotImplementedError


app = App()


class Order(BaseModel):
    id: int


class Total(BaseModel):
    amount: int


@app.task(queue="billing", retry=Retry(max_attempts=3), timeout=timedelta(seconds=30))
async def bill(tx: JobTransaction, order: Order, *, note: str = "") -> Total:
    return Total(amount=order.id)


@app.task
async def bill_bare(tx: JobTransaction, order: Order) -> Total:
    return Total(amount=order.id)


@app.task(queue="mail", priority=1, name="mail")
async def mail(ctx: JobContext, to: str) -> None: ...


@app.task
async def mail_bare(ctx: JobContext, to: str) -> None: ...


@app.task(timeout=1.5)
async def add(n: int) -> int:
    return n


@app.task
async def add_bare(n: int, m: int = 0) -> int:
    return n + m


@app.task(queue="threads")
def plain(n: int) -> int:
    return n


@app.task
def plain_bare(n: int) -> str:
    return str(n)


@app.task(queue="threads")
def plain_context(ctx: JobContext, n: int) -> bytes:
    return bytes(n)


@app.task
def plain_context_bare(ctx: JobContext, n: int) -> bytes:
    return bytes(n)


@app.task(queue="none")
async def nothing() -> int:
    return 1


@app.task
async def optional(items: list[int] | None = None) -> list[int]:
    return items or []


class OwnSession(AsyncSession): ...


class OwnJobSession(JobSession, OwnSession): ...


@app.task(queue="billing")
async def stored(session: JobSession, order: Order, *, note: str = "") -> Total:
    return Total(amount=order.id)


@app.task
async def stored_bare(session: JobSession, n: int) -> str:
    return str(n)


@app.task
async def stored_own(session: OwnJobSession, n: int) -> str:
    return str(n)
