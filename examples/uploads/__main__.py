"""Run the uploads example: `python examples/uploads [--port 8000]`, then open it in a browser.

On the embedded PostgreSQL, made ready first; the worker runs inside the web server. Needs the extras `embedded` and `fastapi`,
and uvicorn, pillow, python-multipart, itsdangerous.
"""

import argparse
import asyncio
import os
from pathlib import Path

import psycopg
import uvicorn

from aioqueue import embedded, migrate


async def prepare(owner: str) -> None:
    """Bring the queue's schema up to date, and make the application's table where it is not there."""
    await migrate.migrate(owner)
    await migrate.grant(owner, role="aioqueue_worker", kind="worker")
    async with await psycopg.AsyncConnection.connect(owner) as conn:
        cursor = await conn.execute("SELECT to_regclass('uploads.upload')")
        if await cursor.fetchone() == (None,):
            await conn.execute(Path(__file__).with_name("schema.sql").read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    with embedded.start() as server:
        asyncio.run(prepare(server.dsn("owner")))
        os.environ["AIOQUEUE_DSN"] = server.dsn("worker")
        uvicorn.run("web:web", port=arguments.port, app_dir=str(Path(__file__).parent), timeout_graceful_shutdown=10)
