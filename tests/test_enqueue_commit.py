"""A lone enqueue, whose commit and hint share a round trip: what the commit refuses is not enqueued, whatever the hint does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest

from aioqueue import AioQueue, InvalidOption
from aioqueue.options import Options
from aioqueue.wakeup import Notifier
from tests.kit import session
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%%enqueue_alike%%'"
TRIGGER = """CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON aioqueue.live DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION aioqueue.at_commit()"""

AtCommit = Callable[[str], Awaitable[None]]


async def test_one_that_is_always_refused_is_prepared_once(app: AioQueue) -> None:
    jobs = Options(priority=9).jobs("add", ['{"a": 1}'])
    async with app.services("this test").database.for_caller() as conn:
        for _ in range(4):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                await app.store.enqueue_alone(conn, jobs, hint=app.store.hint(conn, "ready"))
        found = await conn.execute(PREPARED)
        assert await found.fetchone() == (1,)


@pytest.fixture
async def at_commit(database: Database, schema: str) -> AsyncIterator[AtCommit]:
    """Makes the server do something at the commit of whoever has written a ready job; it may do everything."""

    async def do(body: str) -> None:
        await admin.rows(
            "CREATE FUNCTION aioqueue.at_commit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$"
            f" BEGIN {body}; RETURN NULL; END $$"
        )
        await admin.rows(TRIGGER)

    async with session(database.dsn("superuser"), schema) as admin:
        await admin.rows("CREATE SEQUENCE aioqueue.commits")
        yield do
        await admin.rows("DROP FUNCTION IF EXISTS aioqueue.at_commit() CASCADE")
        await admin.rows("DROP SEQUENCE aioqueue.commits")


@pytest.mark.parametrize("notify", [False, True])
async def test_one_that_is_cancelled_leaves_its_connection_to_the_next(
    app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch, notify: bool
) -> None:
    waits = "SELECT pid FROM pg_locks WHERE NOT granted"
    monkeypatch.setattr(Notifier, "take", lambda *_: notify)
    await app.get("add").enqueue(1)
    await boss.begin()
    await boss.rows("LOCK TABLE aioqueue.job")
    enqueue = asyncio.create_task(app.get("add").enqueue(2))
    while not (pids := await boss.rows(waits)):
        pass
    enqueue.cancel()
    with pytest.raises(asyncio.CancelledError):
        await enqueue
    await boss.rollback()
    job = await app.get("add").enqueue(3)
    assert await boss.rows("SELECT payload FROM aioqueue.job ORDER BY id") == [({"a": 1},), ({"a": 3},)]
    assert await boss.rows("SELECT pid FROM pg_stat_activity WHERE pid = %s", pids[0][0]) == pids, "it was not closed"
    assert await boss.value("SELECT max(job_id::text) FROM aioqueue.live") == str(job.id)


TERMINATED = b"SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(60), $1::text"


@pytest.mark.parametrize("hint", [b"SELECT pg_notify('', $1)", TERMINATED])
async def test_a_hint_that_fails_is_left_to_the_notifier(
    app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch, hint: bytes
) -> None:
    hints: list[str] = []
    monkeypatch.setattr(Notifier, "take", lambda *_: True)
    monkeypatch.setattr(Notifier, "hint", lambda _, kind: hints.append(kind))
    monkeypatch.setitem(app.store.wired, "notify", hint)
    made = [(await app.get("add").enqueue(n)).id for n in range(3)]
    assert hints == ["ready"] * 6, "given back, and that of the job"
    assert await boss.rows("SELECT job_id FROM aioqueue.live ORDER BY vt") == [(job_id,) for job_id in made]


async def test_an_enqueue_that_is_refused_leaves_the_connections_as_they_were(app: AioQueue, boss: Session) -> None:
    for _ in range(app.settings.pool.size):
        with pytest.raises(InvalidOption):
            await app.enqueue_jobs(Options(priority=9).jobs("add", ["{}"]), on=None)
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
    await asyncio.gather(*(app.get("add").enqueue(n) for n in range(2 * app.settings.pool.size)))


async def test_a_commit_that_is_refused_is_an_error(app: AioQueue, boss: Session, at_commit: AtCommit) -> None:
    await at_commit("IF nextval('aioqueue.commits') < 2 THEN RAISE EXCEPTION 'not today'; END IF")
    with pytest.raises(psycopg.Error, match="not today"):
        await app.get("add").enqueue(1)
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
    for _ in range(app.settings.pool.size):
        await app.get("add").enqueue(1)


async def test_a_server_process_that_dies_at_the_commit_is_followed_by_another(
    app: AioQueue, boss: Session, at_commit: AtCommit
) -> None:
    await at_commit(
        "IF nextval('aioqueue.commits') < 3 THEN PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60); END IF"
    )
    job = await app.get("add").enqueue(1)
    assert await boss.rows("SELECT job_id FROM aioqueue.live") == [(job.id,)]
