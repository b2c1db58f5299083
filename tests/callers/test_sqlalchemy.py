"""SQLAlchemy's sessions beyond what all libraries share: scoped ones, failed flushes, mapper events, the event after a commit."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy
from psycopg import AsyncConnection
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, scoped_session, sessionmaker

from aioqueue import AioQueue, TransactionAborted, WorkerSettings, wakeup
from aioqueue.events import ListenerConnected
from tests.callers.conftest import Open
from tests.callers.drivers import SESSIONS, AlchemyConnection, Driver
from tests.kit import MakeApp, Seen
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

Shop = AsyncConnection[Any]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    __table_args__ = {"schema": "shop"}  # noqa: RUF012 - SQLAlchemy's own form
    n: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(params=["asyncpg", "psycopg"])
async def engine(request: pytest.FixtureRequest, client_dsn: str) -> AsyncIterator[AsyncEngine]:
    made = create_async_engine(sqlalchemy.make_url(client_dsn).set(drivername=f"postgresql+{request.param}"))
    yield made
    await made.dispose()


@pytest.fixture
def sessions(engine: AsyncEngine) -> async_sessionmaker[AsyncSession]:
    return async_sessionmaker(engine)


async def jobs(boss: Session) -> int:
    return int(await boss.value("SELECT count(*) FROM aioqueue.job"))


async def test_what_the_session_has_not_flushed_is_committed_with_the_job(
    app: AioQueue, sessions: async_sessionmaker[AsyncSession], shop: Shop, boss: Session
) -> None:
    async with sessions.begin() as session:
        session.add(Order(n=1))
        job = await app.get("add").options(on=session).enqueue(1)
        assert await jobs(boss) == 0
    assert await boss.rows("SELECT n FROM shop.orders") == [(1,)]
    assert (await job.status()).state == "ready"


async def test_a_flush_that_fails_takes_the_job_with_it(
    app: AioQueue, sessions: async_sessionmaker[AsyncSession], shop: Shop, boss: Session
) -> None:
    async with sessions() as session:
        await app.get("add").options(on=session).enqueue(1)
        session.add(Order(n=1))
        await session.flush()
        session.expunge_all()
        session.add(Order(n=1))
        with pytest.raises(IntegrityError):
            await session.flush()
        # The session says so itself, before the server is asked.
        with pytest.raises(TransactionAborted):
            await app.get("add").options(on=session).enqueue(1)
        await session.rollback()
        await app.get("add").options(on=session).enqueue(2)
        await session.commit()
    assert await boss.rows("SELECT payload ->> 'a' FROM aioqueue.job") == [("2",)]
    assert await boss.rows("SELECT n FROM shop.orders") == []


async def test_scoped_sessions_are_those_of_the_scope(app: AioQueue, engine: AsyncEngine, client_dsn: str, boss: Session) -> None:
    awaited = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    await app.get("add").options(on=awaited).enqueue(1)
    await awaited.commit()
    await awaited.remove()
    blocking = sqlalchemy.create_engine(sqlalchemy.make_url(client_dsn).set(drivername="postgresql+psycopg"))
    scoped = scoped_session(sessionmaker(blocking))
    app.get("add").options(on=scoped).enqueue_sync(2)
    assert await jobs(boss) == 1
    scoped.commit()
    scoped.remove()
    blocking.dispose()
    assert await jobs(boss) == 2


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
async def test_a_mapper_event_below_an_awaited_session_enqueues_with_its_connection(
    app: AioQueue, sessions: async_sessionmaker[AsyncSession], shop: Shop, boss: Session, commits: bool
) -> None:
    def after_insert(_mapper: object, connection: sqlalchemy.Connection, order: Order) -> None:
        app.get("add").options(on=connection).enqueue_sync(order.n)

    event.listen(Order, "after_insert", after_insert)
    try:
        async with sessions() as session:
            session.add(Order(n=1))
            await (session.commit() if commits else session.rollback())
    finally:
        event.remove(Order, "after_insert", after_insert)
    assert await jobs(boss) == int(commits)


async def test_a_session_in_a_transaction_of_its_connection_s_ends_with_that(
    app: AioQueue, engine: AsyncEngine, boss: Session
) -> None:
    async with engine.connect() as conn:
        outer = await conn.begin()
        async with AsyncSession(conn, join_transaction_mode="create_savepoint") as session:
            await app.get("add").options(on=session).enqueue(1)
            await session.commit()
        assert await jobs(boss) == 0
        await outer.rollback()
    assert await jobs(boss) == 0


@pytest.mark.parametrize("kind", SESSIONS, ids=lambda kind: kind.__name__)
async def test_the_session_says_that_it_has_committed(
    make_app: MakeApp, open_driver: Open, kind: type[Driver], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection may be another's before anybody looks at it."""
    monkeypatch.setattr(wakeup, "LOOK", 3600)
    monkeypatch.setattr(wakeup, "ASK", 3600)
    app = make_app(worker=WorkerSettings(poll=3600))
    async with app, app.worker(), open_driver(kind) as driver:
        await seen.wait(ListenerConnected)
        for _ in range(2):
            job = await driver.enqueue(app, 1)
            await driver.enqueue(app, 2)
            await driver.commit()
            assert await job.result(30) == 2
        assert isinstance(driver, AlchemyConnection)
        assert len(driver.on.sync_session.dispatch.after_commit) == 1
