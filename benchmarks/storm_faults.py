"""The faults of a storm: a schedule made from the seed alone, and the hands that carry it out.

The seed fixes which fault comes when and how long it lasts; what it meets there varies from run to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass
from itertools import count

import psycopg

from aioqueue import AioQueue
from aioqueue.errors import AioQueueError

from .storm_fleet import Fleet, Slot
from .storm_run import Storm
from .storm_server import WATCH
from .storm_tasks import LEASE

WEIGHTS = {"kill": 5.0, "stop": 4.0, "terminate": 6.0, "restart": 1.5, "blackhole": 3.0}


@dataclass(frozen=True)
class Fault:
    """One fault: what, when (seconds from the start), how long, and numbers that choose whom it meets."""

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
        }.get(kind, 0.0)
        found.append(Fault(at, kind, seconds, dice.random(), dice.choice((1, 1, 2, 5, 100))))
        at += dice.expovariate(1 / storm.interval)
    return found


class Faults:
    """Carries the schedule out. Faults may overlap; each heals what it broke."""

    def __init__(self, storm: Storm, fleet: Fleet) -> None:
        self._storm = storm
        self._fleet = fleet
        self._server = asyncio.Lock()
        self._dark: dict[int, set[int]] = {slot.number: set() for slot in fleet.slots}
        self._tokens = count()

    async def run(self) -> None:
        """Do all of them; returns when everything is healed."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in schedule(self._storm):
                await asyncio.sleep(max(0.0, begin + fault.at - time.monotonic()))
                group.create_task(self._do(fault))
            await asyncio.sleep(max(0.0, begin + self._storm.seconds - time.monotonic()))
            self._storm.over.set()
        self._storm.ended = time.monotonic()

    async def _do(self, fault: Fault) -> None:
        self._storm.counts[f"fault: {fault.kind}"] += 1
        slots = self._fleet.slots
        slot = slots[int(fault.choice * len(slots))]
        match fault.kind:
            case "kill":
                self._kill(slot)
            case "stop":
                await self._hold(slot, fault.seconds)
            case "terminate":
                await self._terminate(fault.choice, fault.number)
            case "restart":
                await self._restart(fault.seconds)
            case _:
                # Now and then it is everybody's network.
                await self._blackhole(slots if fault.number == 100 else [slot], fault.seconds)

    def _kill(self, first: Slot) -> None:
        # Rather one that works than one that starts: on a busy machine no worker would ever come to work.
        slots = self._fleet.slots
        inturn = [*slots[first.number :], *slots[: first.number]]
        life = next((slot.life for slot in inturn if slot.life.ready), first.life)
        if life.process.poll() is None:
            life.killed = True
            life.process.kill()
            life.ended = time.monotonic()

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
        async with self._server:
            since = time.monotonic()
            self._storm.outages.append((since, float("inf")))
            await asyncio.to_thread(self._storm.server.stop)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self._storm.server.start)
            self._storm.outages[-1] = (since, time.monotonic())

    async def _blackhole(self, slots: list[Slot], seconds: float) -> None:
        token = next(self._tokens)
        since = time.monotonic()
        places = []
        for slot in slots:
            self._dark[slot.number].add(token)
            slot.proxy.mode = "swallow"
            slot.blackouts.append((since, float("inf")))
            places.append((slot, len(slot.blackouts) - 1))
        await asyncio.sleep(seconds)
        for slot, place in places:
            self._dark[slot.number].discard(token)
            slot.blackouts[place] = (since, time.monotonic())
            if not self._dark[slot.number]:
                slot.proxy.mode = "pass"
                # What was swallowed is missing: no TCP connection goes on after that.
                await asyncio.to_thread(slot.proxy.cut)


class Canceller:
    """Cancels jobs from outside while they wait, run, or have ended."""

    def __init__(self, storm: Storm, app: AioQueue) -> None:
        self._storm = storm
        self._app = app

    async def run(self) -> None:
        """Until the storm is over."""
        storm = self._storm
        dice = storm.dice("canceller")
        while await storm.pause(dice.uniform(0.05, 0.6)):
            newest = list(storm.committed)[-60:]
            if not newest:
                continue
            job_id = dice.choice(newest)
            storm.cancelled.setdefault(job_id, "")
            storm.counts["fault: cancel"] += 1
            with contextlib.suppress(psycopg.OperationalError, AioQueueError):
                state = await self._app.job(job_id, tenant=storm.tenants[job_id]).cancel()
                storm.cancelled[job_id] = str(state)
