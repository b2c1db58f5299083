"""The database that an app is opened on: the one it was given or finds, or the embedded server, which it starts and leaves.

Brings the schema up to date where that was asked for, and always on the embedded server. Opens no pool: services.py does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from . import embedded, migrate
from .dsn import find_dsn, find_listen_dsn, no_dsn


@dataclass(slots=True)
class Location:
    """Where an app was told to look; in each process of its own (`dataclasses.replace`), for a server is its starter's."""

    dsn: str | None
    """The DSN that the app was given; None: it looks for one when it is opened."""
    listen_dsn: str | None
    """The DSN that the app was given for wake-ups."""
    data_dir: Path | None
    """The directory of the embedded server that the app was given; None: the default one."""
    schema: str
    auto_migrate: bool
    _server: embedded.EmbeddedServer | None = field(default=None, init=False)

    async def find(self) -> tuple[str, str | None]:
        """Return the DSN to open, and that for wake-ups if it is another; `leave` follows, also when this fails.

        Raises ConfigurationError, SchemaError, psycopg.OperationalError.
        """
        dsn = find_dsn(self.dsn)
        if dsn is not None:
            if self.auto_migrate:
                await migrate.migrate(dsn, schema=self.schema)
            return dsn, find_listen_dsn(self.listen_dsn)
        if not embedded.available():
            raise no_dsn()
        if self._server is None:
            self._server = await asyncio.to_thread(embedded.start, self.data_dir)
        await self._migrate(self._server)
        return self._server.dsn("worker"), None

    async def _migrate(self, server: embedded.EmbeddedServer) -> None:
        owner = server.dsn("owner")
        before = await migrate.migrate(owner, schema=self.schema)
        if before.pending:
            await migrate.grant(owner, role="aioqueue_worker", schema=self.schema, kind="worker")
            await migrate.grant(owner, role="aioqueue_client", schema=self.schema, kind="client")

    def leave(self) -> None:
        """Need the embedded server no more; the last process that leaves it stops it."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
