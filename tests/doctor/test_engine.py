"""The role of the engine of session=, where it is another than the worker's: the same faults are found for it, and no others."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker

from aioqueue import AioQueue, TenantSettings, migrate
from aioqueue.contrib.sqlalchemy import JobSession
from aioqueue.errors import UnsafeDatabase
from aioqueue.events import RisksFound
from aioqueue.session_factory import EngineSession
from tests.doctor.conftest import Examine, Execute, Start, codes
from tests.doctor.test_command import run
from tests.doctor.test_tenants import FAULTS
from tests.kit import Seen
from tests.postgres import Database
from tests.session_kit import DRIVERS, make_engine

pytestmark = pytest.mark.anyio
SELLER = EngineSession("seller", "")
TASKS = """
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from aioqueue import AioQueue
from aioqueue.contrib.sqlalchemy import JobSession

app = AioQueue({dsn!r}, schema={schema!r}, session=async_sessionmaker(create_async_engine({url!r})))

@app.task(name="work")
async def work(session: JobSession) -> None: ...
"""


@pytest.fixture
async def seller(shop: Execute, boss: Execute, database: Database, schema: str) -> AsyncIterator[str]:
    """The DSN of a role that may what a worker may, with the same rights to the shop's tables."""
    await boss("CREATE ROLE seller LOGIN")
    try:
        await migrate.grant(database.dsn("owner"), schema=schema, role="seller")
        await shop(
            "GRANT USAGE ON SCHEMA shop TO seller",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON shop.invoices, shop.orders, shop.colours, shop.totals TO seller",
        )
        yield database.dsn("worker").replace("aioqueue_worker", "seller")
    finally:
        await boss("DROP OWNED BY seller", "DROP ROLE seller")


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_its_role_is_found_as_one_of_the_workers_is(
    look: Examine, start: Start, boss: Execute, seller: str, fault: str
) -> None:
    code, commands, undo = FAULTS[fault]
    others = "aioqueue_worker" in " ".join(commands)
    try:
        await boss(*[command.replace("aioqueue_worker", "seller") for command in commands])
        assert set(codes(await start(engine=SELLER))) == {code}
        assert set(codes(await look("worker", engine=SELLER))) == {code}
        if others and code != "tenant-default":
            assert codes(await start()) == codes(await look("worker")) == [], "the worker's own role is not concerned"
    finally:
        await boss(*[command.replace("aioqueue_worker", "seller") for command in undo])


async def test_nothing_is_wrong(look: Examine, start: Start, seller: str) -> None:
    assert await start(engine=SELLER) == []
    assert codes(await look("worker", engine=SELLER)) == codes(await look("owner", engine=SELLER)) == []


async def test_where_transactions_take_on_a_role_its_own_does_not_count(start: Start, boss: Execute, seller: str) -> None:
    await boss("GRANT TRUNCATE ON shop.orders TO seller")
    assert codes(await start(engine=SELLER)) == ["truncate-granted"]
    assert codes(await start(engine=SELLER, taken="aioqueue_worker")) == []


async def test_a_tenant_that_comes_with_the_engine(start: Start, boss: Execute, seller: str) -> None:
    (finding,) = await start(engine=EngineSession("seller", "7"))
    assert (finding.code, "connect_args" in finding.fix) == ("tenant-default", True)
    await boss("ALTER ROLE seller SET app.tenant = '7'")
    (finding,) = await start(engine=EngineSession("seller", "7"))
    assert (finding.code, finding.fix) == ("tenant-default", "ALTER ROLE seller RESET app.tenant;")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_worker_warns_or_refuses_for_the_engine_of_a_task_that_takes_a_session(
    worker_dsn: str, schema: str, seen: Seen, boss: Execute, seller: str, driver: str
) -> None:
    engine = make_engine(seller, driver)

    def app(*, takes: bool = True, **settings: Any) -> AioQueue:
        made = AioQueue(worker_dsn, schema=schema, observers=[seen], session=async_sessionmaker(engine), **settings)

        async def work(session: JobSession) -> None: ...
        async def plain() -> None: ...

        made.task(name="work")(work if takes else plain)
        return made

    async with app(tenants=TenantSettings(strict_rls=True)).worker():
        assert not seen.all(RisksFound)
    await boss("ALTER ROLE seller BYPASSRLS")
    with pytest.raises(UnsafeDatabase, match="role seller has BYPASSRLS"):
        async with app(tenants=TenantSettings(strict_rls=True)).worker():
            pass
    async with app(takes=False).worker():
        assert not seen.all(RisksFound), "no job has a session of that engine"
    async with app().worker():
        (event,) = seen.all(RisksFound)
    assert [finding.code for finding in event.findings] == ["role-bypasses-rls"]
    await engine.dispose()


async def test_the_command_asks_the_apps_engine_whose_its_sessions_are(
    worker_dsn: str, client_dsn: str, schema: str, boss: Execute, seller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, dsn in (("engine_of_a_seller", seller), ("engine_of_a_client", client_dsn)):
        url = dsn.replace("postgresql://", "postgresql+psycopg://")
        (tmp_path / f"{name}.py").write_text(TASKS.format(dsn=worker_dsn, schema=schema, url=url))
    await boss("GRANT TRUNCATE ON shop.orders TO seller")
    said = await run(worker_dsn, schema, "-A", "engine_of_a_seller:app")
    assert (said.exit_code, "role seller may TRUNCATE table shop.orders" in said.stdout) == (3, True), said.output
    said = await run(worker_dsn, schema, "-A", "engine_of_a_client:app")
    assert said.exit_code == 0
    words = " ".join(said.stdout.split())
    assert "not seen: the role that jobs with a JobSession have: session: the engine's role aioqueue_client has no" in words
