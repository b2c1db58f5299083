"""What the write-ups left unmeasured: a host that vanishes, thirty workers behind PgBouncer, a tenant with very many jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import AsyncConnection

from aioqueue import AioQueue, JobTransaction, PoolSettings, WorkerSettings
from aioqueue.job import lane, new_job_id
from aioqueue.store import LOWEST_ID, LaneScan, Store
from benchmarks.mixed_jobs import NewJob, enqueue_many
from benchmarks.pgbouncer import PROGRAM, pgbouncer

from .processes import Processes, processes
from .stage import Place, Stage, Verdict, until, value

TITLE = "a host that vanishes; 30 workers behind PgBouncer; fairness"
PUBLISHED = "host gone, defaults: row lock held > 150 s (2 h by arithmetic); with these connection settings about 11 s"
BRIDGE = "10.231.77.1"
INSIDE = "10.231.77.2"
WORKERS = 30
SERVER_CONNECTIONS = 20


async def run(stage: Stage) -> Verdict:
    """Run the row."""
    verdict = Verdict()
    parts = [await _host_gone(stage, verdict), await _pooler(stage, verdict), await _fair(stage, verdict)]
    verdict.ours = "; ".join(part for part in parts if part)
    return verdict


# -- a host that vanishes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _host() -> Iterator[tuple[str, str]]:
    """A network of its own with a cable to the server: (its name, the cable's end here). OSError where that is not allowed."""
    name, cable = f"aqp{os.getpid()}", f"aqp{os.getpid()}"[:12]

    def ip(*arguments: str, inside: bool = False) -> None:
        prefix = ["ip", "netns", "exec", name] if inside else []
        done = subprocess.run([*prefix, "ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())

    ip("netns", "add", name)
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", "aqpeer", "netns", name)
        ip("addr", "add", f"{BRIDGE}/30", "dev", cable)
        ip("link", "set", cable, "up")
        ip("addr", "add", f"{INSIDE}/30", "dev", "aqpeer", inside=True)
        ip("link", "set", "aqpeer", "up", inside=True)
        yield name, cable
    finally:
        subprocess.run(["ip", "link", "del", cable], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


async def _host_gone(stage: Stage, verdict: Verdict) -> str:
    if shutil.which("ip") is None or os.geteuid() != 0:
        verdict.waiting = "host gone: needs root and the command ip, for a network of its own"
        return ""
    naive, ours = await stage.place(), await stage.place()
    limit = float(stage.size(30, 160))
    try:
        with _host() as (name, cable), processes() as started:
            before = ("ip", "netns", "exec", name)
            await _row(naive)
            await _locked(
                naive, started.start(naive.tcp("worker", host=BRIDGE), "benchmarks.published.naive", "locks", before=before)
            )
            await _start_ours(ours, started, before)
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)  # noqa: ASYNC221 - a moment
            held = await asyncio.gather(_until_free(naive, limit), _until_free(ours, limit))
    except OSError as error:
        verdict.waiting = f"host gone: no network of its own here ({error})"
        return ""
    spelled = [f"{seconds:.1f} s" if seconds < limit else f"more than {limit:g} s" for seconds in held]
    verdict.naive = f"host gone, defaults: row lock held {spelled[0]}"
    verdict.published(held[0] >= limit, f"the lock of a vanished host is held: {spelled[0]}")
    verdict.promise(held[1] < 25, f"a vanished host's locks go within 25 s: {spelled[1]}")
    return f"host gone: row lock held {spelled[1]}"


async def _start_ours(place: Place, started: Processes, before: tuple[str, ...]) -> None:
    async with AioQueue(place.dsn("client")) as client, place.connection() as boss:
        process = started.worker(place.tcp("worker", host=BRIDGE), lease=30.0, before=before)
        await until(lambda: value(boss, "SELECT EXISTS (SELECT FROM aioqueue.worker)"))
        await _row(place)
        await client.enqueue_by_name("locks")
        await _locked(place, process)


async def _row(place: Place) -> None:
    async with place.connection() as boss:
        await boss.execute("INSERT INTO naive.job DEFAULT VALUES")


async def _locked(place: Place, _process: object) -> None:
    """Wait until the row of naive.job is locked by the other host."""
    async with place.connection() as boss:

        async def locked() -> bool:
            return not await _free(boss)

        assert await until(locked), "the other host has locked its row"


async def _free(boss: AsyncConnection[Any]) -> bool:
    try:
        await boss.execute("SELECT FROM naive.job FOR UPDATE NOWAIT")
    except psycopg.errors.LockNotAvailable:
        return False
    return True


async def _until_free(place: Place, limit: float) -> float:
    began = time.monotonic()
    async with place.connection() as boss:
        await until(lambda: _free(boss), seconds=limit, pause=0.2)
    return time.monotonic() - began


# -- thirty workers behind PgBouncer ---------------------------------------------------------------------------------------


async def _pooler(stage: Stage, verdict: Verdict) -> str:
    if PROGRAM is None:
        verdict.waiting = "PgBouncer: apt-get install pgbouncer"
        return ""
    place = await stage.place()
    jobs = stage.size(600, 6000)
    with pgbouncer(place.dsn("worker"), default_pool_size=SERVER_CONNECTIONS, server_round_robin=1) as pooler:
        settings: dict[str, Any] = {"pool": PoolSettings(size=3), "worker": WorkerSettings(poll=0.2, concurrency=4)}
        apps = [AioQueue(pooler.dsn(place.dsn("worker")), **settings) for _ in range(WORKERS)]
        wrong: list[str] = []

        async def effect(tx: JobTransaction) -> None:
            seen = await tx.fetch_value("SELECT current_setting('app.tenant')")
            if seen != tx.tenant:
                wrong.append(f"{seen} instead of {tx.tenant}")
            await tx.execute("INSERT INTO naive.effect (job, worker) VALUES (%s, %s)", [str(tx.job_id), seen])

        tasks = [app.task(name="effect")(effect) for app in apps]
        async with contextlib.AsyncExitStack() as stack, place.connection() as boss:
            for app in apps:
                await stack.enter_async_context(app)
                await stack.enter_async_context(app.worker())
            for tenant in range(10):
                await tasks[0].options(tenant=str(tenant)).enqueue_many([{}] * (jobs // 10))
            most = 0
            done = "SELECT count(*) FROM aioqueue.outcome WHERE state = 'succeeded'"
            sessions = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker' AND datname = current_database()"

            async def ended() -> bool:
                nonlocal most
                most = max(most, await value(boss, sessions))
                return bool(await value(boss, done) == jobs)

            finished = await until(ended, seconds=300, pause=0.1)
            rows = await value(boss, "SELECT count(DISTINCT job) FROM naive.effect")
            twice = await value(boss, "SELECT count(*) FROM naive.effect") - rows
    verdict.promise(finished and (rows, twice) == (jobs, 0), f"PgBouncer: each of {jobs} jobs once: {rows} done, {twice} twice")
    verdict.promise(not wrong, f"PgBouncer: a tenant's own: {wrong[:3]}")
    verdict.promise(most <= SERVER_CONNECTIONS, f"PgBouncer: {most} connections of the server")
    return f"{WORKERS} workers behind PgBouncer: {jobs:,} jobs of 10 tenants each once, on {most} connections of the server"


# -- a tenant with very many jobs ------------------------------------------------------------------------------------------


async def _fair(stage: Stage, verdict: Verdict) -> str:
    """Positions at which small tenants' jobs are claimed, when they come after the big one's."""
    place = await stage.place()
    big, small = stage.size(10_000, 100_000), stage.size(300, 1000)
    store, one = Store("aioqueue"), lane("default", 0)

    def job(tenant: str) -> NewJob:
        return NewJob(id=new_job_id(), task="none", payload="{}", queue="default", priority=0, tenant=tenant, max_attempts=1)

    async with place.connection("worker") as conn:
        await conn.execute("SET synchronous_commit = off")
        await store.register_worker(
            conn, worker=1, host="published", pid=1, version="1", queues=["default"], concurrency=1, lease=3600.0, tasks=[]
        )
        for first in range(0, big, 5000):
            await enqueue_many(store, conn, [job("big") for _ in range(min(5000, big - first))])
        await enqueue_many(store, conn, [job(f"small {n}") for n in range(small) for _ in range(3)])
        order: list[str] = []
        while len(order) < 4 * small:
            found = (await store.claim(conn, worker=1, lanes=[LaneScan(one, (0, LOWEST_ID), 100)], limit=100)).jobs
            # A claim's rows come in any order; the jobs are in that of their positions.
            order += [claimed.tenant or "" for claimed in sorted(found, key=lambda claimed: (claimed.vt, claimed.job_id))]
    places: dict[str, list[int]] = {}
    for position, tenant in enumerate(order, 1):
        places.setdefault(tenant, []).append(position)
    worst = [max(places.get(f"small {n}", [0, 0, 0])[k] for n in range(small)) for k in range(3)]
    complete = all(len(places.get(f"small {n}", ())) == 3 for n in range(small))
    rounds = order[: 3 * (small + 1)]
    share = 100 * rounds.count("big") / len(rounds)
    verdict.promise(complete, "every small tenant's three jobs are among the first")
    bound = [(k + 1) * (small + 1) for k in range(3)]
    verdict.promise(all(a <= b for a, b in zip(worst, bound, strict=True)), f"positions {worst}, at most {bound}")
    verdict.naive += f"{'; ' if verdict.naive else ''}first in, first out: the first small tenant's job at position {big + 1:,}"
    return (
        f"{big:,} jobs of one tenant before {small:,} with 3: worst position of a first, second, third job {worst}, "
        f"the big one's share until then {share:.1f} %"
    )
