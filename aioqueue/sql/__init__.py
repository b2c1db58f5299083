"""The SQL of aioqueue as files; this module only finds them and puts the schema's quoted name in.

Files say `aioqueue.` literally and paste into psql as they are; exactly that token is replaced.
migrations/ makes the tables, functions/ the functions (made anew by every migration); statements/ is run as it is, and so is
checks/, the doctor's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from psycopg import sql

_ROOT = resources.files(__name__)
TOKEN = "aioqueue."  # noqa: S105 - a placeholder in the files, not a secret


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file; `serves` is the oldest code version that still runs on the schema after it."""

    version: int
    serves: int
    name: str
    text: str


def quote_schema(schema: str) -> str:
    """Return the schema's name as an SQL identifier."""
    return sql.Identifier(schema).as_string(None)


def place(text: str, schema: str) -> str:
    """Put the schema's quoted name where the text says `aioqueue.`."""
    return text.replace(TOKEN, quote_schema(schema) + ".")


def as_sql(text: str, schema: str) -> sql.SQL:
    """Return one of the package's own texts as a statement, with the quoted schema name put in."""
    return sql.SQL(place(text, schema))  # pyright: ignore[reportArgumentType] - our own file, not input


@cache
def functions() -> dict[str, str]:
    """Return every function's file by name."""
    return _files("functions")


@cache
def statements() -> dict[str, str]:
    """Return every plain statement's file by name."""
    return _files("statements")


@cache
def checks() -> dict[str, str]:
    """Return the file of every statement of the doctor's by name."""
    return _files("checks")


def _files(folder: str) -> dict[str, str]:
    return {
        entry.name.removesuffix(".sql"): entry.read_text("utf-8")
        for entry in sorted((_ROOT / folder).iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".sql")
    }


@cache
def tables() -> frozenset[str]:
    """Return the names of the tables that the migrations make; the schema may hold other people's too."""
    begin = re.compile(r"^CREATE (?:UNLOGGED )?TABLE aioqueue\.(\w+)", re.MULTILINE)
    made = {name for m in migrations() for name in begin.findall(m.text)}
    return frozenset({*made, "schema_version"})


@cache
def migrations() -> tuple[Migration, ...]:
    """Return the migrations in order; the first line of each file says which code it still serves."""
    found = []
    for entry in sorted((_ROOT / "migrations").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".sql"):
            text = entry.read_text("utf-8")
            number, _, name = entry.name.removesuffix(".sql").partition("_")
            first = text.partition("\n")[0]
            if not first.startswith("-- serves: "):
                raise RuntimeError(f"migration {entry.name} must begin with '-- serves: N'")
            found.append(Migration(int(number), int(first.removeprefix("-- serves: ")), name, text))
    return tuple(found)
