"""Jobs of whatever tasks and options in one call, written as any client of SQL writes them: by aioqueue.enqueue_many.

What the library itself enqueues are jobs of one task, which differ in id and payload only (aioqueue/new_jobs.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import tuple_row

from aioqueue.new_jobs import NewJobs
from aioqueue.options import Options
from aioqueue.sql import as_sql
from aioqueue.store import Store

ENQUEUE = """
SELECT pg_catalog.max(pg_catalog.pg_current_xact_id()::pg_catalog.text)
FROM (SELECT FROM aioqueue.enqueue_many(%s::pg_catalog.text::pg_catalog.jsonb) LIMIT 1) j
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob(Options):
    """One of them; the payload is JSON text."""

    id: UUID
    task: str
    payload: str

    @property
    def json(self) -> str:
        """The object that enqueue_many takes; the payload is JSON text already and is put in as it is."""
        facts = {**asdict(self), "id": str(self.id), "payload": None}
        if self.run_at is not None:
            facts["run_at"] = self.run_at.isoformat()
        options = json.dumps({name: value for name, value in facts.items() if value is not None}, ensure_ascii=False)
        return f'{options[:-1]}, "payload": {self.payload}}}'


def split(jobs: NewJobs) -> list[NewJob]:
    """The jobs of one enqueue, each by itself."""
    facts = {field.name: getattr(jobs, field.name) for field in fields(NewJob) if field.name not in ("id", "payload")}
    return [NewJob(id=job_id, payload=payload, **facts) for job_id, payload in zip(jobs.ids, jobs.payloads, strict=True)]


async def enqueue_many(store: Store, conn: AsyncConnection[Any], jobs: Sequence[NewJob]) -> int:
    """Write them in the connection's transaction and return its XID."""
    cursor = AsyncCursor(conn, row_factory=tuple_row)
    await cursor.execute(as_sql(ENQUEUE, store.schema), [f"[{','.join([job.json for job in jobs])}]"])
    ((xid,),) = await cursor.fetchall()
    return int(xid)
