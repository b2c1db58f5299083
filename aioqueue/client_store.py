"""What clients do, one method each, the connection first: enqueue, cancel, retry, look at jobs by their id; a base of `Store`.

And the hints that go with it. The SQL stands in sql/functions/; which of it a client's role may call, in rights.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus

from .bound_store import BoundStore, array
from .job import AttemptError, JobState, JobStatus
from .new_jobs import NewJobs
from .pool_connection import PoolConnection
from .pooler import execute_all
from .states import Progress
from .trip import Trip

_CALLS = {
    # Types by their whole names where user code may have run before: a temporary table of that name would be found first.
    "enqueue_alike": "SELECT aioqueue.enqueue_alike(%s::pg_catalog.uuid[], %s::pg_catalog.text, %s::pg_catalog.text,"
    " %s::pg_catalog.text, %s::pg_catalog.text, %s::pg_catalog.int4, %s::pg_catalog.interval, %s::pg_catalog.timestamptz,"
    " %s::pg_catalog.int4, %s::pg_catalog.text, %s::pg_catalog.int4)",
    "known_tasks": "SELECT aioqueue.known_tasks()",
    "cancel_job": "SELECT aioqueue.cancel_job(%s::pg_catalog.uuid, %s::pg_catalog.text)",
    "retry_job": "SELECT aioqueue.retry_job(%s::uuid, %s::text)",
    "read_outcomes": "SELECT * FROM aioqueue.read_outcomes(%s::uuid[], %s::text[])",
    "follow": "SELECT * FROM aioqueue.follow(%s::uuid[], %s::text[])",
    "job_status": "SELECT s.*, f.value, f.note, f.reported_at FROM aioqueue.job_status(%s::uuid, %s::text) s"
    " LEFT JOIN LATERAL aioqueue.follow("
    "CASE WHEN s.state OPERATOR(pg_catalog.=) 'running' THEN ARRAY[s.id] ELSE '{}' END, ARRAY[NULL]::text[]) f ON true",
    "notify": "SELECT aioqueue.notify(%s::text)",
}


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job as its waiters see it; `state` None: still under way."""

    job_id: UUID
    state: JobState | None
    attempt: int | None
    result: str | None
    message: str | None
    error_type: str | None
    error_message: str | None
    stage: JobState | None = None
    """Its state, also while it is under way; only for those who watch."""
    progress: Progress | None = None


def _ended(row: Sequence[Any]) -> EndedJob:
    return EndedJob(row[0], None if row[1] is None else JobState(row[1]), *row[2:])


class ClientStore(BoundStore):
    """The operations of a client, bound to one schema."""

    def __init__(self, schema: str, calls: Mapping[str, str]) -> None:
        super().__init__(schema, {**calls, **_CALLS})

    async def enqueue_alike(self, conn: AsyncConnection[Any], jobs: NewJobs) -> int:
        """Write the jobs of one enqueue in the connection's transaction, return its XID; see sql/functions/enqueue_alike.sql."""
        return int(await self._value(conn, "enqueue_alike", *jobs.parameters))

    async def enqueue_alone(self, conn: PoolConnection, jobs: NewJobs, *, hint: Trip | None = None) -> None:
        """Do the same in a transaction of its own, and send the hint after it. `conn` is in none, and leads through no pooler."""
        trip = Trip(conn, then=hint)
        trip.add(self.wired["enqueue_alike"], jobs.parameters, prepare=True)
        try:
            await trip.run(None)
        finally:
            if conn.pgconn.pipeline_status != PipelineStatus.OFF:
                await conn.close()  # cancelled: its answers are still to come

    async def enqueue_parts(self, conn: AsyncConnection[Any], parts: Iterable[NewJobs]) -> None:
        """Write the parts of one enqueue, all or none, in a transaction of their own; `conn` is in none.

        The next part is made while the server writes those before.
        """
        await execute_all(conn, self.sql["enqueue_alike"], (part.parameters for part in parts))

    async def known_tasks(self, conn: AsyncConnection[Any]) -> list[str]:
        """Names of the tasks that workers have registered."""
        return [row[0] for row in await (await self.execute(conn, "known_tasks")).fetchall()]

    async def cancel_job(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> JobState | None:
        """Cancel, or ask for it (RUNNING); None: unknown to the tenant."""
        state = await self._value(conn, "cancel_job", job_id, tenant)
        return None if state is None else JobState(state)

    async def retry_job(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> UUID | None:
        """Enqueue a dead or cancelled job anew; the new id, or None for an unknown job."""
        found: UUID | None = await self._value(conn, "retry_job", job_id, tenant)
        return found

    async def job_status(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> JobStatus | None:
        """Read one job's state; None: unknown to the tenant."""
        cursor = await self.execute(conn, "job_status", (job_id, tenant))
        row = await cursor.fetchone()
        if row is None:
            return None
        error = None if row[15] is None else AttemptError(**dict(zip(AttemptError.__slots__, row[15:23], strict=True)))
        facts = dict(zip(JobStatus.__slots__, row[:15], strict=False))
        facts.update(state=JobState(row[5]), error=error, progress=None if row[23] is None else Progress(*row[23:26]))
        return JobStatus(**facts)

    async def read_outcomes(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]]) -> list[EndedJob]:
        """Read (job id, tenant) pairs for their waiters; unknown ones give nothing."""
        cursor = await self.execute(conn, "read_outcomes", (array(job_id for job_id, _ in jobs), [tenant for _, tenant in jobs]))
        return [_ended(row) for row in await cursor.fetchall()]

    async def follow(self, conn: AsyncConnection[Any], jobs: Sequence[tuple[UUID, str | None]]) -> list[EndedJob]:
        """Do as read_outcomes does for those who watch the jobs: with where those under way stand, and how far they are."""
        cursor = await self.execute(conn, "follow", (array(job_id for job_id, _ in jobs), [tenant for _, tenant in jobs]))
        found = []
        for *ended, stage, value, message, at in await cursor.fetchall():
            progress = None if value is None else Progress(value, message, at)
            found.append(replace(_ended(ended), stage=None if stage is None else JobState(stage), progress=progress))
        return found

    async def notify(self, conn: AsyncConnection[Any], kind: str) -> None:
        """Send the hint 'ready', 'done' or 'progress'; on a connection in autocommit."""
        await self._rows(conn, "notify", (kind,))

    def hint(self, conn: PoolConnection, kind: str) -> Trip:
        """Return that hint, to be sent with something else. Not through a pooler."""
        hint = Trip(conn)
        hint.add(self.wired["notify"], [kind], prepare=True)
        return hint

    async def ended_transactions(self, conn: AsyncConnection[Any], xids: Sequence[int]) -> set[int]:
        """Return those of the transactions (pg_current_xact_id) that have ended."""
        cursor = await self.execute(conn, "ended_transactions", (array(xids),))
        return {int(row[0]) for row in await cursor.fetchall()}
