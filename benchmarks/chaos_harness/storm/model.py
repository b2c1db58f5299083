"""What the parts of one storm share: its length and seed, what was asked for and became of it, what was found wrong."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from .servers import Servers

KINDS = ("kill", "stop", "terminate", "restart", "failover", "blackhole", "commit", "clock", "cancel")
QUERY_SECONDS = 30.0


@dataclass
class Storm:
    """One run."""

    servers: Servers
    directory: Path
    """Logs and diaries of the processes."""
    seconds: float
    seed: int
    kinds: frozenset[str]
    """The faults that happen."""
    interval: float
    """Seconds between faults, on average."""
    rate: float
    """Jobs enqueued a second, about."""
    patch: str = ""
    """The sabotage that the workers are to carry out; "": none."""
    sabotaged: bool = False
    """Something is broken on purpose: the first thing found wrong is enough."""
    bound: float = 120.0
    """Seconds after the storm in which everything must have ended."""
    committed: dict[UUID, float] = field(default_factory=dict)
    """Jobs whose COMMIT was answered, and when, by the monotonic clock."""
    rolled_back: set[UUID] = field(default_factory=set)
    """Jobs whose COMMIT was never sent."""
    unknown: set[UUID] = field(default_factory=set)
    """Jobs whose COMMIT was sent and not answered."""
    pooled: set[UUID] = field(default_factory=set)
    """Jobs enqueued without a transaction of the caller's, and answered."""
    pooled_unknown: int = 0
    """Enqueues of one job without a transaction of the caller's that raised."""
    cancelled: dict[UUID, str] = field(default_factory=dict)
    """Jobs somebody asked to cancel, and the answer; "" where there was none."""
    tenants: dict[UUID, str | None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What was found wrong."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """From when to when nobody could commit: the server was away, or its standby."""
    slow: list[tuple[float, float]] = field(default_factory=list)
    """From when to when one commit took a good part of a lease, though nothing was done to the server."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more jobs are enqueued and no more faults begin."""
    drained: float = 0.0
    """Seconds from the end of the storm to the last outcome."""
    ended: float = 0.0
    """When no more faults came."""
    began: float = field(default_factory=time.monotonic)

    def dice(self, name: str) -> random.Random:
        """Random numbers of one actor, the same for the same seed."""
        return random.Random(f"{self.seed} {name}")

    def fault(self, text: str) -> None:
        """Something is wrong."""
        self.faults.append(text)
        print(f"  FAULT after {time.monotonic() - self.began:.1f} s: {text}", flush=True)

    @property
    def caught(self) -> bool:
        """Whether there is no need to go on."""
        return self.sabotaged and bool(self.faults)

    def wants(self, kind: str) -> bool:
        """Whether faults of this kind happen."""
        return kind in self.kinds

    async def pause(self, seconds: float) -> bool:
        """Wait; whether the storm goes on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()
        return not self.over.is_set()

    @contextlib.asynccontextmanager
    async def watcher(self) -> AsyncIterator[AsyncConnection[TupleRow]]:
        """A connection of the superuser that no fault touches but the server's own end."""
        async with asyncio.timeout(QUERY_SECONDS):
            conn = await AsyncConnection.connect(self.servers.watch, autocommit=True, connect_timeout=10)
        try:
            yield conn
        finally:
            await conn.close()

    async def ask(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        """Rows of one query of the superuser, once the server answers."""
        while True:
            try:
                async with asyncio.timeout(QUERY_SECONDS), self.watcher() as conn:
                    return await (await conn.execute(query.encode(), params or None)).fetchall()
            except psycopg.OperationalError:
                await asyncio.sleep(0.1)
