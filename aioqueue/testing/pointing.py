"""Points an application that exists already, as a module's `app` does, at a test's database, and puts it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from aioqueue.app import AioQueue
from aioqueue.database import Database
from aioqueue.dsn import find_listen_dsn
from aioqueue.running import Host, RunningWorker
from aioqueue.settings import WorkerSettings

from .ran import TestingError


class IdleWorker(RunningWorker):
    """A worker that keeps the app open, claims nothing and runs nothing: `drain` and `run_job` do that, when the test says so."""

    def __init__(self, app: Host, settings: WorkerSettings, grace: float, *, standalone: bool) -> None:
        super().__init__(app, settings, grace, standalone=standalone)
        self._over = asyncio.Event()

    def problems(self) -> list[str]:
        """Nothing keeps it from its work."""
        return []

    def stop(self, *, hurry: bool = False) -> None:
        """End `wait`."""
        self._over.set()

    async def wait(self) -> None:
        """Wait until `stop`."""
        await self._over.wait()

    async def __aenter__(self) -> Self:
        await self._app.join()
        try:
            await check_sessions(self._app, self._app.database)
        except BaseException:
            await self._app.leave()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        await self._app.leave()


async def check_sessions(app: Host, database: Database) -> None:
    """Look as a worker's start does whether `session=` leads to the test's database. Raises ConfigurationError."""
    session = next((t.definition.session for t in app.tasks.values() if t.definition.session is not None), None)
    if session is not None:
        await session.opener.check(database, app.store, app.settings)


@contextlib.contextmanager
def use(app: AioQueue[Any], dsn: str, *, workers: bool = False) -> Iterator[AioQueue[Any]]:
    """Point a closed app at another database for a block; afterwards it is as it was.

    Its settings, tasks, middleware and observers stay. Unless `workers`, what `app.worker()` returns meanwhile (in a FastAPI
    application's lifespan, say) claims nothing: a worker in the background would run the jobs that the test looks at. Raises
    TestingError for an app that is open.
    """
    if app.is_open:
        raise TestingError(
            "the app is open already: point it at the test's database before its lifespan or 'async with app' begins"
        )
    before = app.dsn, app.listen_dsn, app.worker_class
    app.point_at(dsn, dsn if find_listen_dsn() else None)  # the environment's leads elsewhere
    if not workers:
        app.worker_class = IdleWorker
    try:
        yield app
    finally:
        app.worker_class = before[2]
        app.point_at(before[0], before[1])
