"""The faults of a storm: a schedule made from the seed alone, and the hands that carry it out.

The seed fixes which fault comes when, whom it meets and how long it lasts; what that one does just then varies.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import psycopg

from aioqueue.errors import EmbeddedError

from .clock import shift
from .fleet import Fleet, Slot
from .model import Storm
from .servers import WATCH
from .tasks import LEASE

WEIGHTS = {
    "kill": 5.0,
    "stop": 4.0,
    "terminate": 5.0,
    "restart": 1.0,
    "failover": 0.7,
    "blackhole": 3.0,
    "commit": 3.0,
    "clock": 1.5,
}
DAY = 86_400.0


@dataclass(frozen=True)
class Fault:
    """One fault: what, when (seconds from the start), how long, and numbers that choose whom it meets and how much."""

    at: float
    kind: str
    seconds: float
    choice: float
    number: int


def schedule(storm: Storm) -> list[Fault]:
    """Make the faults of the whole storm."""
    dice = storm.dice("faults")
    kinds = [kind for kind in WEIGHTS if storm.wants(kind)]
    found: list[Fault] = []
    at = 2.0
    while kinds and at < storm.seconds:
        kind = dice.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        seconds = {
            "stop": dice.uniform(0.3, 3) * LEASE,
            "blackhole": dice.uniform(0.3, 3) * LEASE,
            "restart": dice.choice((0.0, 0.0, dice.uniform(0, 2) * LEASE)),
            "clock": dice.choice((-30 * DAY, -DAY, -60.0, 0.0, 60.0, DAY, 30 * DAY)) * dice.random(),
        }.get(kind, 0.0)
        found.append(Fault(at, kind, seconds, dice.random(), dice.choice((1, 1, 2, 5, 100))))
        at += dice.expovariate(1 / storm.interval)
    return found


class Faults:
    """Carries the schedule out. Faults may overlap; each heals what it broke, but for the clocks."""

    def __init__(self, storm: Storm, fleet: Fleet) -> None:
        self._storm = storm
        self._fleet = fleet
        self._servers = asyncio.Lock()
        self._dark: dict[int, set[int]] = {slot.number: set() for slot in fleet.workers}
        self._tokens = count()
        self._copies: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Do all of them; returns when everything is healed."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in schedule(self._storm):
                if self._storm.caught:
                    break
                await asyncio.sleep(max(0.0, begin + fault.at - time.monotonic()))
                group.create_task(self._do(fault))
            await asyncio.sleep(max(0.0, begin + self._storm.seconds - time.monotonic()))
            self._storm.over.set()
            self._fleet.tell_enqueuers()
        if self._copies:
            await asyncio.wait(self._copies)
        for slot in self._fleet.workers:
            for proxy in slot.proxies:
                proxy.cut_commits(0)
        self._storm.ended = time.monotonic()

    async def _do(self, fault: Fault) -> None:
        if fault.kind != "failover":
            self._storm.counts[f"fault: {fault.kind}"] += 1
        slots = self._fleet.workers
        slot = slots[int(fault.choice * len(slots))]
        match fault.kind:
            case "kill":
                # One in five meets a process that enqueues.
                enqueuers = self._fleet.enqueuers
                self._kill(enqueuers[int(fault.choice * 100) % len(enqueuers)] if fault.number == 5 else slot)
            case "stop":
                await self._hold(slot, fault.seconds)
            case "terminate":
                await self._terminate(fault.choice, fault.number)
            case "restart":
                await self._restart(fault.seconds)
            case "failover":
                await self._fail_over()
            case "commit":
                for proxy in slot.proxies:
                    proxy.cut_commits(min(fault.number, 5))
            case "clock":
                self._shift([*slots, *self._fleet.enqueuers][int(fault.choice * (len(slots) + 2))], fault.seconds)
            case _:
                # Now and then it is everybody's network.
                await self._blackhole(slots if fault.number == 100 else [slot], fault.seconds)

    def _kill(self, first: Slot) -> None:
        # Rather one that works than one that starts: on a busy machine no worker would ever come to work.
        slots = self._fleet.workers if first.proxies else self._fleet.enqueuers
        inturn = [*slots[first.number :], *slots[: first.number]]
        life = next((slot.life for slot in inturn if slot.life.ready), first.life)
        if life.process.poll() is None:
            life.killed = True
            life.process.kill()
            life.ended = time.monotonic()
            self._storm.counts["enqueuers killed"] += not first.proxies

    @staticmethod
    async def _hold(slot: Slot, seconds: float) -> None:
        life = slot.life
        since = time.monotonic()
        if life.process.poll() is not None:
            return
        life.stopped.append((since, float("inf")))
        place = len(life.stopped) - 1
        life.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        life.stopped[place] = (since, time.monotonic())
        # Another one may hold it still: then that one ends here, too.
        life.process.send_signal(signal.SIGCONT)

    @staticmethod
    def _shift(slot: Slot, seconds: float) -> None:
        slot.clock = seconds
        shift(slot.life.clock, seconds)

    async def _terminate(self, choice: float, number: int) -> None:
        with contextlib.suppress(psycopg.OperationalError):
            async with self._storm.watcher() as conn:
                cursor = await conn.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'storm-%%' AND application_name <> %s ORDER BY md5(pid::text || %s) LIMIT %s",
                    [WATCH, str(choice), number],
                )
                self._storm.counts["backends terminated"] += len(await cursor.fetchall())

    async def _restart(self, seconds: float) -> None:
        servers = self._storm.servers
        async with self._servers:
            with self._outage():
                await asyncio.to_thread(servers.primary.stop)
                await asyncio.sleep(seconds)
                await asyncio.to_thread(servers.primary.start)
                if servers.replicated:
                    # Until the standby is back, every commit waits for it.
                    await asyncio.to_thread(servers.wait_caught_up)

    async def _fail_over(self) -> None:
        servers = self._storm.servers
        async with self._servers:
            if not servers.replicated or not await asyncio.to_thread(servers.wait_caught_up):
                self._storm.counts["failovers left out, no standby was ready"] += 1
                return
            self._storm.counts["fault: failover"] += 1
            with self._outage():
                await asyncio.to_thread(servers.promote)
        copy = asyncio.create_task(self._copy())
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    async def _copy(self) -> None:
        async with self._servers:
            try:
                await asyncio.to_thread(self._storm.servers.replicate)
            except (EmbeddedError, psycopg.Error) as error:
                print(f"  no new standby: {error}", flush=True)

    @contextlib.contextmanager
    def _outage(self) -> Iterator[None]:
        since = time.monotonic()
        place = len(self._storm.outages)
        self._storm.outages.append((since, float("inf")))
        yield
        self._storm.outages[place] = (since, time.monotonic())

    async def _blackhole(self, slots: list[Slot], seconds: float) -> None:
        token = next(self._tokens)
        since = time.monotonic()
        places = []
        for slot in slots:
            self._dark[slot.number].add(token)
            for proxy in slot.proxies:
                proxy.mode = "swallow"
            slot.blackouts.append((since, float("inf")))
            places.append((slot, len(slot.blackouts) - 1))
        await asyncio.sleep(seconds)
        for slot, place in places:
            self._dark[slot.number].discard(token)
            slot.blackouts[place] = (since, time.monotonic())
            if not self._dark[slot.number]:
                for proxy in slot.proxies:
                    proxy.mode = "pass"
                    # What was swallowed is missing: no TCP connection goes on after that.
                    await asyncio.to_thread(proxy.cut)
