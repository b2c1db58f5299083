"""Whether the schema fits this code."""

from __future__ import annotations

from aioqueue import migrate
from aioqueue.errors import SchemaError
from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination

VERSION = Kind(
    "schema-version",
    Severity.ERROR,
    "workers and applications of this code do not start on a schema that does not fit",
)


async def look(examination: Examination) -> list[Finding]:
    """Hold the schema's version against this code's."""
    try:
        await migrate.check(examination.conn, schema=examination.store.schema)
    except SchemaError as error:
        what, _, fix = str(error).partition(": ")
        return [VERSION.found(what, fix=fix)]
    return []
