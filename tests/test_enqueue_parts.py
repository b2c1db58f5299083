"""An enqueue of many, which is sent part by part: one transaction, one series of positions, each job once, or none at all."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from aioqueue import AioQueue, DuplicateJob, InvalidPayload
from aioqueue.job import new_job_id, new_job_ids
from aioqueue.new_jobs import NewJobs
from aioqueue.pool_connection import sever
from aioqueue.wakeup import CALL_SECONDS
from tests.kit import MakeApp, session, until
from tests.postgres import Database
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio
TAGS = "SELECT l.vt, (j.payload ->> 'a')::integer FROM aioqueue.live l JOIN aioqueue.job j ON j.id = l.job_id ORDER BY l.vt, 2"

WAITING = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() <> pid)"


@pytest.fixture
async def one(database: Database, schema: str) -> AsyncIterator[Session]:
    """Somebody else's session."""
    async with session(database.dsn("owner"), schema) as made:
        yield made


@pytest.fixture(autouse=True)
def parts_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioqueue.task.PART", 3)


async def test_handles_and_positions_come_in_the_order_of_the_payloads(app: AioQueue, boss: Session) -> None:
    made = await app.get("add").options(tenant="T").enqueue_many([{"a": n} for n in range(10)])
    assert [job.tenant for job in made] == ["T"] * 10
    assert await boss.rows(TAGS) == [(1_000 * (n + 1), n) for n in range(10)]
    rows = await boss.rows("SELECT id, (payload ->> 'a')::integer, xmin::text FROM aioqueue.job ORDER BY 2")
    assert [(job.id, n) for n, job in enumerate(made)] == [row[:2] for row in rows]
    await app.get("add").options(tenant="T", delay=60).enqueue_many([{"a": n} for n in range(7)])
    assert await boss.value("SELECT count(*) FROM aioqueue.scheduled") == 7


async def test_they_are_seen_all_at_once(app: AioQueue, boss: Session, one: Session) -> None:
    """The last part waits for an id that another transaction is about to take, or not."""
    ids = [new_job_id() for _ in range(9)]
    await one.begin()
    await one.enqueue(task="add", payload='{"a": 8}', id=ids[8])

    def part(start: int, total: int) -> NewJobs:
        payloads = [f'{{"a": {n}}}' for n in range(start, start + 3)]
        return NewJobs(task="add", ids=ids[start : start + 3], payloads=payloads, total=total)

    writing = asyncio.create_task(app.enqueue_jobs(part(0, 9), (part(start, 0) for start in (3, 6)), on=None))
    await until(boss, WAITING)
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
    await one.rollback()
    await writing
    assert await boss.value("SELECT count(*) FROM aioqueue.live") == 9


@pytest.mark.parametrize("wrong", [0, 4, 9])
async def test_a_payload_that_is_refused_refuses_all(app: AioQueue, boss: Session, wrong: int) -> None:
    for payloads in ([{"a": n} for n in range(10)], [(n,) for n in range(10)]):
        many: list[Any] = [*payloads]
        many[wrong] = {"a": "x"}
        with pytest.raises(InvalidPayload, match=rf"number {wrong} \(from 0\)"):
            await app.get("add").enqueue_many(many)
        assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
    for _ in range(app.settings.pool.size):
        await app.get("add").enqueue(1)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 6, 7])
async def test_any_number_is_as_many_jobs(app: AioQueue, boss: Session, number: int) -> None:
    made = await app.get("add").enqueue_many({"a": n} for n in range(number))
    rows = await boss.rows("SELECT id, (payload ->> 'a')::integer, vt FROM aioqueue.job, aioqueue.live WHERE job_id = id")
    assert sorted(rows, key=lambda row: row[1]) == [(job.id, n, 1_000 * (n + 1)) for n, job in enumerate(made)]
    assert len(made) == number


async def test_a_text_is_what_it_was_whatever_ends_a_line_in_it(make_app: MakeApp, boss: Session) -> None:
    app = make_app()
    texts = ["\n", "a\r\nb", "\r", "\u2028\u2029", "\x0b\x0c\x1c\x1d\x85", "\\n", "\\u0000", '"\n"', "", "\ufeff🐘"]

    @app.task(name="say")
    async def say(text: str) -> None: ...

    @app.task(name="dump")
    async def dump(data: dict[str, Any]) -> None: ...

    async with app:
        made = await say.enqueue_many([{"text": text} for text in texts])
        made += await say.options(on=boss.conn).enqueue_many([(text,) for text in texts])
        made += await dump.enqueue_many([{"data": {text: [text]}} for text in texts])
        made += [await app.enqueue_by_name("say", {"text": text}) for text in texts]
        found = dict(await boss.rows("SELECT id, payload FROM aioqueue.job"))
    said = [{"text": text} for text in texts]
    assert [found[job.id] for job in made] == [*said, *said, *({"data": {text: [text]}} for text in texts), *said]


def refusing(at: int) -> Iterator[NewJobs]:
    """Parts of two jobs, of which one is refused."""
    for part in range(5):
        if part == at:
            raise InvalidPayload("add", "that one")
        yield NewJobs(task="add", ids=new_job_ids(2), payloads=['{"a": 1}'] * 2, total=0 if part else 10)


async def test_a_refusal_is_not_forgotten_with_the_connection(
    app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the parts before it would be all that is written by the next try."""
    write, tries = app.store.enqueue_parts, 0

    async def lose(conn: AsyncConnection[Any], parts: Iterable[NewJobs]) -> None:
        nonlocal tries
        tries += 1
        try:
            await write(conn, parts)
        except InvalidPayload as refused:
            if tries > 1:
                raise
            raise psycopg.OperationalError("the server died at the ROLLBACK") from refused

    monkeypatch.setattr(app.store, "enqueue_parts", lose)
    parts = refusing(at=3)
    with pytest.raises(InvalidPayload, match="that one"):
        await app.enqueue_jobs(next(parts), parts, on=None)
    assert tries == 2
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []


async def test_the_deadline_grows_with_the_number(app: AioQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    database = app.services("this test").database
    lend = database.for_caller

    def for_caller(seconds: float | None = None) -> Any:
        if seconds != CALL_SECONDS:  # the notifier's
            given.append(seconds or 0.0)
        return lend(seconds)

    monkeypatch.setattr(database, "for_caller", for_caller)
    monkeypatch.setattr("aioqueue.enqueue.AT_A_TIME", 10)
    for number in (1, 10, 11, 30, 31):
        await app.get("add").enqueue_many([{"a": n} for n in range(number)])
    assert given == [times * app.settings.pool.deadline for times in (1, 1, 2, 3, 4)]


async def test_one_that_is_cancelled_between_two_parts_writes_all_or_nothing(app: AioQueue, boss: Session) -> None:
    """All, where nothing had to be waited for between that and the COMMIT."""

    def parts() -> Iterator[NewJobs]:
        for part in range(5):
            if part == 3:
                writing.cancel()
            yield NewJobs(task="add", ids=new_job_ids(2), payloads=['{"a": 1}'] * 2, total=0 if part else 10)

    async def write() -> None:
        made = parts()
        await app.enqueue_jobs(next(made), made, on=None)

    writing = asyncio.create_task(write())
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await boss.value("SELECT count(*) FROM aioqueue.live") in (0, 10)
    await asyncio.gather(*(app.get("add").enqueue(n) for n in range(2 * app.settings.pool.size)))
    idle = "SELECT 1 FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%' AND datname = current_database()"
    assert await boss.rows(idle) == []


async def test_an_id_that_is_taken_refuses_all(app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = (await app.get("add").enqueue(77)).id
    made: list[int] = []

    def new_job_ids(number: int) -> list[Any]:
        made.append(number)
        return [taken if len(made) == 2 else new_job_id(), *(new_job_id() for _ in range(number - 1))]

    monkeypatch.setattr("aioqueue.options.new_job_ids", new_job_ids)
    with pytest.raises(DuplicateJob) as caught:
        await app.get("add").enqueue_many([{"a": n} for n in range(30)])
    assert caught.value.job_id == taken
    assert await boss.rows("SELECT id FROM aioqueue.job") == [(taken,)]


async def test_an_answer_that_is_lost_makes_exactly_one_job_each(
    app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lost = app.store.enqueue_parts, 0

    async def lose(conn: AsyncConnection[Any], parts: Iterable[NewJobs]) -> None:
        """First in the middle, then at the end."""
        nonlocal lost
        lost += 1
        if lost == 1:

            def cut() -> Iterable[NewJobs]:
                for number, part in enumerate(parts):
                    if number == 2:
                        sever(conn)
                    yield part

            await write(conn, cut())
        await write(conn, parts)
        if lost == 2:
            sever(conn)
            await conn.execute("SELECT 1")

    monkeypatch.setattr(app.store, "enqueue_parts", lose)
    made = await app.get("add").enqueue_many([{"a": n} for n in range(10)])
    assert lost == 3
    rows = await boss.rows("SELECT job_id, vt FROM aioqueue.live ORDER BY vt")
    assert rows == [(job.id, 1_000 * (n + 1)) for n, job in enumerate(made)]
    assert await boss.value("SELECT count(*) FROM aioqueue.job") == 10


async def test_one_that_is_cancelled_writes_nothing(app: AioQueue, boss: Session, one: Session) -> None:
    await one.begin()
    await one.rows("LOCK TABLE aioqueue.job IN ACCESS EXCLUSIVE MODE")
    writing = asyncio.create_task(app.get("add").enqueue_many([{"a": n} for n in range(10)]))
    await until(one, WAITING)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await one.rollback()
    assert await boss.rows("SELECT 1 FROM aioqueue.job") == []
    for _ in range(app.settings.pool.size):
        await app.get("add").enqueue(1)


async def test_open_batches_of_one_tenant_do_not_overlap(app: AioQueue, boss: Session, one: Session) -> None:
    await one.begin()
    await one.enqueue(12, tenant="T", payload='{"a": -1}')
    await app.get("add").options(tenant="T").enqueue_many([{"a": n} for n in range(10)])
    await one.commit()
    found = [vt for vt, _ in await boss.rows(TAGS)]
    assert len(found) == len(set(found)) == 22


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
async def test_whatever_the_roles_isolation_is_positions_do_not_tie(make_app: MakeApp, boss: Session, level: str) -> None:
    dbname = boss.conn.info.dbname
    await boss.rows(f"ALTER DATABASE \"{dbname}\" SET default_transaction_isolation = '{level}'")
    try:
        async with make_app() as app:
            await app.get("add").enqueue_many([{"a": n} for n in range(10)])
    finally:
        await boss.rows(f'ALTER DATABASE "{dbname}" RESET default_transaction_isolation')
    assert await boss.rows(TAGS) == [(1_000 * (n + 1), n) for n in range(10)]


async def test_in_a_callers_transaction_a_refused_payload_leaves_it_as_it_was(app: AioQueue, boss: Session, one: Session) -> None:
    await one.begin()
    made = await app.get("add").options(on=one.conn).enqueue_many([{"a": n} for n in range(10)])
    with pytest.raises(InvalidPayload, match=r"number 9 \(from 0\)"):
        await app.get("add").options(on=one.conn).enqueue_many([{"a": n if n < 9 else "x"} for n in range(10)])
    await one.commit()
    assert await boss.rows("SELECT job_id FROM aioqueue.live ORDER BY vt") == [(job.id,) for job in made]


async def test_more_than_fifty_parts_are_made_larger(app: AioQueue, boss: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    write = app.store.enqueue_parts

    async def count(conn: AsyncConnection[Any], parts: Iterable[NewJobs]) -> None:
        every = list(parts)
        sent.extend(len(part.ids) for part in every)
        await write(conn, every)

    monkeypatch.setattr(app.store, "enqueue_parts", count)
    await app.get("add").enqueue_many([{"a": n} for n in range(203)])
    assert sent == [5] * 40 + [3]
    assert await boss.value("SELECT count(DISTINCT vt) FROM aioqueue.live") == 203
