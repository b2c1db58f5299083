"""Watches what the workers hold while the demo runs: connections, open transactions, holders of the xmin horizon.

A sampler on a connection of its own, of which nothing shows in the figures. What happens between two looks it cannot see.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import psycopg

INTERVAL = 0.05
"""Seconds between looks."""

_LOOK = """
SELECT (SELECT count(*) FROM aioqueue.live WHERE worker IS NOT NULL),
       count(*), count(*) FILTER (WHERE xact_start IS NOT NULL),
       coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float,
       count(*) FILTER (WHERE backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  FROM pg_catalog.pg_stat_activity WHERE usename = 'aioqueue_worker'
"""


@dataclass(slots=True)
class Held:
    """The most that was seen in one phase, and what was held when the most jobs ran at once."""

    phase: str
    looks: int = 0
    running: int = 0
    connections: int = 0
    transactions: int = 0
    longest_transaction: float = 0.0
    xmin_holders: int = 0
    at_peak: list[tuple[int, int, int]] = field(default_factory=list)
    """(connections, in a transaction, holding the xmin horizon) of each look at which `running` jobs ran."""

    def add(self, running: int, connections: int, transactions: int, longest: float, holders: int) -> None:
        """Take one look in."""
        self.looks += 1
        if running > self.running:
            self.running = running
            self.at_peak = []
        if running == self.running:
            self.at_peak.append((connections, transactions, holders))
        self.connections = max(self.connections, connections)
        self.transactions = max(self.transactions, transactions)
        self.longest_transaction = max(self.longest_transaction, longest)
        self.xmin_holders = max(self.xmin_holders, holders)

    def least_at_peak(self) -> tuple[int, int, int]:
        """Return the look at the peak at which least was held."""
        return min(self.at_peak, key=lambda look: look[1:], default=(0, 0, 0))


class Sampler:
    """Looks all the time; the demo says which phase it is in."""

    def __init__(self, conn: psycopg.AsyncConnection[Any]) -> None:
        self._conn = conn
        self.phases: list[Held] = [Held("start")]

    def enter(self, phase: str) -> Held:
        """Begin a phase; return what will be seen in it."""
        self.phases.append(Held(phase))
        return self.phases[-1]

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            row = await (await self._conn.execute(_LOOK)).fetchone()
            if row is not None:
                self.phases[-1].add(*row)
            await asyncio.sleep(INTERVAL)
