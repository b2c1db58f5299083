"""The demo's app and its tasks, as an application would write them; worker processes import it by name.

The database comes from AIOQUEUE_DSN, the lease from AIOQUEUE_DEMO_LEASE. Nothing here knows the demo's steps.
"""

from __future__ import annotations

import asyncio
import os
from uuid import UUID

from pydantic import BaseModel

from aioqueue.app import AioQueue
from aioqueue.context import JobContext, JobTransaction
from aioqueue.retry import Retry
from aioqueue.settings import LeaseSettings

QUEUE = "demo"
LEASE_VARIABLE = "AIOQUEUE_DEMO_LEASE"
LEASE = 2.0
"""Seconds; the library's default is 30. Short, so that the take-over after a crash can be watched."""
MAIL_SECONDS = 1.5
"""How long the mail server of this demo takes to answer."""
POISON_EXIT = 86
"""The status with which the poison job ends its process."""

app = AioQueue(lease=LeaseSettings(lease=float(os.environ.get(LEASE_VARIABLE, LEASE))))


class Statement(BaseModel):
    """What a tenant's statement says."""

    invoices: int
    cents: int
    tenants: int
    """Tenants whose invoices were seen: 1, or row-level security leaks."""


@app.task(name="demo.make_statement", queue=QUEUE)
async def make_statement(tx: JobTransaction, order: UUID) -> Statement:
    """Sum up the tenant's invoices and mark its order as done; one commit with the job's success."""
    row = await tx.fetch_one("SELECT count(*), coalesce(sum(cents), 0), count(DISTINCT tenant_id) FROM demo.invoices")
    count, cents, tenants = row or (0, 0, 0)
    changed = await tx.execute(
        "UPDATE demo.orders SET status = 'done', runs = runs + 1, invoices = %s, cents = %s WHERE id = %s", (count, cents, order)
    )
    if changed.rowcount != 1:
        raise LookupError(f"tenant {tx.tenant} has no order {order}")
    return Statement(invoices=count, cents=cents, tenants=tenants)


@app.task(name="demo.send_statement", queue=QUEUE)
async def send_statement(ctx: JobContext, order: UUID) -> None:
    """Wait for a slow service while nothing is held, then note it in one short transaction."""
    await asyncio.sleep(MAIL_SECONDS)
    async with ctx.transaction() as tx:
        await tx.execute("UPDATE demo.orders SET sent = sent + 1 WHERE id = %s", (order,))


@app.task(name="demo.divide", queue=QUEUE, retry=Retry(max_attempts=3, base=0.2, cap=0.5))
async def divide(tx: JobTransaction, order: UUID) -> int:
    """Write, and fail: each attempt's write is rolled back, and its error kept."""
    await tx.execute("UPDATE demo.orders SET status = 'divided' WHERE id = %s", (order,))
    quotient: int = await tx.fetch_value("SELECT 1 / 0")
    return quotient


@app.task(name="demo.poison", queue=QUEUE, retry=Retry(max_attempts=3))
async def poison(ctx: JobContext) -> None:
    """Kill the process that runs it, at once and without any clean-up, as a crash or the kernel's OOM killer does."""
    os._exit(POISON_EXIT)
