"""The one shape of the callers' libraries: a statement is run in the caller's transaction, whose end is then seen.

Every parameter and every answer is text, so that no codec which the caller has set for another type has a say.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioqueue.sql import place

from .transactions import OpenTransaction


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement, cut where its parameters stand; each library has another sign for them."""

    parts: tuple[str, ...]

    def joined(self, sign: Callable[[int], str], mend: Callable[[str], str] = str) -> str:
        """Return the text with `sign(n)` for parameter n, from 1, and what stands between mended."""
        text = mend(self.parts[0])
        for number, part in enumerate(self.parts[1:], 1):
            text += sign(number) + mend(part)
        return text

    @property
    def percent(self) -> str:
        """The text with %s; a schema's name has no percent sign (settings.py)."""
        return self.joined(lambda _: "%s")


class Statements:
    """All that is run on a caller's connection, for one schema; each answers with one text or NULL."""

    def __init__(self, schema: str) -> None:
        def made(text: str) -> Statement:
            return Statement(tuple(place(text, schema).split("%s")))

        self.enqueue_alike = made(
            "SELECT aioqueue.enqueue_alike(CAST(CAST(%s AS text) AS uuid[]), CAST(%s AS text), CAST(%s AS text),"
            " CAST(%s AS text), CAST(%s AS text), CAST(CAST(%s AS text) AS integer), CAST(CAST(%s AS text) AS interval),"
            " CAST(CAST(%s AS text) AS timestamptz), CAST(CAST(%s AS text) AS integer), CAST(%s AS text),"
            " CAST(CAST(%s AS text) AS integer))"
        )
        """NewJobs.parameters → XID"""
        self.cancel_job = made(
            "SELECT c.state || ' ' || coalesce(pg_catalog.pg_current_xact_id_if_assigned()::text, '')"
            " FROM aioqueue.cancel_job(CAST(CAST(%s AS text) AS uuid), CAST(%s AS text)) AS c (state)"
        )
        """id, tenant or NULL → state after it, a space, and the XID if there is one; NULL: unknown to the tenant"""
        self.retry_job = made(
            "SELECT r.id::text || ' ' || coalesce(pg_catalog.pg_current_xact_id_if_assigned()::text, '')"
            " FROM aioqueue.retry_job(CAST(CAST(%s AS text) AS uuid), CAST(%s AS text)) AS r (id)"
        )
        """id, tenant or NULL → id of the new job, a space, and the XID; NULL: unknown to the tenant"""
        self.known_tasks = made("SELECT pg_catalog.to_json(ARRAY(SELECT aioqueue.known_tasks()))::text")
        """→ JSON array of the names"""
        self.notify = made("SELECT aioqueue.notify(CAST(%s AS text))::text")
        """kind of the hint → nothing"""


class AsyncCaller(ABC):
    """A connection or session that is awaited."""

    @abstractmethod
    async def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement in the caller's transaction, or by itself where the caller has none open in autocommit."""
        raise NotImplementedError

    @abstractmethod
    def transaction(self) -> OpenTransaction:
        """What shows the end of the transaction that `fetch` ran in."""
        raise NotImplementedError

    def after_commit(self, call: Callable[[object], None]) -> None:  # noqa: B027 - most cannot tell
        """Call back right after each commit, in the same thread, where the library can tell; otherwise it is looked for."""


class SyncCaller(ABC):
    """A connection or session that blocks."""

    @abstractmethod
    def fetch(self, statement: Statement, *params: str | None) -> str | None:
        """Run the statement in the caller's transaction, or by itself where the caller has none open in autocommit."""
        raise NotImplementedError

    @abstractmethod
    def transaction(self) -> OpenTransaction:
        """What shows the end of the transaction that `fetch` ran in."""
        raise NotImplementedError

    def notify_after_commit(self, statement: Statement) -> None:  # noqa: B027 - most cannot
        """Let the caller's own connection give the hint after its commit, where the library can; for a closed app."""


def is_a(value: object, module: str, name: str) -> bool:
    """Whether the value is of that class, of a module that is not imported here."""
    cls: Any = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)
