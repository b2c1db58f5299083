"""The job of the uploads example: a scan becomes a PDF, page by page.

It holds no connection while it converts. A page that is done stays done: after a crash the next attempt goes on where the
last one was, and whatever ran twice has written the same files.
"""

import asyncio
from uuid import UUID

from files import bind, convert_page, count_pages
from pydantic import BaseModel

from aioqueue import AioQueue, JobContext, TenantSettings

app = AioQueue(tenants=TenantSettings(required=True))  # the database: AIOQUEUE_DSN


class Converted(BaseModel):
    pages: int
    bytes: int


@app.task(queue="convert")
async def convert(ctx: JobContext, upload: UUID) -> Converted:
    pages = await asyncio.to_thread(count_pages, upload)
    for number in range(pages):
        await ctx.progress(number / pages, f"page {number + 1} of {pages}")
        await asyncio.to_thread(convert_page, upload, number)
    await ctx.progress(1, "binding")
    size = await asyncio.to_thread(bind, upload, pages)
    async with ctx.transaction() as tx:  # the tenant is set in it
        await tx.execute("UPDATE uploads.upload SET pages = %s WHERE id = %s", [pages, upload])
    return Converted(pages=pages, bytes=size)
