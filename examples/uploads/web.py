"""The web application of the uploads example: upload a scan, watch it become a PDF, fetch it.

    uvicorn web:web                                  # with its worker inside
    UPLOADS_WORKER=0 uvicorn web:web                 # without; then, beside it:
    python -m aioqueue worker -A jobs:app

The database is that of AIOQUEUE_DSN, with aioqueue's schema and schema.sql in it; `python examples/uploads` sees to both.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Depends, FastAPI, Form, HTTPException, Request, UploadFile
from fastapi.responses import FileResponse, RedirectResponse
from files import NotAScan, keep, pdf_of, scan_of
from jobs import app, convert
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool
from starlette.middleware.sessions import SessionMiddleware

from aioqueue.contrib.fastapi import jobs_router, transaction

PAGE = Path(__file__).with_name("page.html")
CUSTOMERS = {"acme": "rocket", "globex": "hammock"}
"""Customers and their passwords; in earnest these are yours, and hashed."""

pool = AsyncConnectionPool(os.environ["AIOQUEUE_DSN"], min_size=1, open=False)


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool)
        await stack.enter_async_context(app)
        if os.environ.get("UPLOADS_WORKER", "1") == "1":
            await stack.enter_async_context(app.worker())
        yield


web = FastAPI(lifespan=lifespan)
# A cookie that others' pages cannot use (strict), and nobody can forge.
web.add_middleware(
    SessionMiddleware, secret_key=os.environ.get("UPLOADS_SECRET") or secrets.token_hex(), same_site="strict", max_age=86_400
)


async def tenant(request: Request) -> str:
    """Whose request it is: who logged in."""
    name: str | None = request.session.get("tenant")
    if name is None:
        raise HTTPException(401, "log in first")
    return name


async def connection(
    name: Annotated[str, Depends(tenant)], conn: Annotated[AsyncConnection[Any], transaction(pool)]
) -> AsyncConnection[Any]:
    """The request's transaction, in which row-level security knows the tenant; it commits before the response."""
    await conn.execute("SELECT set_config('app.tenant', %s, true)", [name])
    return conn


Tenant = Annotated[str, Depends(tenant)]
Connection = Annotated[AsyncConnection[Any], Depends(connection, scope="function")]
web.include_router(jobs_router(app, auth=tenant))


@web.get("/")
async def show_page() -> FileResponse:
    return FileResponse(PAGE)


@web.post("/login")
async def login(request: Request, name: Annotated[str, Form()], password: Annotated[str, Form()]) -> RedirectResponse:
    if not secrets.compare_digest(CUSTOMERS.get(name, "").encode(), password.encode()) or name not in CUSTOMERS:
        raise HTTPException(401, "unknown customer, or wrong password")
    request.session["tenant"] = name
    return RedirectResponse("/", status_code=303)


@web.post("/uploads", status_code=202)
async def receive(scan: UploadFile, name: Tenant, conn: Connection) -> dict[str, UUID]:
    """Store the file, then its row and its job in one transaction: both or neither. A file without a row harms nobody."""
    upload = uuid4()
    try:
        await asyncio.to_thread(keep, upload, scan.file)
    except NotAScan as error:
        raise HTTPException(422, str(error)) from None
    try:
        job = await convert.options(tenant=name, on=conn).enqueue(upload)
        await conn.execute("INSERT INTO uploads.upload (id, name, job) VALUES (%s, %s, %s)", [upload, scan.filename, job.id])
    except BaseException:
        scan_of(upload).unlink(missing_ok=True)
        raise
    return {"id": upload, "job": job.id}


@web.get("/uploads")
async def list_uploads(name: Tenant, conn: Connection) -> dict[str, Any]:
    cursor = conn.cursor(row_factory=dict_row)
    await cursor.execute("SELECT id, name, job, pages FROM uploads.upload ORDER BY created_at DESC LIMIT 50")
    return {"tenant": name, "uploads": await cursor.fetchall()}


@web.get("/uploads/{upload}/pdf")
async def fetch_pdf(upload: UUID, conn: Connection) -> FileResponse:
    cursor = await conn.execute("SELECT name FROM uploads.upload WHERE id = %s AND pages IS NOT NULL", [upload])
    row = await cursor.fetchone()
    if row is None:
        raise HTTPException(404, "no such PDF")
    return FileResponse(pdf_of(upload), media_type="application/pdf", filename=f"{Path(row[0]).stem}.pdf")
