"""The libraries whose connections `on=` takes, behind one face for the tests: each as its users hold it."""

import asyncio
import contextlib
import contextvars
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import django
import psycopg
import sqlalchemy
import sqlmodel
import sqlmodel.ext.asyncio.session
from django.conf import settings
from django.db import connection, connections, transaction
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import set_json_dumps, set_json_loads
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from aioqueue import AioQueue, Job

R = TypeVar("R")


def _dumps(_: object) -> str:
    raise AssertionError("the caller's codec was used")


class Driver(ABC):
    """One connection or session to the test's database; `on` is what `on=` is given."""

    on: Any

    def __init__(self, dsn: str, *, autocommit: bool = False) -> None:
        self.dsn = dsn
        self.autocommit = autocommit

    @abstractmethod
    async def open(self) -> None: ...
    @abstractmethod
    async def close(self) -> None: ...
    @abstractmethod
    async def begin(self) -> None:
        """Begin as the library's users do: most begin of themselves with their first statement."""

    @abstractmethod
    async def commit(self) -> None: ...
    @abstractmethod
    async def rollback(self) -> None: ...
    @abstractmethod
    async def execute(self, statement: str) -> None: ...
    @abstractmethod
    def savepoint(self) -> contextlib.AbstractAsyncContextManager[object]:
        """A savepoint, rolled back by an exception."""

    @abstractmethod
    async def set_codec(self) -> None:
        """Set codecs for json and jsonb that fail."""

    async def enqueue(self, app: AioQueue, *args: Any, task: str = "add", **options: Any) -> Job[Any]:
        return await app.get(task).options(on=self.on, **options).enqueue(*args)

    async def enqueue_many(self, app: AioQueue, payloads: Any, **options: Any) -> list[Job[Any]]:
        return await app.get("add").options(on=self.on, **options).enqueue_many(payloads)


class Psycopg(Driver):
    async def open(self) -> None:
        self.on = await psycopg.AsyncConnection.connect(self.dsn, autocommit=self.autocommit)

    async def close(self) -> None:
        await self.on.close()

    async def begin(self) -> None: ...
    async def commit(self) -> None:
        await self.on.commit()

    async def rollback(self) -> None:
        await self.on.rollback()

    async def execute(self, statement: str) -> None:
        await self.on.execute(statement)

    def savepoint(self) -> contextlib.AbstractAsyncContextManager[object]:
        return self.on.transaction()

    async def set_codec(self) -> None:
        set_json_dumps(_dumps, self.on)
        set_json_loads(_dumps, self.on)


class Asyncpg(Driver):
    transaction: Any = None

    async def open(self) -> None:
        self.on = await asyncpg.connect(self.dsn)

    async def close(self) -> None:
        await self.on.close()

    async def begin(self) -> None:
        self.transaction = self.on.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()

    async def rollback(self) -> None:
        await self.transaction.rollback()

    async def execute(self, statement: str) -> None:
        await self.on.execute(statement)

    def savepoint(self) -> contextlib.AbstractAsyncContextManager[object]:
        return self.on.transaction()

    async def set_codec(self) -> None:
        for name in ("json", "jsonb"):
            await self.on.set_type_codec(name, schema="pg_catalog", encoder=_dumps, decoder=_dumps)


class AsyncpgPool(Asyncpg):
    pool: Any

    async def open(self) -> None:
        self.pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=1)
        self.on = await self.pool.acquire()

    async def close(self) -> None:
        await self.pool.release(self.on)
        await self.pool.close()


class AlchemyConnection(Driver):
    """AsyncConnection; subclasses choose the driver below, and the session above."""

    library = "asyncpg"
    engine: Any
    conn: Any = None

    def options(self) -> dict[str, Any]:
        return {"isolation_level": "AUTOCOMMIT"} if self.autocommit else {}

    async def open(self) -> None:
        url = sqlalchemy.make_url(self.dsn).set(drivername=f"postgresql+{self.library}")
        self.engine = create_async_engine(url, json_serializer=_dumps, json_deserializer=_dumps, pool_size=1, **self.options())
        await self.connect()

    async def connect(self) -> None:
        self.on = await self.engine.connect()

    async def close(self) -> None:
        await self.on.close()
        await self.engine.dispose()

    async def begin(self) -> None: ...
    async def commit(self) -> None:
        await self.on.commit()

    async def rollback(self) -> None:
        await self.on.rollback()

    async def execute(self, statement: str) -> None:
        await self.on.execute(sqlalchemy.text(statement))

    def savepoint(self) -> contextlib.AbstractAsyncContextManager[object]:
        return self.on.begin_nested()

    async def set_codec(self) -> None: ...  # the engine's


class AlchemyConnectionPsycopg(AlchemyConnection):
    library = "psycopg"


class AlchemySession(AlchemyConnection):
    async def connect(self) -> None:
        self.on = AsyncSession(self.engine, expire_on_commit=False)


class AlchemySessionPsycopg(AlchemySession):
    library = "psycopg"


class SQLModelSession(AlchemyConnection):
    async def connect(self) -> None:
        self.on = sqlmodel.ext.asyncio.session.AsyncSession(self.engine)

    async def execute(self, statement: str) -> None:
        conn = await self.on.connection()
        await conn.execute(sqlalchemy.text(statement))


class Blocking(Driver):
    """A library that blocks, in a thread of its own beside the event loop."""

    sync = True

    def __init__(self, dsn: str, *, autocommit: bool = False) -> None:
        super().__init__(dsn, autocommit=autocommit)
        self.thread = ThreadPoolExecutor(1)

    async def run(self, call: Callable[..., R], *args: Any) -> R:
        """Call something in the thread."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self.thread, lambda: context.run(call, *args))

    @abstractmethod
    def connect(self) -> None: ...
    @abstractmethod
    def disconnect(self) -> None: ...
    @abstractmethod
    def run_statement(self, statement: str) -> None: ...
    @abstractmethod
    def open_savepoint(self) -> contextlib.AbstractContextManager[object]: ...

    async def open(self) -> None:
        await self.run(self.connect)

    async def close(self) -> None:
        await self.run(self.disconnect)
        self.thread.shutdown()

    async def begin(self) -> None: ...
    async def commit(self) -> None:
        await self.run(self.on.commit)

    async def rollback(self) -> None:
        await self.run(self.on.rollback)

    async def execute(self, statement: str) -> None:
        await self.run(self.run_statement, statement)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        point = await self.run(self.open_savepoint)
        await self.run(point.__enter__)
        try:
            yield
        except BaseException as error:
            if not await self.run(point.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await self.run(point.__exit__, None, None, None)

    async def enqueue(self, app: AioQueue, *args: Any, task: str = "add", **options: Any) -> Job[Any]:
        return await self.run(app.get(task).options(on=self.on, **options).enqueue_sync, *args)

    async def enqueue_many(self, app: AioQueue, payloads: Any, **options: Any) -> list[Job[Any]]:
        return await self.run(app.get("add").options(on=self.on, **options).enqueue_many_sync, payloads)


class PsycopgSync(Blocking):
    def connect(self) -> None:
        self.on = psycopg.connect(self.dsn, autocommit=self.autocommit)

    def disconnect(self) -> None:
        self.on.close()

    def run_statement(self, statement: str) -> None:
        self.on.execute(statement)

    def open_savepoint(self) -> contextlib.AbstractContextManager[object]:
        return self.on.transaction()

    async def set_codec(self) -> None:
        set_json_dumps(_dumps, self.on)
        set_json_loads(_dumps, self.on)


class AlchemyConnectionSync(Blocking):
    library = "psycopg"
    engine: Any

    def connect(self) -> None:
        url = sqlalchemy.make_url(self.dsn).set(drivername=f"postgresql+{self.library}")
        options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if self.autocommit else {}
        self.engine = sqlalchemy.create_engine(url, json_serializer=_dumps, json_deserializer=_dumps, **options)
        self.on = self.hold()

    def hold(self) -> Any:
        return self.engine.connect()

    def disconnect(self) -> None:
        self.on.close()
        self.engine.dispose()

    def run_statement(self, statement: str) -> None:
        self.on.execute(sqlalchemy.text(statement))

    def open_savepoint(self) -> contextlib.AbstractContextManager[object]:
        return self.on.begin_nested()

    async def set_codec(self) -> None: ...  # the engine's


class AlchemySessionSync(AlchemyConnectionSync):
    def hold(self) -> Any:
        return Session(self.engine)


class AlchemySessionPsycopg2(AlchemySessionSync):
    library = "psycopg2"


def atomic() -> transaction.Atomic:
    """As transaction.atomic(), with a type."""
    return transaction.Atomic(using=None, savepoint=True, durable=False)


class Django(Blocking):
    atomic: Any = None

    def connect(self) -> None:
        if not settings.configured:
            settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}, USE_TZ=True, TIME_ZONE="UTC")
            django.setup()
        given = conninfo_to_dict(self.dsn)
        connections["default"].settings_dict.update(
            NAME=given["dbname"], USER=given["user"], HOST=given["host"], PORT=given.get("port", "")
        )
        self.on = connection  # the proxy that everybody imports

    def disconnect(self) -> None:
        if self.atomic is not None:
            self.end(commits=False)
        self.on.close()

    def start(self) -> None:
        self.atomic = atomic()
        self.atomic.__enter__()

    def end(self, *, commits: bool) -> None:
        atomic, self.atomic = self.atomic, None
        if not commits:
            self.on.set_rollback(True)
        atomic.__exit__(None, None, None)

    async def begin(self) -> None:
        await self.run(self.start)

    async def commit(self) -> None:
        await self.run(lambda: self.end(commits=True))

    async def rollback(self) -> None:
        await self.run(lambda: self.end(commits=False))

    def run_statement(self, statement: str) -> None:
        with self.on.cursor() as cursor:
            cursor.execute(statement)

    def open_savepoint(self) -> contextlib.AbstractContextManager[object]:
        return atomic()

    async def set_codec(self) -> None:
        def set_both() -> None:  # the proxy's connection is the thread's
            self.on.ensure_connection()
            set_json_dumps(_dumps, self.on.connection)
            set_json_loads(_dumps, self.on.connection)

        await self.run(set_both)


AWAITED: list[type[Driver]] = [
    Psycopg, Asyncpg, AsyncpgPool, AlchemyConnection, AlchemyConnectionPsycopg, AlchemySession, AlchemySessionPsycopg,
    SQLModelSession,
]  # fmt: skip
BLOCKING: list[type[Driver]] = [
    PsycopgSync, AlchemyConnectionSync, AlchemySessionSync, AlchemySessionPsycopg2, Django,
]  # fmt: skip
SESSIONS: list[type[Driver]] = [AlchemySession, AlchemySessionPsycopg, SQLModelSession]
