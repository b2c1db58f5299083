"""The doctor through a pooler, with a way past it and without; a worker's checks at its start; what a worker takes then."""

import asyncio
import json
from typing import Any

import pytest
from click.testing import CliRunner

from aioqueue import PoolSettings, TenantSettings
from aioqueue.cli.main import cli
from aioqueue.database import Database
from aioqueue.events import RisksFound, WorkerStarted
from tests.kit import MakeApp, Seen

pytestmark = pytest.mark.anyio


async def look(dsn: str, schema: str, listen_dsn: str | None) -> dict[str, Any]:
    arguments = ["--dsn", dsn, "--schema", schema, "doctor", "--json"]
    done = await asyncio.to_thread(CliRunner(env={"AIOQUEUE_LISTEN_DSN": listen_dsn}).invoke, cli, arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_a_pooler_is_found(pooled_dsn: str, worker_dsn: str, schema: str) -> None:
    found = await look(pooled_dsn, schema, None)
    assert [finding["code"] for finding in found["findings"]] == ["idle-in-transaction", "pooler"]
    assert "notify_seconds" not in found["facts"], "through it such a test would lie"
    past_it = await look(pooled_dsn, schema, worker_dsn)
    assert [finding["code"] for finding in past_it["findings"]] == ["idle-in-transaction"]
    assert past_it["facts"]["notify_seconds"] > 0


async def test_a_worker_makes_its_checks(make_pooled: MakeApp, seen: Seen) -> None:
    async with make_pooled(tenants=TenantSettings(strict_rls=True)).worker():
        assert seen.all(WorkerStarted)
    assert not seen.all(RisksFound)


@pytest.mark.parametrize(("past_it", "number"), [(False, 0), (True, 2)])
async def test_what_a_worker_takes_of_the_server(pooled_dsn: str, worker_dsn: str, past_it: bool, number: int) -> None:
    assert Database(worker_dsn, PoolSettings(size=5)).of_worker == 7
    database = Database(pooled_dsn, PoolSettings(size=5), listen_dsn=worker_dsn if past_it else None)
    await (await database.connect()).close()
    assert database.of_worker == number
