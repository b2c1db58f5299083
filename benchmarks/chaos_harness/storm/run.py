"""One storm from its servers' start to the books: who acts, who watches, in which order it ends, what is printed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from pathlib import Path

import psycopg

from benchmarks.chaos_harness.sabotage import Sabotage, install

from . import audit, diary
from .audit import Auditor, wait_ended, wait_settled
from .faults import Faults
from .fleet import Fleet, fleet
from .model import Storm
from .servers import prepare, storm_servers


def run(
    directory: Path,
    *,
    seconds: float,
    seed: int,
    kinds: frozenset[str],
    workers: int = 4,
    rate: float = 60.0,
    interval: float = 1.8,
    sabotage: Sabotage | None = None,
) -> Storm:
    """One storm on servers of its own; its faults are empty when every check held."""
    with storm_servers() as servers:
        storm = Storm(servers, directory, seconds, seed, kinds, interval, rate)
        if sabotage is not None:
            storm.sabotaged, storm.patch, storm.bound = True, sabotage.patch, 60.0
        asyncio.run(_run(storm, workers, sabotage))
    return storm


async def _run(storm: Storm, workers: int, sabotage: Sabotage | None) -> None:
    await prepare(storm.servers)
    if sabotage is not None:
        async with await psycopg.AsyncConnection.connect(storm.servers.owner, autocommit=True) as conn:
            await install(conn, "aioqueue", sabotage)
    if storm.wants("failover"):
        await asyncio.to_thread(storm.servers.replicate)
    with fleet(storm, workers) as ships:
        auditor = Auditor(storm, ships)
        beside = [asyncio.create_task(work) for work in (ships.keep(), auditor.run(), auditor.probe())]
        try:
            await ships.wait_ready()
            ships.start_enqueuers()
            await ships.wait_ready()
            storm.began = time.monotonic()
            await Faults(storm, ships).run()
            await wait_ended(storm)
            if storm.caught:
                return
            await ships.wait_enqueuers()
            # A transaction that committed late may have brought more.
            await wait_ended(storm)
            await ships.wait_ready()
            await wait_settled(storm, ships)
            ships.stopping = True
            await beside[0]
            await ships.stop()
        finally:
            for task in beside:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*beside)
        await auditor.look()
        await _judge(storm, ships)


async def _judge(storm: Storm, ships: Fleet) -> None:
    ships.find_losses()
    executions = diary.read(storm, ships)
    storm.counts["executions"] = len(executions)
    storm.counts["worker processes"] = len(ships.lives())
    overlaps = diary.judge(storm, ships, executions)
    storm.counts.update({f"two runs at once: {what}": number for what, number in overlaps.items()})
    storm.counts["connections cut at COMMIT"] += sum(proxy.commits_cut for slot in ships.workers for proxy in slot.proxies)
    await audit.judge(storm, executions)
    report(storm, executions)


def report(storm: Storm, executions: list[diary.Execution]) -> None:
    """Print what happened."""
    first: dict[object, float] = {}
    for execution in executions:
        first[execution.job] = min(execution.start, first.get(execution.job, execution.start))
    delays = sorted(max(0.0, first[job] - at) for job, at in storm.committed.items() if job in first)
    committed = len(storm.committed) + len(storm.pooled)
    faults = sum(number for name, number in storm.counts.items() if name.startswith("fault: ") and name != "fault: cancel")
    print(f"  jobs {committed} committed, {len(storm.rolled_back)} rolled back, {len(storm.unknown)} cut off at COMMIT")
    print(f"  {faults} faults and {storm.counts['fault: cancel']} cancels")
    if delays:
        places = (delays[len(delays) // 2], delays[len(delays) * 99 // 100], delays[-1])
        print("  commit to first start, delayed jobs too: p50 {:.3f} s, p99 {:.3f} s, longest {:.3f} s".format(*places))
    print(f"  all had ended {storm.drained:.1f} s after the storm")
    groups: dict[str, Counter[str]] = {}
    for name, number in sorted(storm.counts.items()):
        head, colon, rest = name.partition(": ")
        groups.setdefault(head if colon else "", Counter())[rest if colon else head] += number
    for head, counts in groups.items():
        print(f"  {head}{': ' if head else ''}" + ", ".join(f"{name} {number}" for name, number in counts.items()))
    sys.stdout.flush()
