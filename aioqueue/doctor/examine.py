"""Runs the checks: all of them for `doctor`, those about tenants and the queue's own tables at a worker's start.

A check is a module of this package; which ones there are stands here, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aioqueue.finding import Finding, Kind, Severity

from . import (
    bypass,
    clock,
    connections,
    extra_policies,
    horizon,
    id_times,
    notifications,
    partitions,
    pooler,
    queue_policies,
    queues,
    server_settings,
    tenant_default,
    tenant_tables,
    vacuum,
    version,
    views,
)
from .examination import Examination

SHOWN = 20
"""Findings of one code at most; the others are counted."""


class Check(Protocol):
    """What each of these modules is."""

    async def look(self, examination: Examination) -> list[Finding]:
        """Look, and say what was found."""
        ...


TENANTS: tuple[Check, ...] = (bypass, tenant_tables, partitions, views, tenant_default, extra_policies)
"""Whether policies keep tenants apart."""
QUEUE: tuple[Check, ...] = (connections, queues, id_times)
"""What stands in the queue's own tables; they must be there, and readable."""
SERVER: tuple[Check, ...] = (vacuum, horizon, server_settings)
"""About the server."""
WAY: tuple[Check, ...] = (pooler, notifications, clock)
"""About the way to it; not in a transaction, at whose end alone a notification is sent."""
UNREAD = (
    "jobs that nobody runs, ids of a wrong clock, and the connections that workers need: the queue's tables cannot be read as "
    "they are"
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, what could not be seen, and figures that are shown whether or not something is wrong."""

    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def wrong(self) -> bool:
        """Whether something is wrong: there is more than advice."""
        return any(finding.wrong for finding in self.findings)


async def examine(examination: Examination) -> Report:
    """Make every check. Raises psycopg.Error where it cannot be made: no rights, no server."""
    async with examination.reading():
        found = [*await version.look(examination), *await queue_policies.look(examination)]
        if found:
            examination.unseen.append(UNREAD)
        checks = [*(() if found else QUEUE), *TENANTS, *SERVER]
        await examination.find_roles()
        await examination.find_tenant_tables()
        for check in checks:
            found += await check.look(examination)
    for check in WAY:
        found += await check.look(examination)
    return Report(tuple(shorten(found)), tuple(examination.unseen), examination.facts)


async def examine_start(examination: Examination) -> list[Finding]:
    """Make the checks of a worker's start, for the role of its own session; what is only advice is left out."""
    async with examination.reading():
        await examination.find_roles(mine=True)
        await examination.find_tenant_tables()
        found = await queue_policies.look(examination)
        for check in TENANTS:
            found += await check.look(examination)
    return shorten([finding for finding in found if finding.wrong])


def shorten(findings: Sequence[Finding]) -> list[Finding]:
    """Sort by how bad they are, and keep the first of each code; the last that is kept says how many there are."""
    order = list(Severity)
    number = Counter(finding.code for finding in findings)
    kept: list[Finding] = []
    seen: Counter[str] = Counter()
    for finding in sorted(findings, key=lambda finding: order.index(finding.severity)):
        seen[finding.code] += 1
        if seen[finding.code] < SHOWN or number[finding.code] == SHOWN:
            kept.append(finding)
        elif seen[finding.code] == SHOWN:
            more = number[finding.code] - SHOWN
            kept.append(Finding(finding.code, finding.severity, f"{finding.what} (and {more} more)", finding.why, finding.fix))
    return kept


def kinds() -> dict[str, Kind]:
    """Return every code there is, with what all its findings have in common."""
    checks: Sequence[Any] = (version, queue_policies, *QUEUE, *TENANTS, *SERVER, *WAY)
    return {value.code: value for check in checks for value in vars(check).values() if isinstance(value, Kind)}
