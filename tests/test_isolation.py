"""The queue keeps tenants apart by itself: another tenant's job is as unknown as none, to handles, commands and every function.

Rights are in tests/sql/test_roles.py, what a job of a tenant sees in test_app.py, the policies of tables in tests/doctor/.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from click.testing import CliRunner

from aioqueue.cli.main import cli
from aioqueue.errors import JobNotFound
from aioqueue.job import Job, JobState, new_job_id
from aioqueue.rights import CLIENT_FUNCTIONS
from tests.kit import MakeApp
from tests.sql.conftest import boss, connect, guest, one
from tests.sql.engine import Session, entry, progress

__all__ = ["boss", "connect", "guest", "one"]
pytestmark = pytest.mark.anyio

SECRET = "nobody else's"
PAYLOAD = f'{{"note": "{SECRET}"}}'
SCHEMA = "trim(trailing '.' from 'aioqueue.')::regnamespace"


async def jobs_of(one: Session, tenant: str) -> dict[str, UUID]:
    """A tenant's jobs, one in each state, all with the same payload."""
    ids = await one.enqueue(4, tenant=tenant, payload=PAYLOAD, max_attempts=1)
    ids += await one.enqueue(1, tenant=tenant, payload=PAYLOAD, delay=3600)
    ids += await one.enqueue(1, tenant=tenant, payload=PAYLOAD)
    worker = await one.register()
    claimed = {job.job_id: job for job in await one.claim(worker, 100)}
    mine = [claimed[job_id] for job_id in ids[:4]]
    await one.record(worker, entry(mine[0], r=SECRET), entry(mine[1], "error", m=SECRET), entry(mine[2], "cancelled"))
    await one.store.report(one.conn, json.dumps([progress(mine[3], 0.5, m=SECRET)]))
    if ids[5] in claimed:
        await one.record(worker, entry(claimed[ids[5]], "interrupted", s=True, d=0))
    found = {str(state): job_id for job_id in ids if (state := await one.state(job_id))}
    assert len(found) == 6, found
    return found


async def everything(boss: Session) -> list[tuple[Any, ...]]:
    """All jobs with their states, and the requests to cancel."""
    return [
        *await boss.rows("SELECT id, state, attempt, spared, tenant, retry_of FROM aioqueue.jobs ORDER BY id"),
        *await boss.rows("SELECT job_id FROM aioqueue.cancel"),
    ]


async def refusal(ask: Awaitable[object], job_id: UUID) -> tuple[str, str, bool]:
    """How a question about a job is refused, without the id."""
    with pytest.raises(JobNotFound) as caught:
        await ask
    return type(caught.value).__name__, str(caught.value).replace(str(job_id), "ID"), caught.value.expired


@pytest.mark.parametrize("tenant", ["mine", "theirs "])
async def test_a_handle_finds_another_tenants_job_as_little_as_an_unknown_one(
    make_app: MakeApp, one: Session, boss: Session, tenant: str
) -> None:
    theirs = await jobs_of(one, "theirs")
    before = await everything(boss)
    questions: list[Callable[[Job[Any]], Awaitable[object]]] = [
        lambda job: job.status(), lambda job: job.cancel(), lambda job: job.result(), lambda job: job.result(timeout=5),
        lambda job: job.progress(), lambda job: anext(job.watch()),
    ]  # fmt: skip
    async with make_app() as app:
        for ask in questions:
            ids = [new_job_id(), *theirs.values()]
            said = await asyncio.gather(*(refusal(ask(app.job(job_id, tenant=tenant)), job_id) for job_id in ids))
            assert len(set(said)) == 1, said
        assert await everything(boss) == before
        for state, job_id in theirs.items():
            assert (await app.job(job_id, tenant="theirs").status()).state == state


Answer = Any


async def answer(session: Session, call: str, job_id: UUID) -> Answer:
    """What a function says about an id: its rows, or its error, without the id."""
    try:
        found: Answer = await session.rows(call, job_id)
    except psycopg.Error as error:
        found = (error.sqlstate, str(error))
    return str(found).replace(str(job_id), "ID")


ABOUT = {
    "job_status": "SELECT * FROM aioqueue.job_status(%s, 'mine')",
    "read_outcomes": "SELECT * FROM aioqueue.read_outcomes(ARRAY[%s::uuid], ARRAY['mine'])",
    "follow": "SELECT * FROM aioqueue.follow(ARRAY[%s::uuid], ARRAY['mine'])",
    "cancel_job": "SELECT aioqueue.cancel_job(%s, 'mine')",
    "retry_job": "SELECT aioqueue.retry_job(%s, 'mine')",
}
"""The functions of a client that are about a job by its id."""
WITHOUT_ONE = {"known_tasks", "notify"}
MAKING = {
    "enqueue": "SELECT aioqueue.enqueue('t', tenant => 'mine', id => %s)",
    "enqueue_many": "SELECT aioqueue.enqueue_many(jsonb_build_array("
    "jsonb_build_object('task', 't', 'tenant', 'mine', 'id', %s::uuid)))",
    "enqueue_alike": "SELECT aioqueue.enqueue_alike(ARRAY[%s::uuid], '{}', 't', 'mine')",
}


def test_every_function_of_a_client_is_tried() -> None:
    assert {*ABOUT, *WITHOUT_ONE, *MAKING} == set(CLIENT_FUNCTIONS)


async def test_no_function_of_a_client_tells_of_another_tenants_job(one: Session, guest: Session, boss: Session) -> None:
    theirs = await jobs_of(one, "theirs")
    before = await everything(boss)
    for call in ABOUT.values():
        said = {await answer(guest, call, job_id) for job_id in (new_job_id(), *theirs.values())}
        assert len(said) == 1, said
    assert await everything(boss) == before


async def test_an_id_that_is_taken_tells_nothing_but_that(one: Session, guest: Session, boss: Session) -> None:
    """Whatever the state of the other tenant's job, and that job stays as it is."""
    theirs = await jobs_of(one, "theirs")
    before = await everything(boss)
    for call in MAKING.values():
        said = {await answer(guest, call, job_id) for job_id in theirs.values()}
        assert len(said) == 1, said
        assert SECRET not in said.pop()
    assert await everything(boss) == before


async def test_a_client_may_call_nothing_else(guest: Session, boss: Session) -> None:
    """Every function of the schema, with NULL for each argument; and none of its tables."""
    functions = await boss.rows(
        "SELECT proname, ARRAY(SELECT format_type(t, NULL) FROM unnest(proargtypes) t) FROM pg_proc"
        f" WHERE pronamespace = {SCHEMA}"
    )
    assert len(functions) > len(CLIENT_FUNCTIONS) + 10
    for name, types in functions:
        if name not in CLIENT_FUNCTIONS:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await guest.rows(f"SELECT aioqueue.{name}({', '.join(f'NULL::{kind}' for kind in types)})")
    for (table,) in await boss.rows(
        f"SELECT quote_ident(relname) FROM pg_class WHERE relnamespace = {SCHEMA} AND relkind IN ('r', 'p', 'v')"
    ):
        if table != "schema_version":
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await guest.rows(f"SELECT FROM aioqueue.{table}")


async def test_a_client_reads_no_payload_not_even_its_own_tenants(one: Session, guest: Session) -> None:
    """What its jobs return, fail with and say on the way is for it to read, and is left out here."""
    own = await jobs_of(one, "mine")
    told = {
        "job_status": ("succeeded", "dead"),
        "read_outcomes": ("succeeded", "dead"),
        "follow": ("succeeded", "dead", "running"),
    }
    for state, job_id in own.items():
        for name, call in ABOUT.items():
            if state not in told.get(name, ()):
                assert SECRET not in await answer(guest, call, job_id), (state, name)
    for name in WITHOUT_ONE:
        assert SECRET not in str(await guest.rows(f"SELECT aioqueue.{name}()"))


@pytest.mark.parametrize("state", [None, *JobState])
async def test_listings_are_scoped_by_tenant_in_sql(one: Session, state: JobState | None) -> None:
    for tenant in ("theirs", "mine"):
        await jobs_of(one, tenant)
    page = await one.store.list_jobs(one.conn, state=state, tenant="mine", window=1000, limit=100)
    assert {job["tenant"] for job in page.jobs} == {"mine"}
    assert len(page.jobs) == (6 if state is None else 1)
    none = await one.store.list_jobs(one.conn, state=state, tenant="", window=1000, limit=100)
    assert none.jobs == []


async def test_the_commands_of_a_tenant(one: Session, boss: Session, worker_dsn: str, client_dsn: str, schema: str) -> None:
    theirs = await jobs_of(one, "theirs")
    before = await everything(boss)

    def run(dsn: str, command: str, job_id: UUID, tenant: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["--dsn", dsn, "--schema", schema, "job", command, "--tenant", tenant, str(job_id)])
        return done.exit_code, re.sub(str(job_id), "ID", done.output)

    for dsn in (worker_dsn, client_dsn):
        for command in ("show", "cancel", "retry"):
            ids = (new_job_id(), theirs["dead"], theirs["scheduled"])
            said = {await asyncio.to_thread(run, dsn, command, job_id, "mine") for job_id in ids}
            assert len(said) == 1, said
            assert said.pop()[0] == 1
    assert await everything(boss) == before
    assert (await asyncio.to_thread(run, client_dsn, "show", theirs["dead"], "theirs"))[0] == 0
    assert (await asyncio.to_thread(run, client_dsn, "retry", theirs["dead"], "theirs"))[0] == 0
