"""What an operator changes while jobs run: weight, limit and pause of a tenant, pauses of queues.

A base of the app. A change holds for every claim once the call has returned: it is committed, then the claims in flight are
waited for, then the jobs that it lets go are made ready (sql/functions/set_tenant.sql).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from .enqueue import Enqueuing
from .errors import InvalidOption
from .registry import Opened
from .settings import check_name

BATCH = 2000
"""Jobs moved in one transaction."""
COUNTED = 10_000
"""Running and parked jobs of a tenant that are counted at most."""
LISTED = 10_000
"""Tenants listed at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """A tenant that has a weight, a limit or a pause of its own; `running` and `parked` are counted up to 10,000.

    `running` is counted where there is a limit, None without one; `parked` jobs are ready and wait for the limit.
    """

    tenant: str
    weight: float
    max_running: int | None
    paused: bool
    running: int | None
    parked: int


class Controlling(Enqueuing[Opened]):
    """The app's control over tenants and queues."""

    async def set_tenant(
        self,
        tenant: str,
        *,
        weight: float | EllipsisType = ...,
        max_running: int | EllipsisType | None = ...,
        paused: bool | EllipsisType = ...,
    ) -> None:
        """Change what is given of a tenant; what is left out stays as it is.

        `weight` (0.01 to 100, 1 by default): its share of a queue beside other tenants; its waiting jobs get new positions.
        `max_running`: how many of its jobs run at once, over all workers and queues; None: no limit. Jobs that run when a limit
        comes count, and go on. `paused`: none of its jobs is started; those that run go on. Exact once this has returned.
        Raises InvalidOption, AppNotOpen; cancelled or failed half-way, workers bring it to its end within seconds.
        """
        _check_name("tenant", tenant)
        given = {"weight": weight, "max_running": max_running, "paused": paused}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not ...}
        for name, value in values.items():
            _CHECKS[name](value)
        services = self.services("set_tenant()")
        database = services.database
        async with database.for_caller() as conn:
            keep = [name for name in given if name not in values]
            reweighed, key = await self.store.set_tenant(conn, tenant, **values, keep=keep)
        async with database.for_caller() as conn:
            await self.store.settle_limits(conn)
        moved = BATCH if reweighed else 0
        last: tuple[int | None, int | None] = (None, None)
        while moved == BATCH:
            async with database.for_caller() as conn:
                moved, last = await self.store.park_tenant(conn, tenant, limit=BATCH, after=last)
        moved, again = BATCH, False
        while moved == BATCH:
            async with database.for_caller() as conn:
                moved, _ = await self.store.sweep_parked(conn, limit=BATCH, keys=[key], again=again)
            again = True
        services.notifier.hint("ready")

    async def list_tenants(self) -> list[TenantStatus]:
        """The tenants that have a weight, a limit or a pause of their own, by name (10,000 at most). Raises AppNotOpen."""
        async with self.services("list_tenants()").database.for_caller() as conn:
            rows = await self.store.list_tenants(conn, cap=COUNTED, limit=LISTED)
        return [TenantStatus(**row) for row in rows]

    async def pause_queue(self, queue: str) -> None:
        """Start none of a queue's jobs; those that run go on. Exact once it has returned. Raises InvalidOption, AppNotOpen."""
        await self._set_queue("pause_queue()", queue, paused=True)

    async def resume_queue(self, queue: str) -> None:
        """Start a queue's jobs again. Raises InvalidOption, AppNotOpen."""
        await self._set_queue("resume_queue()", queue, paused=False)

    async def _set_queue(self, action: str, queue: str, *, paused: bool) -> None:
        _check_name("queue", queue)
        services = self.services(action)
        async with services.database.for_caller() as conn:
            await self.store.set_queue(conn, queue, paused=paused)
        if paused:
            async with services.database.for_caller() as conn:
                await self.store.wait_for_claims(conn)
        else:
            services.notifier.hint("ready")


def _check_name(option: str, name: object) -> None:
    try:
        check_name(option, name)
    except (TypeError, ValueError) as error:
        raise InvalidOption(option, str(error).removeprefix(f"{option}: ")) from None


def _check_weight(weight: object) -> None:
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0.01 <= weight <= 100:
        raise InvalidOption("weight", f"expected a number from 0.01 to 100, got {weight!r}")


def _check_max_running(limit: object) -> None:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < 2**31):
        raise InvalidOption("max_running", f"expected a whole number of at least 1, or None, got {limit!r}")


def _check_paused(paused: object) -> None:
    if not isinstance(paused, bool):
        raise InvalidOption("paused", f"expected True or False, got {paused!r}")


_CHECKS: dict[str, Callable[[object], None]] = {
    "weight": _check_weight, "max_running": _check_max_running, "paused": _check_paused,
}  # fmt: skip
