"""The worker processes of a storm: each behind a proxy of its own, started again when it dies, remembered with what befell it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .proxy import Proxy
from .storm_run import Storm
from .storm_tasks import BOMBED, DIARY, LEASE

ROOT = Path(__file__).parents[1]
GRACE = 20.0
STARVED = 0.15
"""Seconds of waiting for a processor, of each SAMPLE, that make a process starved: a lease of 2 s is not kept like that."""
SAMPLE = 0.5
LAST_STOP = GRACE + 30.0
"""Seconds in which a worker that was told to stop has ended."""


@dataclass
class Life:
    """One worker process, from its start to its end."""

    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    diary: Path
    started: float
    ended: float = float("inf")
    killed: bool = False
    stopped: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it was held still."""
    starved: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it waited for a processor for much of the time."""
    sampled: tuple[float, float] | None = None
    """A moment, and for how long its main thread had waited for a processor until then."""

    def sample(self) -> None:
        """Note whether it was starved since the last look; only Linux tells."""
        with contextlib.suppress(OSError, IndexError):
            waited = int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9
            now = time.monotonic()
            before, self.sampled = self.sampled, (now, waited)
            if before is not None and waited - before[1] > STARVED:
                self.starved.append((before[0], now))

    @property
    def ready(self) -> bool:
        """Whether it has said that it serves."""
        return " serves " in self.log.read_text(errors="replace")


@dataclass
class Slot:
    """A place for one worker process after the other."""

    number: int
    proxy: Proxy
    lives: list[Life] = field(default_factory=list)
    blackouts: list[tuple[float, float]] = field(default_factory=list)
    """From when to when its network swallowed everything."""

    @property
    def life(self) -> Life:
        return self.lives[-1]


class Fleet:
    """All worker processes."""

    def __init__(self, storm: Storm, slots: list[Slot]) -> None:
        self._storm = storm
        self.slots = slots
        self.stopping = False

    def name(self, slot: Slot) -> str:
        """application_name of its connections."""
        return f"storm-worker-{slot.number}"

    def lives(self) -> list[Life]:
        """Every process there was."""
        return [life for slot in self.slots for life in slot.lives]

    def start(self, slot: Slot) -> None:
        """Start a process in the slot."""
        storm = self._storm
        number = len(slot.lives)
        stem = storm.directory / f"worker-{slot.number}-{number}"
        log, diary = stem.with_suffix(".log"), stem.with_suffix(".diary")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_"))}
        environ |= {
            "AIOQUEUE_DSN": storm.server.tcp("worker", self.name(slot), slot.proxy.port),
            DIARY: str(diary),
            "PYTHONUNBUFFERED": "1",
        }
        command = [
            sys.executable,
            "-m",
            "aioqueue",
            "worker",
            "-A",
            "benchmarks.storm_tasks:app",
            "--grace",
            str(GRACE),
            "-q",
            "default,pooled",
        ]
        diary.touch()
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        slot.lives.append(Life(slot.number, process, log, diary, time.monotonic()))

    async def wait_ready(self) -> None:
        """Wait until every worker serves."""
        async with asyncio.timeout(LAST_STOP):
            while not all(slot.life.ready for slot in self.slots):  # noqa: ASYNC110 - other processes set no event of ours
                await asyncio.sleep(0.1)

    async def keep(self) -> None:
        """Start again what has died, until told to stop."""
        sampled = 0.0
        while not self.stopping:
            looks = time.monotonic() > sampled + SAMPLE
            sampled = time.monotonic() if looks else sampled
            for slot in self.slots:
                life = slot.life
                if looks:
                    life.sample()
                code = life.process.poll()
                if code is None:
                    continue
                life.ended = min(life.ended, time.monotonic())
                self._judge(slot, life, code)
                self.start(slot)
            await asyncio.sleep(0.02)

    def _judge(self, slot: Slot, life: Life, code: int) -> None:
        storm = self._storm
        if life.killed:
            return
        if code == BOMBED:
            storm.counts["workers ended by their job"] += 1
        elif code == 1 and not life.ready and self._trouble(slot, life):
            storm.counts["workers that could not start"] += 1
        else:
            storm.fault(f"a worker ended by itself with {code}: {life.log.name}")

    def _trouble(self, slot: Slot, life: Life) -> bool:
        times = [*self._storm.outages, *slot.blackouts]
        return self._storm.wants("terminate") or any(a < life.ended and b > life.started for a, b in times)

    async def stop(self) -> None:
        """SIGTERM all; each must end with 0 in time."""
        self.stopping = True
        for slot in self.slots:
            slot.life.process.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + LAST_STOP
        for slot in self.slots:
            process = slot.life.process
            while (code := process.poll()) is None and time.monotonic() < give_up:
                await asyncio.sleep(0.05)
                slot.life.sample()
            slot.life.ended = time.monotonic()
            if code is None:
                self._storm.fault(f"a worker had not ended {LAST_STOP:g} s after SIGTERM: {slot.life.log.name}")
            elif code:
                self._storm.fault(f"a worker ended with {code} after SIGTERM: {slot.life.log.name}")

    def find_losses(self) -> None:
        """A worker to which nothing was done keeps its lease."""
        for life in self.lives():
            lost = " lost its lease: " in life.log.read_text(errors="replace")
            cause = self.excuse(life, life.started, life.ended)
            self._storm.counts["worker processes that lost a lease"] += lost
            if lost and cause is None:
                self._storm.fault(f"a worker to which nothing was done lost its lease: {life.log.name}")

    def excuse(self, life: Life, since: float, until: float) -> str | None:
        """What can have cost this process its lease in that time; None: nothing that was done to it."""
        causes = {
            "stop": life.stopped,
            "blackhole": self.slots[life.slot].blackouts,
            "restart": self._storm.outages,
            "starved": life.starved,
        }
        for cause, times in causes.items():
            if any(a < until and b > since - 2 * LEASE for a, b in times):
                return cause
        return None


@contextlib.contextmanager
def fleet(storm: Storm, workers: int) -> Iterator[Fleet]:
    """A fleet, whose processes do not outlive the block."""
    with contextlib.ExitStack() as stack:
        made = Fleet(storm, [Slot(n, stack.enter_context(Proxy(storm.server.port))) for n in range(workers)])
        try:
            for slot in made.slots:
                made.start(slot)
            yield made
        finally:
            made.stopping = True
            for life in made.lives():
                if life.process.poll() is None:
                    life.process.kill()
                    life.process.wait(10)
