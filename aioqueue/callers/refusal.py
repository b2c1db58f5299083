"""What the server said when it refused a statement, whatever error the caller's library has made of it."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """The server's answer."""

    sqlstate: str
    message: str
    """The first line of its message."""


def refusal(error: BaseException) -> Refusal | None:
    """Find the driver's error in this one or below it; None where the server has said nothing."""
    found: Refusal | None = None
    below: BaseException | None = error
    while below is not None:
        # psycopg and asyncpg say sqlstate, psycopg2 pgcode; SQLAlchemy and Django wrap these.
        state = getattr(below, "sqlstate", None) or getattr(below, "pgcode", None)
        if isinstance(state, str):
            said = getattr(getattr(below, "diag", None), "message_primary", None) or getattr(below, "message", None) or below
            found = Refusal(state, str(said).partition("\n")[0])
        below = getattr(below, "orig", None) or below.__cause__
    return found
