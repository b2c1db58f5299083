"""What an open app has in its process: the pool, and the loops that its tasks, handles and workers share.

The notifier runs from the beginning, listener and reader of results from the first who needs them: plain asyncio tasks, ended
and awaited in `close`, so that an app can be opened in a test's fixture. Of one event loop and one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any

from . import migrate
from .database import Database
from .errors import ConfigurationError
from .events import Observers, PoolerFound, logger
from .keep import keep_running
from .listen import ANSWER_TIMEOUT, Listener
from .result import ResultReader
from .server import deadline
from .settings import Settings
from .store import Store
from .wakeup import Notifier

POOLER = "a pooler stands between this process and the database: "
LISTENS = "no session state, no prepared statements; wake-ups come through listen_dsn, beside a look every %g s"
POLLS = "no session state, no prepared statements, no wake-ups but a look every %g s; listen_dsn, a direct way, brings them"


class Services:
    """The pool and the shared loops of one app; made by `open`."""

    def __init__(self, database: Database, store: Store, settings: Settings, observers: Observers) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.notifier = Notifier(database, store)
        self._listener = Listener(
            database.connect_listener, schema=settings.schema, observers=observers, notify=self._notify_listener
        )
        self._reader = ResultReader(
            database, store, self._listener, self.notifier, poll=settings.worker.poll, keep=settings.retention.succeeded_seconds
        )
        self._serve("notifier", self.notifier.run)

    @classmethod
    async def open(
        cls, dsn: str, store: Store, settings: Settings, observers: Observers, *, listen_dsn: str | None = None
    ) -> Services:
        """Look at the schema and open the pool. Raises SchemaError, psycopg.OperationalError."""
        database = Database(dsn, settings.pool, listen_dsn=listen_dsn)
        async with await database.connect() as conn, deadline(conn, settings.pool.deadline):
            await migrate.check(conn, schema=settings.schema)
            if database.listens_apart and (doubt := await database.doubt_listener(conn)):
                logger.warning("listen_dsn: %s", doubt)
        if database.pooler:
            logger.warning(POOLER + (LISTENS if database.can_listen else POLLS), settings.worker.poll)
            observers.emit(PoolerFound(listening=database.can_listen))
        await database.open()
        return cls(database, store, settings, observers)

    @property
    def inherited(self) -> bool:
        """Whether a parent process has opened them: nothing of them may be used here, nor closed."""
        return self._pid != os.getpid()

    @property
    def usable(self) -> bool:
        """Whether they are this process's and this event loop's."""
        return not self.inherited and self._loop is asyncio.get_running_loop()

    def tell(self, call: Callable[[Notifier], None]) -> None:
        """Have the notifier told something in the event loop's thread: at once if this is it, else soon."""
        try:
            here = self._loop is asyncio.get_running_loop()
        except RuntimeError:
            here = False
        if here:
            call(self.notifier)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to give a hint
                self._loop.call_soon_threadsafe(call, self.notifier)

    @property
    def database(self) -> Database:
        """The pool. Raises ConfigurationError in another process or on another event loop."""
        if self.inherited:
            raise ConfigurationError("the app was opened before a fork: connections cannot be shared; open it in each process")
        if self._loop is not asyncio.get_running_loop():
            raise ConfigurationError("the app is open on another event loop: make one AioQueue for each loop")
        return self._database

    @property
    def listener(self) -> Listener:
        """The listener; it runs from now on, unless there is no connection on which it could."""
        if self._database.can_listen:
            self._serve("listener", self._listener.run)
        return self._listener

    @property
    def reader(self) -> ResultReader:
        """The reader of results; it and the listener run from now on."""
        _ = self.listener
        self._serve("reader of results", self._reader.run)
        return self._reader

    async def close(self) -> None:
        """End the loops, send the last hint, close the pool; waiters get AppNotOpen."""
        tasks, self._tasks = list(self._tasks.values()), {}
        try:
            for task in tasks:
                task.cancel()
            self._reader.close()
            await asyncio.wait(tasks)
            await self.notifier.send_last()
        finally:
            await self._database.close()

    async def _notify_listener(self, channel: str) -> None:
        async with self._database.in_turn(), self._database.for_caller(ANSWER_TIMEOUT) as conn:
            await conn.execute("SELECT pg_catalog.pg_notify(%s, '')", (channel,))

    def _serve(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a loop unless it runs."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(keep_running(run, name), name=f"aioqueue {name}")
