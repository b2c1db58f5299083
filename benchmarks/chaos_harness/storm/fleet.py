"""The processes of a storm: workers, each behind proxies of its own, and enqueuers; started again when they die, remembered."""

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

from benchmarks.proxy import Proxy

from . import clock, journal
from .model import Storm
from .tasks import BOMBED, DIARY, LEASE, PATCH

ROOT = Path(__file__).parents[3]
ENQUEUERS = 2
GRACE = 20.0
STARVED = 0.15
"""Seconds of waiting for a processor, of each SAMPLE, that make a process starved: a lease of 2 s is not kept like that."""
SAMPLE = 0.5
FIRST_START = 240.0
"""Seconds in which all processes have started, on whatever machine."""
LAST_STOP = GRACE + 40.0
"""Seconds in which a worker that was told to stop has ended."""
LAST_ANSWER = 30.0
"""Seconds after the last outcome in which an enqueuer that was told to stop has ended: its waiters have their answers."""


@dataclass(eq=False)
class Life:
    """One process, from its start to its end."""

    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    diary: Path
    """Of a worker; an enqueuer's journal."""
    clock: Path
    started: float
    ended: float = float("inf")
    killed: bool = False
    stopped: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it was held still."""
    starved: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it waited for a processor for much of the time."""
    sampled: tuple[float, float] | None = None
    """A moment, and for how long its main thread had waited for a processor until then."""
    served: bool = False

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
        if not self.served:
            self.served = " serves " in self.log.read_text(errors="replace") or " ready " in self.diary.read_text()
        return self.served


@dataclass
class Slot:
    """A place for one process after the other. An enqueuer has no proxies."""

    number: int
    proxies: list[Proxy]
    lives: list[Life] = field(default_factory=list)
    blackouts: list[tuple[float, float]] = field(default_factory=list)
    """From when to when its network swallowed everything."""
    clock: float = 0.0
    """What the clock of its processes gains, in seconds."""

    @property
    def life(self) -> Life:
        return self.lives[-1]


class Fleet:
    """All processes."""

    def __init__(self, storm: Storm, workers: list[Slot], enqueuers: list[Slot]) -> None:
        self._storm = storm
        self.workers = workers
        self.enqueuers = enqueuers
        self._all = [*workers, *enqueuers]
        self.stopping = False

    def lives(self) -> list[Life]:
        """Every worker process there was."""
        return [life for slot in self.workers for life in slot.lives]

    def every_life(self) -> list[Life]:
        """Every process there was."""
        return [life for slot in self._all for life in slot.lives]

    def start(self, slot: Slot) -> None:
        """Start a process in the slot."""
        storm = self._storm
        what = "worker" if slot.proxies else "enqueuer"
        stem = storm.directory / f"{what}-{slot.number}-{len(slot.lives)}"
        life_clock = stem.with_suffix(".clock")
        clock.shift(life_clock, slot.clock)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "AIOQUEUE_", "STORM_"))}
        environ |= {clock.VARIABLE: str(life_clock), "PYTHONUNBUFFERED": "1"}
        if slot.proxies:
            diary = stem.with_suffix(".diary")
            ports = [proxy.port for proxy in slot.proxies]
            environ |= {
                "AIOQUEUE_DSN": storm.servers.tcp("worker", f"storm-worker-{slot.number}", ports),
                DIARY: str(diary),
                PATCH: storm.patch,
            }
            options = ["-A", "benchmarks.chaos_harness.storm.tasks:app", "--grace", str(GRACE), "-q", "default,pooled"]
            command = [sys.executable, "-m", "aioqueue", "worker", *options]
        else:
            diary = stem.with_suffix(".journal")
            dsn = storm.servers.tcp("client", f"storm-enqueuer-{slot.number}")
            seed = f"{storm.seed} enqueuer {slot.number} {len(slot.lives)}"
            arguments = [str(diary), dsn, seed, str(storm.rate / ENQUEUERS), "cancels" if storm.wants("cancel") else "-"]
            command = [sys.executable, "-m", "benchmarks.chaos_harness.storm.enqueuer", *arguments]
        diary.touch()
        log = stem.with_suffix(".log")
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        slot.lives.append(Life(slot.number, process, log, diary, life_clock, time.monotonic()))

    async def wait_ready(self) -> None:
        """Wait until every worker serves, and the enqueuers that were started enqueue."""
        async with asyncio.timeout(FIRST_START):
            while not all(slot.life.ready for slot in self._all if slot.lives):  # noqa: ASYNC110 - no event of ours
                await asyncio.sleep(0.1)

    def start_enqueuers(self) -> None:
        """Let jobs come."""
        for slot in self.enqueuers:
            self.start(slot)

    async def keep(self) -> None:
        """Start again what has died, until told to stop; enqueuers until the storm is over."""
        sampled = 0.0
        while not self.stopping:
            looks = time.monotonic() > sampled + SAMPLE
            sampled = time.monotonic() if looks else sampled
            for slot in self._all:
                if not slot.lives or (not slot.proxies and self._storm.over.is_set()):
                    continue
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
        if code == BOMBED and slot.proxies:
            storm.counts["workers ended by their job"] += 1
        elif code == 1 and not life.ready and self._trouble(slot, life):
            storm.counts["processes that could not start"] += 1
        else:
            storm.fault(f"a process ended by itself with {code}: {life.log.name}")

    def _trouble(self, slot: Slot, life: Life) -> bool:
        times = [*self._storm.outages, *slot.blackouts]
        often = self._storm.wants("terminate") or self._storm.wants("commit")
        return often or any(a < life.ended and b > life.started for a, b in times)

    def tell_enqueuers(self) -> None:
        """SIGTERM the enqueuers."""
        for slot in self.enqueuers:
            if slot.life.process.poll() is None:
                slot.life.process.send_signal(signal.SIGTERM)

    async def wait_enqueuers(self) -> None:
        """Wait until they have ended, each with 0 once its waiters have their answers, and read their journals."""
        give_up = time.monotonic() + LAST_ANSWER
        for slot in self.enqueuers:
            while slot.life.process.poll() is None and time.monotonic() < give_up:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
            code = slot.life.process.poll()
            if not slot.life.killed and (code is None or (code and slot.life.ready)):
                self._storm.fault(f"an enqueuer ended with {code} after SIGTERM: {slot.life.log.name}")
            for life in slot.lives:
                journal.read(self._storm, life.diary)

    async def stop(self) -> None:
        """SIGTERM all workers; each must end with 0 in time."""
        self.stopping = True
        for slot in self.workers:
            slot.life.process.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + LAST_STOP
        for slot in self.workers:
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
        """What can have cost this process its lease in that time; None: nothing that was done to it. A clock is no excuse."""
        causes = {
            "stop": life.stopped,
            "starved": [*life.starved, *self._storm.slow],
            "blackhole": self.workers[life.slot].blackouts,
            "outage": self._storm.outages,
        }
        for cause, times in causes.items():
            if any(a < until and b > since - 2 * LEASE for a, b in times):
                return cause
        return None


@contextlib.contextmanager
def fleet(storm: Storm, workers: int) -> Iterator[Fleet]:
    """A fleet, whose processes do not outlive the block."""
    with contextlib.ExitStack() as stack:
        slots = []
        for number in range(workers):
            # Half of them look for the primary in the other order.
            ports = storm.servers.ports[:: 1 if number % 2 else -1]
            slots.append(Slot(number, [stack.enter_context(Proxy(port)) for port in ports]))
        made = Fleet(storm, slots, [Slot(number, []) for number in range(ENQUEUERS)])
        try:
            for slot in made.workers:
                made.start(slot)
            yield made
        finally:
            made.stopping = True
            for life in made.every_life():
                if life.process.poll() is None:
                    life.process.kill()
                    life.process.wait(10)
