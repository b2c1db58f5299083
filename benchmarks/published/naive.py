"""The naive forms of the write-ups: a table with a status column, SELECT … FOR UPDATE SKIP LOCKED, a lease, a heartbeat.

`python -m benchmarks.published.naive one|committed` runs one naive worker until there is no job, or one that ends its process;
`locks` locks the rows and keeps them; `stream` takes what comes into naive.stream, for ever, on some connections at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import psycopg
from psycopg import AsyncConnection

CRASH = "crash"
TAKE = "SELECT id, work FROM naive.job WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED"
CLAIM = """
UPDATE naive.job
   SET state = 'running', attempts = attempts + 1, worker = %(worker)s, lease_until = now() + %(lease)s * interval '1 s'
 WHERE id = (SELECT id FROM naive.job WHERE (state = 'queued' OR (state = 'running' AND lease_until < now())) AND attempts < 3
              ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id, work"""

NEXT = """
UPDATE naive.stream SET state = 'running', started_at = clock_timestamp()
 WHERE id = (SELECT id FROM naive.stream WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id"""
AT_ONCE = 8
"""Connections that take from the stream."""


async def trace(job: object, worker: str, what: str = "start", dsn: str | None = None) -> None:
    """Write that a job ran, on a connection of its own."""
    async with await AsyncConnection.connect(dsn or os.environ["AIOQUEUE_DSN"], autocommit=True) as conn:
        await conn.execute("INSERT INTO naive.trace (job, worker, what) VALUES (%s, %s, %s)", [str(job), worker, what])


async def work(job: int, what: str, conn: AsyncConnection[Any], worker: str, dsn: str | None = None) -> None:
    """Do a job's work: an SQL text, or the end of this process."""
    await trace(job, worker, dsn=dsn)
    if what == CRASH:
        os._exit(86)
    await conn.execute(what.encode())


async def in_one_transaction(conn: AsyncConnection[Any], worker: str, dsn: str | None = None) -> int | None:
    """Claim, work and finish one job in one transaction; its id. Raises what the work raises, having rolled back."""
    async with conn.transaction():
        row = await (await conn.execute(TAKE)).fetchone()
        if row is None:
            return None
        await conn.execute("UPDATE naive.job SET attempts = attempts + 1 WHERE id = %s", [row[0]])
        await work(row[0], row[1], conn, worker, dsn)
        await conn.execute("UPDATE naive.job SET state = 'done' WHERE id = %s", [row[0]])
        return int(row[0])


async def with_a_committed_claim(conn: AsyncConnection[Any], worker: str, lease: float) -> int | None:
    """Claim with a lease and commit that; work; finish if it is still ours."""
    row = await (await conn.execute(CLAIM, {"worker": worker, "lease": lease})).fetchone()
    if row is None:
        return None
    await work(row[0], row[1], conn, worker)
    await conn.execute("UPDATE naive.job SET state = 'done' WHERE id = %s AND worker = %s", [row[0], worker])
    return int(row[0])


async def stream() -> None:
    """Claim, commit, finish, one job after the other; where there is none, look again in 10 ms."""
    async with await AsyncConnection.connect(os.environ["AIOQUEUE_DSN"], autocommit=True) as conn:
        while True:
            row = await (await conn.execute(NEXT)).fetchone()
            if row is None:
                await asyncio.sleep(0.01)
            else:
                await conn.execute("UPDATE naive.stream SET state = 'done' WHERE id = %s", [row[0]])


async def main(form: str) -> None:
    """Be a worker that takes jobs until there is none."""
    if form == "stream":
        await asyncio.gather(*(stream() for _ in range(AT_ONCE)))
    async with await psycopg.AsyncConnection.connect(os.environ["AIOQUEUE_DSN"], autocommit=True) as conn:
        worker = f"process {os.getpid()}"
        if form == "locks":
            await conn.execute("BEGIN")
            await conn.execute("UPDATE naive.job SET worker = %s", [worker])
            await asyncio.sleep(3600)
        while True:
            if form == "one":
                job = await in_one_transaction(conn, worker)
            else:
                job = await with_a_committed_claim(conn, worker, lease=1.0)
            if job is None:
                return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
