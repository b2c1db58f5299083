"""What people read of a queue, as rows of named columns; a base of `Store`.

The statements stand in sql/statements/, one file each, whose header says what is looked at; they are made for the worker's
role. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from .bound_store import BoundStore, array
from .job import PRIORITIES, SUSPECT, JobState, lane
from .pooler import execute


class JobPage(NamedTuple):
    """Some jobs, how many were looked at for them, and the id of the last one looked at (of the newest only)."""

    jobs: list[dict[str, Any]]
    scanned: int
    last: UUID | None


class Reading(BoundStore):
    """What is read, bound to one schema."""

    async def _dicts(self, conn: AsyncConnection[Any], name: str, params: Mapping[str, object]) -> list[dict[str, Any]]:
        cursor = conn.cursor(row_factory=dict_row)
        await execute(cursor, self.sql[name], params)
        return await cursor.fetchall()

    async def list_jobs(
        self,
        conn: AsyncConnection[Any],
        *,
        state: str | None = None,
        queue: str | None = None,
        tenant: str | None = None,
        task: str | None = None,
        before: UUID | None = None,
        window: int,
        limit: int,
    ) -> JobPage:
        """Up to `limit` jobs among the `window` first ones of a state (None: the newest of all).

        Order: newest first; ready ones as they will be claimed, scheduled ones by their time, dead and cancelled ones by
        their end. `before`: only jobs with a lower id (not for ready, running, scheduled, dead, cancelled).
        """
        filters: dict[str, object] = {"queue": queue, "tenant": tenant, "task": task, "window": window, "limit": limit}
        if state in (JobState.READY, JobState.RUNNING):
            lanes = None if queue is None else array(lane(queue, level) for level in (*PRIORITIES, SUSPECT))
            rows = await self._dicts(conn, "list_live", {**filters, "lanes": lanes, "running": state == JobState.RUNNING})
        elif state == JobState.SCHEDULED:
            rows = await self._dicts(conn, "list_scheduled", filters)
        elif state in (JobState.DEAD, JobState.CANCELLED):
            rows = await self._dicts(conn, "list_ended", {**filters, "state": str(state)})
        else:
            rows = await self._dicts(conn, "list_newest", {**filters, "before": before, "state": state})
        scanned, last = (rows[0]["scanned"], rows[0]["last"]) if rows else (0, None)
        jobs = [{name: value for name, value in row.items() if name not in ("scanned", "last")} for row in rows if row["id"]]
        return JobPage(jobs, scanned, last)

    async def show_job(self, conn: AsyncConnection[Any], job_id: UUID, *, tenant: str | None = None) -> dict[str, Any] | None:
        """All that is known of one job, with payload and result; None: unknown to the tenant."""
        rows = await self._dicts(conn, "show_job", {"id": job_id, "tenant": tenant})
        return rows[0] if rows else None

    async def list_attempts(self, conn: AsyncConnection[Any], job_id: UUID, *, limit: int) -> list[dict[str, Any]]:
        """The job's attempts that did not succeed, the latest first."""
        return await self._dicts(conn, "list_attempts", {"id": job_id, "limit": limit})

    async def count_lanes(self, conn: AsyncConnection[Any], *, cap: int) -> list[dict[str, Any]]:
        """Ready and running jobs of each queue and priority, each lane counted up to `cap`."""
        return await self._dicts(conn, "count_lanes", {"cap": cap})

    async def count_tenants(self, conn: AsyncConnection[Any], *, cap: int, limit: int) -> list[dict[str, Any]]:
        """The tenants with most ready jobs, each lane counted up to `cap`."""
        return await self._dicts(conn, "count_tenants", {"cap": cap, "limit": limit})

    async def count_scheduled(self, conn: AsyncConnection[Any], *, cap: int) -> dict[str, Any]:
        """Scheduled jobs up to `cap`, those of them that wait to be retried, and the next one's time."""
        return (await self._dicts(conn, "count_scheduled", {"cap": cap}))[0]

    async def count_dead(self, conn: AsyncConnection[Any], *, cap: int) -> int:
        """Jobs that ended as dead in the last 7 days, up to `cap`."""
        return int((await self._dicts(conn, "count_dead", {"cap": cap}))[0]["dead"])

    async def count_unknown_tasks(self, conn: AsyncConnection[Any], *, cap: int) -> list[dict[str, Any]]:
        """Jobs that wait because no worker that claimed them knew their task, by name."""
        return await self._dicts(conn, "count_unknown_tasks", {"cap": cap})

    async def list_workers(self, conn: AsyncConnection[Any], *, cap: int) -> list[dict[str, Any]]:
        """The workers that have a row, with the jobs they hold, each lane counted up to `cap`."""
        return await self._dicts(conn, "list_workers", {"cap": cap})

    async def list_handed_back(self, conn: AsyncConnection[Any], *, cap: int, limit: int) -> list[dict[str, Any]]:
        """Jobs that were handed back more than 20 times in a row, among the first `cap` of each place."""
        return await self._dicts(conn, "list_handed_back", {"cap": cap, "limit": limit})

    async def count_parked(self, conn: AsyncConnection[Any], *, cap: int) -> list[dict[str, Any]]:
        """Jobs that wait for a limit, by limit, among the first `cap` parked."""
        return await self._dicts(conn, "count_parked", {"cap": cap})

    async def list_paused(self, conn: AsyncConnection[Any], *, limit: int) -> list[dict[str, Any]]:
        """Paused queues and tenants."""
        return await self._dicts(conn, "list_paused", {"limit": limit})

    async def list_tenants(self, conn: AsyncConnection[Any], *, cap: int, limit: int) -> list[dict[str, Any]]:
        """Tenants with a weight, a limit or a pause of their own, with what runs and waits, each up to `cap`."""
        return await self._dicts(conn, "list_tenants", {"cap": cap, "limit": limit})
