"""The operations of weights, limits and pauses, one method each, the connection first; a base of `Store`.

The SQL stands in sql/functions/. Changes of limits are settled and swept after their commit (sql/functions/set_tenant.sql).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from psycopg import AsyncConnection

from .bound_store import BoundStore, array

LOWEST_KEY, HIGHEST_KEY = -(2**63), 2**63 - 1

_CALLS = {
    "set_tenant": "SELECT * FROM aioqueue.set_tenant(%s::text, %s::double precision, %s::integer, %s::boolean, %s::text[])",
    "set_queue": "SELECT aioqueue.set_queue(%s::text, %s::boolean)",
    "wait_for_claims": "SELECT aioqueue.wait_for_claims(%s::boolean)::text",
    "settle_limits": "SELECT aioqueue.settle_limits(%s::text::jsonb, %s::boolean)",
    "park_tenant": "SELECT * FROM aioqueue.park_tenant(%s::text, %s::integer, %s::bigint, %s::bigint)",
    "sweep_parked": "SELECT * FROM aioqueue.sweep_parked(%s::integer, %s::bigint[], %s::boolean, %s::bigint, %s::bigint,"
    " %s::text::jsonb, %s::text::jsonb)",
    "unpark": "SELECT * FROM aioqueue.unpark(%s::bigint[], %s::integer[], %s::text::jsonb, %s::text::jsonb)",
}


class LimitStore(BoundStore):
    """The operations of limits, bound to one schema."""

    def __init__(self, schema: str, calls: Mapping[str, str]) -> None:
        super().__init__(schema, {**calls, **_CALLS})

    async def set_tenant(
        self,
        conn: AsyncConnection[Any],
        tenant: str,
        *,
        weight: float | None = None,
        max_running: int | None = None,
        paused: bool | None = None,
        keep: Collection[str] = (),
    ) -> tuple[bool, int]:
        """Set what is not in `keep`; whether the weight changed, and the tenant's key."""
        cursor = await self.execute(conn, "set_tenant", (tenant, weight, max_running, paused, list(keep)))
        row = await cursor.fetchone()
        assert row is not None  # noqa: S101 - a function with OUT parameters returns one row
        return row[0], row[1]

    async def set_queue(self, conn: AsyncConnection[Any], queue: str, *, paused: bool) -> None:
        """Pause a queue, or resume it."""
        await self.execute(conn, "set_queue", (queue, paused))

    async def wait_for_claims(self, conn: AsyncConnection[Any], *, always: bool = True) -> str | None:
        """Wait for the claims in flight (unless `always`: only where a limit is new); the limits that are to be settled."""
        return cast("str | None", await self._value(conn, "wait_for_claims", always))

    async def settle_limits(self, conn: AsyncConnection[Any], *, wait: bool = True) -> None:
        """Wait for the claims in flight, then count what runs already, in two transactions: `conn` is in none.

        Without `wait` only where a limit is new, and leaving aside those that somebody is changing.
        """
        seen = await self.wait_for_claims(conn, always=wait)
        if seen is not None:
            await self.execute(conn, "settle_limits", (seen, wait))

    async def park_tenant(
        self, conn: AsyncConnection[Any], tenant: str, *, limit: int, after: tuple[int | None, int | None] = (None, None)
    ) -> tuple[int, tuple[int | None, int | None]]:
        """Park a tenant's ready jobs, so that they get new positions; the number, and where the next call goes on."""
        row = await (await self.execute(conn, "park_tenant", (tenant, limit, *after))).fetchone()
        assert row is not None  # noqa: S101 - a function with OUT parameters returns one row
        return row[0], (row[1], row[2])

    async def sweep_parked(
        self,
        conn: AsyncConnection[Any],
        *,
        limit: int,
        keys: Sequence[int] | None = None,
        again: bool = False,
        after: int = LOWEST_KEY,
        upto: int = HIGHEST_KEY,
        held: str = "{}",
        parked: str = "{}",
    ) -> tuple[int, int | None]:
        """Make parked jobs ready where there is room (`again`: only those that take none), of `keys` or of the next ones `after`.

        The number (−1: another process is at it), and the last key seen to, None without one. `held`, `parked`: KeyFloors.
        """
        params = (limit, None if keys is None else array(keys), again, after, upto, held, parked)
        row = await (await self.execute(conn, "sweep_parked", params)).fetchone()
        assert row is not None  # noqa: S101 - a function with OUT parameters returns one row
        return row[0], row[1]

    async def unpark(
        self, conn: AsyncConnection[Any], wanted: Mapping[int, int], *, held: str = "{}", parked: str = "{}"
    ) -> tuple[int, dict[int, int]]:
        """Make parked jobs ready, so many of each key; the number, and where each key's first parked row now stands.

        `held`, `parked`: KeyFloors.
        """
        cursor = await self.execute(conn, "unpark", (array(wanted), array(wanted.values()), held, parked))
        row = await cursor.fetchone()
        assert row is not None  # noqa: S101 - a function with OUT parameters returns one row
        return row[0], {key: first for key, first in zip(wanted, row[1], strict=True) if first is not None}
