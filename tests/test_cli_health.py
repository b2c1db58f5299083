"""`health`: exit 0 while a worker can do its work, 3 with the reasons otherwise."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from aioqueue.cli.main import cli
from aioqueue.store import Store

pytestmark = pytest.mark.anyio


def health(dsn: str, schema: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--dsn", dsn, "--schema", schema, "health", *arguments])


async def register(store: Store, conn: psycopg.AsyncConnection[Any], worker: int, problems: Sequence[str] = ()) -> None:
    await store.register_worker(
        conn, worker=worker, host="h", pid=1, version="0", queues=["default"], concurrency=1, lease=60, tasks=[]
    )
    assert await store.beat(conn, worker=worker, lease=60, running=0, problems=problems)


@pytest.fixture
def store(schema: str) -> Store:
    return Store(schema)


def run(dsn: str, schema: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    result = health(dsn, schema, "--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


async def test_no_worker_at_all_is_unhealthy(worker_dsn: str, schema: str) -> None:
    code, found = await asyncio.to_thread(run, worker_dsn, schema)
    assert (code, found["healthy"]) == (3, False)
    assert "no worker runs" in found["problems"][0]


async def test_one_good_worker_is_enough_but_each_answers_for_itself(
    worker_dsn: str, schema: str, worker_conn: Any, store: Store
) -> None:
    await register(store, worker_conn, 1)
    await register(store, worker_conn, 2, ["the listener is not connected"])
    assert await asyncio.to_thread(run, worker_dsn, schema) == (0, {"healthy": True, "problems": []})
    assert (await asyncio.to_thread(run, worker_dsn, schema, "--worker", "1"))[0] == 0
    code, found = await asyncio.to_thread(run, worker_dsn, schema, "--worker", "2")
    assert (code, found["problems"]) == (3, ["worker 2: the listener is not connected"])
    code, found = await asyncio.to_thread(run, worker_dsn, schema, "--worker", "3")
    assert code == 3
    assert "there is none of that identity" in found["problems"][0]


async def test_a_worker_whose_lease_has_ended_is_unhealthy(
    worker_dsn: str, schema: str, worker_conn: Any, owner: Any, store: Store
) -> None:
    await register(store, worker_conn, 1)
    await owner.execute(sql.SQL("UPDATE {}.worker SET lease_until = '2020-01-01Z'").format(sql.Identifier(schema)))
    code, found = await asyncio.to_thread(run, worker_dsn, schema)
    assert code == 3
    assert "worker 1: it is dead" in found["problems"][0]
