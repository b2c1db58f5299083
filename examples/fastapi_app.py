"""A FastAPI application with its worker inside: `python examples/fastapi_app.py`, with fastapi, uvicorn and httpx installed.

An upload and its job are one transaction, committed before the response; the client follows the job to its result. The file
serves itself on a free port, is its own client, and stops; ends with 1 where something is not as expected. On the embedded
PostgreSQL, in its schema `uploads`.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, LiteralString
from uuid import UUID

import httpx
import psycopg
import uvicorn
from fastapi import FastAPI, Header
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel

from aioqueue import AioQueue, JobTransaction, embedded, migrate
from aioqueue.contrib.fastapi import jobs_router, transaction

TABLE: LiteralString = """
DROP SCHEMA IF EXISTS uploads CASCADE;
CREATE SCHEMA uploads;
CREATE TABLE uploads.upload (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text, content text, words int);
GRANT USAGE ON SCHEMA uploads TO aioqueue_worker;
GRANT SELECT, INSERT, UPDATE ON uploads.upload TO aioqueue_worker;
"""

server = embedded.start()
os.environ["AIOQUEUE_DSN"] = server.dsn("worker")
app = AioQueue()
pool = AsyncConnectionPool(server.dsn("worker"), open=False)


@app.task
async def convert(tx: JobTransaction, upload: int) -> int:
    content: str = await tx.fetch_value("SELECT content FROM uploads.upload WHERE id = %s", [upload])
    words = len(content.split())
    await tx.execute("UPDATE uploads.upload SET words = %s WHERE id = %s", [words, upload])
    return words


async def tenant(x_tenant: Annotated[str, Header()]) -> str:
    """Whose request it is; in earnest from the session or the token."""
    return x_tenant


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
    async with pool, app, app.worker():
        yield


web = FastAPI(lifespan=lifespan)
web.include_router(jobs_router(app, auth=tenant))


class Upload(BaseModel):
    content: str


@web.post("/uploads", status_code=202)
async def receive(
    upload: Upload, x_tenant: Annotated[str, Header()], conn: Annotated[AsyncConnection, transaction(pool)]
) -> dict[str, UUID]:
    cursor = await conn.execute(
        "INSERT INTO uploads.upload (tenant, content) VALUES (%s, %s) RETURNING id", [x_tenant, upload.content]
    )
    (number,) = await cursor.fetchone() or (0,)
    job = await convert.options(tenant=x_tenant, on=conn).enqueue(number)
    return {"job": job.id}


# -- the rest is the client, and the server around it ------------------------------------------------------------------


async def follow(http: httpx.AsyncClient, job: str) -> dict[str, Any]:
    """Follow a job to its end, as `new EventSource("/jobs/…/events")` does in a browser."""
    event = ""
    async with http.stream("GET", f"/jobs/{job}/events", headers={"x-tenant": "42"}) as stream:
        async for line in stream.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                event = value
            elif field == "data":
                view: dict[str, Any] = json.loads(value)
                print(f"{event}: {view['state']}")
                if event == "result":
                    return view
    raise RuntimeError("the stream ended before the job")


async def use(http: httpx.AsyncClient) -> int:
    response = await http.post("/uploads", json={"content": "to be or not to be"}, headers={"x-tenant": "42"})
    job = response.raise_for_status().json()["job"]
    view = await follow(http, job)
    print(f"result: {view['result']} words, expected 6")
    foreign = await http.get(f"/jobs/{job}", headers={"x-tenant": "43"})
    print(f"asked by another tenant: {foreign.status_code}, expected 404")
    return int(view["result"] != 6) + int(foreign.status_code != 404)


async def main() -> int:
    owner = server.dsn("owner")
    await migrate.migrate(owner)
    await migrate.grant(owner, role="aioqueue_worker", kind="worker")
    async with await psycopg.AsyncConnection.connect(owner) as conn:
        await conn.execute(TABLE)

    uvicorn_server = uvicorn.Server(uvicorn.Config(web, port=0, log_level="warning"))
    serving = asyncio.create_task(uvicorn_server.serve())
    while not (uvicorn_server.started or serving.done()):  # noqa: ASYNC110 - uvicorn tells of its start in no other way
        await asyncio.sleep(0.01)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        wrong = await use(http)
    uvicorn_server.should_exit = True
    await serving
    return 1 if wrong else 0


if __name__ == "__main__":
    with server:
        sys.exit(asyncio.run(main()))
