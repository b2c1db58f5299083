"""Random handlers that misbehave, over many tenants on one small pool: does any statement run under a foreign or missing tenant?

    python benchmarks/misbehaviours.py [--handlers 10000] [--tenants 50] [--seed N]

Each handler does a few random acts (misbehaviour_acts.py) among its statements, ends in one of several ways, and perhaps lives
on. The worker's role is an ordinary one under FORCE row security. The database compares, in a trigger and a function, for whom
a statement was issued with the tenant in force, and counts in sequences, which no rollback takes back. Handlers depend on seed
and number only; in which order they meet does not.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from aioqueue import AioQueue, JobContext, JobTransaction, LimitSettings, PoolSettings, Retry, Snooze, WorkerSettings, migrate
from aioqueue.events import Event, JobRecorded
from benchmarks import kit
from benchmarks.misbehaviour_acts import ALONE, BREAKS, LAST, LEAVES, Handler

SETUP = """
CREATE SCHEMA audit; CREATE SCHEMA shop;
CREATE SEQUENCE audit.statements; CREATE SEQUENCE audit.wrong; CREATE SEQUENCE audit.deeds;
CREATE TABLE shop.note (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job integer, issuer text, deed boolean NOT NULL,
    tenant text NOT NULL DEFAULT current_setting('app.tenant', true), body text);
CREATE INDEX ON shop.note (tenant);
INSERT INTO shop.note (issuer, deed, tenant) SELECT 't' || n, false, 't' || n FROM generate_series(0, 49) n;
INSERT INTO shop.note (issuer, deed, tenant) VALUES ('victim', false, 'victim');
ALTER TABLE shop.note ENABLE ROW LEVEL SECURITY; ALTER TABLE shop.note FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON shop.note USING (tenant = nullif(current_setting('app.tenant', true), ''))
    WITH CHECK (tenant = nullif(current_setting('app.tenant', true), ''));
CREATE FUNCTION audit.saw(issuer text, deed boolean) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM nextval('audit.statements');
    IF deed THEN
        PERFORM nextval('audit.deeds');
    ELSIF current_setting('app.tenant', true) IS DISTINCT FROM issuer THEN
        PERFORM nextval('audit.wrong');
        RAISE WARNING 'issued for %, ran under %', issuer, current_setting('app.tenant', true);
    END IF;
    RETURN true;
END $$;
CREATE FUNCTION audit.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS
    $$ BEGIN PERFORM audit.saw(NEW.issuer, NEW.deed); RETURN NEW; END $$;
CREATE TRIGGER audit BEFORE INSERT ON shop.note FOR EACH ROW EXECUTE FUNCTION audit.note();
GRANT USAGE ON SCHEMA shop, audit TO aioqueue_worker;
GRANT SELECT, INSERT ON shop.note TO aioqueue_worker;
"""
COUNTS = "SELECT " + ", ".join(
    f"(SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM audit.{name})" for name in ("statements", "wrong", "deeds")
)


@dataclass
class Report:
    """What came of a run; `wrongs` is empty in a good one."""

    handlers: int
    seed: int
    statements: int = 0
    deeds: int = 0
    """Statements that a handler issued after it had itself broken its transaction."""
    states: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        states = ", ".join(f"{number} {state}" for state, number in sorted(self.states.items()))
        lines = [
            f"seed {self.seed}: {self.handlers} handlers in {self.seconds:.0f} s: {states}",
            f"{self.statements} statements compared; {self.deeds} of them by handlers that had broken their transaction",
            f"statements under a foreign or missing tenant, and whatever else was found: {len(self.wrongs)}",
        ]
        lines += [f"- {wrong}" for wrong in self.wrongs[:20]]
        lines += ["why handlers failed:", *(f"{number:7} {error}" for error, number in self.errors.most_common(40))]
        return "\n".join(lines)


class Run:
    """One run on one migrated database."""

    def __init__(self, dsn: str, schema: str, report: Report, *, tenants: int) -> None:
        self.report = report
        self._tenants = tenants
        self._kept: list[asyncio.Task[None]] = []
        self._held: list[object] = []
        self.app = AioQueue(
            dsn,
            schema=schema,
            pool=PoolSettings(size=4),
            limits=LimitSettings(transaction_wait=30, rollback=1),
            worker=WorkerSettings(concurrency=8),
            observers=[self._observe],
        )

        async def own(tx: JobTransaction, number: int) -> None:
            await self._misbehave(tx, number)

        async def short(ctx: JobContext, number: int) -> None:
            async with ctx.transaction() as tx:
                await self._misbehave(tx, number)

        once = Retry(max_attempts=1)
        self.app.task(name="own", retry=once)(own)
        self.app.task(name="short", retry=once)(short)
        self.app.task(name="hangs", retry=once, timeout=0.3)(own)

    def _observe(self, event: Event) -> None:
        if isinstance(event, JobRecorded):
            self.report.states[event.reason or event.state] += 1
            if event.reason and event.error:
                self.report.errors[event.error.partition("\n")[0][:120]] += 1

    def dice(self, number: int) -> random.Random:
        """The dice of a handler; its tenant and its task are thrown first."""
        return random.Random(f"{self.report.seed} {number}")

    def plan(self, number: int) -> tuple[str, str, random.Random]:
        """Return the tenant and the task of a handler, and its dice."""
        dice = self.dice(number)
        tenant = f"t{dice.randrange(self._tenants)}"
        return tenant, dice.choices(("own", "short", "hangs"), (60, 39, 1))[0], dice

    async def _misbehave(self, tx: JobTransaction, number: int) -> None:
        tenant, task, dice = self.plan(number)
        handler = Handler(tx, number, tenant, dice, self.report.wrongs, self._kept, self._held)
        await handler.inspect()
        await handler.write()
        acts = dice.sample(sorted(LEAVES), dice.randrange(4))
        if "kept" in acts:
            acts = [name for name in acts if name not in ALONE]
        for name in acts:
            await LEAVES[name](handler)
            await handler.read()
        if "kept" not in acts and dice.random() < 0.5:
            handler.broke = True
            name = dice.choice(sorted(BREAKS))
            await BREAKS[name](handler)
            if name != LAST and dice.random() < 0.5:
                await handler.write()
                await handler.read()
        if task == "hangs":
            await asyncio.Event().wait()
        match dice.randrange(6):
            case 0:
                raise ValueError("no")
            case 1:
                raise Snooze(86_400)

    async def go(self) -> None:
        """Enqueue all handlers and let a worker run them."""
        async with self.app:
            for first in range(0, self.report.handlers, 500):
                for number in range(first, min(first + 500, self.report.handlers)):
                    tenant, task, _ = self.plan(number)
                    await self.app.get(task).options(tenant=tenant).enqueue(number=number)
            async with self.app.worker(drain=True, grace=60) as worker:
                await worker.wait()
            await asyncio.gather(*self._kept)


async def run(worker_dsn: str, superuser_dsn: str, schema: str, *, handlers: int, seed: int, tenants: int = 50) -> Report:
    """Run that many handlers on a migrated database; whatever was not as it should be stands in the report."""
    report = Report(handlers, seed)
    async with await psycopg.AsyncConnection.connect(superuser_dsn, autocommit=True) as boss:
        await boss.execute("SET ROLE aioqueue_owner")
        await boss.execute(SETUP)
        await boss.execute("RESET ROLE")
        began = time.monotonic()
        await Run(worker_dsn, schema, report, tenants=tenants).go()
        report.seconds = time.monotonic() - began
        row = await (await boss.execute(sql.SQL(COUNTS))).fetchone()
        assert row is not None
        report.statements, wrong, report.deeds = row
        if wrong:
            report.wrongs.append(f"{wrong} statements ran under another tenant than the one that they were issued for")
        checks: dict[str, LiteralString] = {
            "rows of one tenant were written for another": "issuer <> tenant",
            "rows were kept that a handler wrote after it had broken its transaction": "deed",
        }
        for what, condition in checks.items():
            found = await (
                await boss.execute(sql.SQL("SELECT count(*) FROM shop.note WHERE {}").format(sql.SQL(condition)))
            ).fetchone()
            if found and found[0]:
                report.wrongs.append(f"{found[0]} {what}")
        ended = await (
            await boss.execute(
                sql.SQL(
                    "SELECT count(*), count(*) FILTER (WHERE state IN ('ready', 'running') OR state IS NULL) FROM {}.jobs"
                ).format(sql.Identifier(schema))
            )
        ).fetchone()
        if ended != (handlers, 0):
            report.wrongs.append(f"(jobs, of them not ended) is {ended}")
    return report


async def _main(arguments: argparse.Namespace) -> int:
    with kit.server(arguments) as server:
        superuser = server.database()
        report = await _run_on(superuser, arguments)
    print(report)
    return 1 if report.wrongs else 0


async def _run_on(superuser: str, arguments: argparse.Namespace) -> Report:
    dsns = {role: make_conninfo(superuser, user=f"aioqueue_{role}") for role in ("owner", "worker")}
    async with await psycopg.AsyncConnection.connect(superuser, autocommit=True) as boss:
        name = sql.Identifier(boss.info.dbname)
        await boss.execute(sql.SQL("ALTER DATABASE {} OWNER TO aioqueue_owner").format(name))
    await migrate.migrate(dsns["owner"])
    await migrate.grant(dsns["owner"], role="aioqueue_worker", kind="worker")
    return await run(
        dsns["worker"], superuser, "aioqueue", handlers=arguments.handlers, seed=arguments.seed, tenants=arguments.tenants
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handlers", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, default=50, help="at most 50")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # of blocks that are left open
    parser.add_argument("--dsn", help="a server to use instead of a temporary one, as its superuser")
    raise SystemExit(asyncio.run(_main(parser.parse_args())))
