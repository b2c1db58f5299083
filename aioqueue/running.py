"""A worker as its user holds it: started beside a block or on its own, stopped in order whoever cancels it and however often.

The one task that it starts opens what the worker needs, runs it and lets go of that again; here it is only waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from .database import Database
from .errors import ConfigurationError
from .events import Observers
from .keep import outlast
from .middleware import Middleware
from .resources import opened
from .services import Services
from .settings import Settings, WorkerSettings
from .store import Store
from .task import Task
from .worker import WakeUps, Worker


class Host(WakeUps, Protocol):
    """What a worker needs of the app."""

    settings: Settings
    observers: Observers
    middleware: tuple[Middleware, ...]
    refusal: str | None

    @property
    def database(self) -> Database:
        """The pool of the open app."""
        ...

    @property
    def store(self) -> Store:
        """The operations."""
        ...

    @property
    def tasks(self) -> Mapping[str, Task[..., ..., Any]]:
        """All registered tasks by name."""
        ...

    def services(self, action: str) -> Services:
        """What the open app has in its process."""
        ...

    def make_resources(self) -> AbstractAsyncContextManager[Any]:
        """What a worker opens for its jobs."""
        ...

    async def join(self) -> None:
        """Open the app if need be; it stays open until everybody who joined has left."""
        ...

    async def leave(self) -> None:
        """Undo one `join`."""
        ...


class RunningWorker:
    """A worker of an app: `async with` runs it beside the block, `run()` runs it and nothing else."""

    def __init__(self, app: Host, settings: WorkerSettings, grace: float, *, standalone: bool) -> None:
        self._app = app
        self._settings = settings
        self._grace = grace
        self._standalone = standalone
        self._worker: Worker | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._opening = False
        self._stop = self._hurry = False

    @property
    def id(self) -> int:
        """The worker's present identity; 0 before it has one."""
        return 0 if self._worker is None else self._worker.heartbeat.worker

    @property
    def running(self) -> int:
        """Jobs that run now."""
        return 0 if self._worker is None else self._worker.running

    def problems(self) -> list[str]:
        """Say what keeps the worker from its work now; empty when all is well."""
        if self._task is not None and self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            return ["the worker has ended" if error is None else f"the worker has ended: {type(error).__name__}: {error}"]
        if self._worker is not None:
            return self._worker.problems()
        if self._opening:
            return ["the worker has not started yet: it opens its resources"]
        refusal = self._app.refusal
        return ["the worker has not started yet" if refusal is None else f"cannot reach the database: {refusal}"]

    @property
    def abandoned(self) -> int:
        """Jobs that ignored their cancellation and were given up on; then the worker claims nothing more."""
        return 0 if self._worker is None else self._worker.abandoned

    @property
    def unwritten(self) -> int:
        """Outcomes that the database did not take before the worker had to stop; others run these jobs again."""
        return 0 if self._worker is None else self._worker.unwritten

    def stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop; see `Worker.stop`. Idempotent; counts also before it has started."""
        first, self._stop = not self._stop, True
        self._hurry = self._hurry or hurry
        if self._worker is not None:
            self._worker.stop(hurry=self._hurry)
        elif self._opening and self._task is not None and (first or hurry):
            self._task.cancel()

    async def run(self) -> None:
        """Run until stopped, drained or cancelled; opens the app if need be."""
        async with self:
            await self.wait()

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ConfigurationError("this worker was started already; make another with app.worker()")
        task = self._task = asyncio.create_task(self._live(), name="aioqueue worker")
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await outlast(task)
            raise
        finally:
            started.cancel()
        if task.done():
            task.result()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        if self._task is not None:
            # The worker stops by its own limits; a cancellation makes it hurry.
            await outlast(self._task, lambda: self.stop(hurry=True))

    async def wait(self) -> None:
        """Wait until the worker has ended by itself (drain)."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _live(self) -> None:
        await self._app.join()
        try:
            if not self._stop:
                await self._work()
        except asyncio.CancelledError:
            if not (self._opening and self._stop):
                raise  # else it was asked to stop before it had claimed anything
        finally:
            self._opening = False
            await self._app.leave()

    async def _work(self) -> None:
        self._opening = True
        async with opened(self._app.make_resources, close_within=self._app.settings.limits.abandon) as resources:
            self._opening = False
            worker = self._worker = Worker(
                self._app.database,
                self._app.store,
                self._app.observers,
                self._app,
                self._app.tasks,
                self._app.settings,
                hints=self._app.services("a worker").notifier,
                worker=self._settings,
                middleware=self._app.middleware,
                resources=resources,
                grace=self._grace,
                standalone=self._standalone,
                started=self._started,
            )
            if self._stop:
                worker.stop(hurry=self._hurry)
            await worker.run()
