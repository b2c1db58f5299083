"""Opens an app in a test, and gives the test its queue (kit.py); closes what it has opened."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from aioqueue.app import AioQueue
from aioqueue.database import Database

from .kit import Queue
from .pointing import check_sessions, use


@contextlib.asynccontextmanager
async def queue(
    app: AioQueue[Any],
    dsn: str | None = None,
    *,
    worker_dsn: str | None = None,
    owner_dsn: str | None = None,
    workers: bool = False,
) -> AsyncIterator[Queue]:
    """Open an app in a test, on the database of `dsn` (None: where it points already), and hold its queue.

    `app.worker()` claims nothing meanwhile, unless `workers`; see `use`. Where the application's role may not run jobs (a
    client), `worker_dsn` is of one that may, and `owner_dsn` of the owner of aioqueue's schema, which is needed to put the time
    of scheduled jobs forward. At the end, what was to go wrong and has not is a TestingError.
    Raises ConfigurationError where the engine of `session=` leads to another database than the test's.
    """
    async with AsyncExitStack() as stack:
        if dsn is not None:
            stack.enter_context(use(app, dsn, workers=workers))
        await app.join()
        stack.push_async_callback(app.leave)
        databases = []
        for other in (worker_dsn, owner_dsn):
            database = None if other is None else Database(other, app.settings.pool)
            if database is not None:
                await database.open()
                stack.push_async_callback(database.close)
            databases.append(database)
        worker, owner = databases
        await check_sessions(app, worker or app.database)
        held = Queue(app, stack, worker=worker, owner=owner)
        yield held
        held.check_faults()
