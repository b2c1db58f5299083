"""Opens and closes an app: what its tasks, handles and workers share is there from the first who needs it to the last who leaves.

A base of the app; it counts who needs the pool and the shared loops (services.py), on the database that location.py finds. One
event loop, one process: what a parent process has opened is neither used nor closed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from .database import Database
from .errors import AppNotOpen, ConfigurationError
from .events import Observers
from .keep import outlast
from .location import Location
from .patience import once_reached
from .services import Services
from .settings import Settings
from .store import Store
from .wakeup import Notifier

_inherited: list[object] = []
"""What a parent process had opened: kept for ever, since an object that is collected may close what is the parent's."""


class Openable:
    """The app, as far as it is opened and closed."""

    def __init__(self, settings: Settings, observers: Observers, location: Location) -> None:
        super().__init__()
        self.settings = settings
        self.observers = observers
        self._location = location
        self._store = Store(settings.schema)
        self.refusal: str | None = None
        """Why the database cannot be reached, while opening the app waits for it."""
        self._services: Services | None = None
        self._opened = False
        """Whether `open` was called, and `close` not yet."""
        self._users = 0
        """Who needs the pool: one for `open`, and each worker."""
        self._pid = os.getpid()
        self._turns = asyncio.Lock()
        self._turns_of: asyncio.AbstractEventLoop | None = None

    @property
    def dsn(self) -> str | None:
        """The DSN that the app was given; None: it looks for one when it is opened."""
        return self._location.dsn

    @property
    def listen_dsn(self) -> str | None:
        """The DSN that the app was given for wake-ups."""
        return self._location.listen_dsn

    @property
    def data_dir(self) -> Path | None:
        """The directory of the embedded server that the app was given; None: the default one."""
        return self._location.data_dir

    def point_at(self, dsn: str | None, listen_dsn: str | None) -> None:
        """Use these when it is opened next, in place of those that it was given: for tests."""
        self._location.dsn, self._location.listen_dsn = dsn, listen_dsn

    @property
    def is_open(self) -> bool:
        """Whether the app is open in this process."""
        return self._services is not None and not self._services.inherited

    async def open(self) -> None:
        """Open the pool and the notifier. Raises SchemaError, ConfigurationError, psycopg.OperationalError.

        A database that cannot be reached is waited for, `PoolSettings.start_timeout` at most.
        In a process that was forked since, what the parent has opened is left alone.
        """
        async with self._turn():
            if self._opened:
                raise ConfigurationError("the app is open already; open it once, or make another AioQueue")
            await self._join()
            self._opened = True

    async def close(self) -> None:
        """Close everything; waiters get AppNotOpen. Idempotent. While workers run, the last of them to end closes it."""
        await outlast(asyncio.create_task(self._close(), name="aioqueue close"))

    async def join(self) -> None:
        """Open the app if need be; it stays open until everybody who joined has left. For workers."""
        async with self._turn():
            await self._join()

    async def leave(self) -> None:
        """Undo one `join`."""
        await outlast(asyncio.create_task(self._leave(), name="aioqueue close"))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Open the app for as long as a web application lives: `FastAPI(lifespan=app.lifespan)`."""
        async with self:
            yield

    @property
    def store(self) -> Store:
        """The operations, bound to this app's schema."""
        return self._store

    @property
    def notifier(self) -> Notifier | None:
        """What gives hints; None while the app is closed, or is open in another process or on another loop."""
        services = self._services
        return services.notifier if services is not None and services.usable else None

    def tell(self, call: Callable[[Notifier], None]) -> bool:
        """Have the notifier told something, from whatever thread; False: the app is not open in this process."""
        services = self._services
        if services is None or services.inherited:
            return False
        services.tell(call)
        return True

    @property
    def database(self) -> Database:
        """The pool of the open app. Raises AppNotOpen."""
        return self.services("the pool").database

    def services(self, action: str) -> Services:
        """Return what the open app has, for an action. Raises AppNotOpen, ConfigurationError (another process or loop)."""
        if self._services is None:
            raise AppNotOpen(action)
        _ = self._services.database
        return self._services

    def note_refusal(self, error: str) -> None:
        """Take note of why the database cannot be reached, while a start waits for it."""
        self.refusal = error

    def _turn(self) -> asyncio.Lock:
        """Return the lock of opening and closing: new in each process and on each loop, which may come one after the other."""
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            _inherited.extend([self._services, self._location, self._turns, self._turns_of])
            self._services = self._turns_of = None
            self._location = dataclasses.replace(self._location)
            self._opened, self._users, self._pid = False, 0, os.getpid()
        if self._turns_of is not loop:
            self._turns, self._turns_of = asyncio.Lock(), loop
        return self._turns

    async def _join(self) -> None:
        if self._users:
            self.services("joining")
        else:
            await self._start()
        self._users += 1

    async def _close(self) -> None:
        async with self._turn():
            if self._opened:
                self._opened = False
                await self._let_go()

    async def _leave(self) -> None:
        async with self._turn():
            await self._let_go()

    async def _let_go(self) -> None:
        self._users -= 1
        if not self._users:
            await self._end()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if sys.platform == "win32" and isinstance(loop, asyncio.ProactorEventLoop):
            raise ConfigurationError(
                "psycopg needs a selector event loop on Windows: asyncio.run(main(), loop_factory=asyncio.SelectorEventLoop)"
            )
        anyio.get_cancelled_exc_class()  # loads anyio's backend now: 25 ms that no stop must cost the loop
        try:
            self._services = await once_reached(self._open_services, self.settings.pool.start_timeout, self.note_refusal)
        except BaseException:
            self._location.leave()
            raise
        finally:
            self.refusal = None

    async def _open_services(self) -> Services:
        dsn, listen_dsn = await self._location.find()
        return await Services.open(dsn, self._store, self.settings, self.observers, listen_dsn=listen_dsn)

    async def _end(self) -> None:
        services, self._services = self._services, None
        try:
            if services is not None:
                await services.close()
        finally:
            self._location.leave()
