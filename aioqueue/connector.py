"""How the runtime's connections are opened: what is added to the DSN, and why the server refuses the pool's.

Opens none by itself: the pool does, with the class that is made here, and server.py.
"""

from __future__ import annotations

import logging
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .errors import ConfigurationError
from .pool_connection import PoolConnection
from .pooler import SESSION

POOL = "aioqueue"
"""The pool's name in psycopg's log."""
POOL_LOGGER = logging.getLogger("psycopg.pool")

# What RESET ALL returns to, with what the runtime's statements run under. With the check of the client these let a vanished
# host's locks go in 11-20 s; PostgreSQL's own defaults take two hours.
KEEPALIVES = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
# Whatever the role, the database or the DSN says: a claim looks anew where another was first, and a tick's snapshot is its last.
ISOLATION = "-c default_transaction_isolation=read\\ committed"
CLIENT = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "aioqueue",
}


def connection_string(dsn: str, *, pooler: bool = False) -> str:
    """Add the runtime's values to a DSN; what the DSN says itself wins, isolation level and encoding apart.

    To a `pooler` no options of ours are sent: pooler.py sets them. Raises ConfigurationError for one that libpq refuses.
    """
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # whose message shows the DSN
        raise ConfigurationError("the DSN is not one that PostgreSQL understands: expected postgresql://user@host/db") from None
    if pooler:
        return make_conninfo("", **{**CLIENT, **given, "client_encoding": "UTF8"})
    options = [f"-c {name}={value}" for name, value in {**SESSION, **KEEPALIVES}.items()]
    if "options" in given:
        options.append(str(given.pop("options")))
    return make_conninfo("", **{**CLIENT, **given, "client_encoding": "UTF8", "options": " ".join([*options, ISOLATION])})


class Connector:
    """Opens the pool's connections, and remembers why the server refuses them: a pool says only that it waited in vain."""

    def __init__(self, base: type[PoolConnection] = PoolConnection) -> None:
        self.refusal: psycopg.Error | None = None
        """Why the last attempt failed; None after one that succeeded."""
        self._said = False
        connector = self

        class Remembering(base):  # type: ignore[valid-type, misc]
            @classmethod
            async def connect(cls, *args: Any, **options: Any) -> Any:
                try:
                    conn = await super().connect(*args, **options)
                except psycopg.Error as error:
                    connector.refusal = error
                    raise
                connector.refusal, connector._said = None, False
                return conn

        self.connection_class: type[PoolConnection] = Remembering

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the pool log the first refusal of an outage and nothing of its further attempts."""
        given = record.args if isinstance(record.args, tuple) else ()
        if record.levelno != logging.WARNING or not any(
            isinstance(value, self.connection_class) or value == POOL or str(value).startswith(f"{POOL}-") for value in given
        ):
            return True
        first = any(isinstance(value, psycopg.Error) for value in given) and not self._said
        self._said = self._said or first
        return first
