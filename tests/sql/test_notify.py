"""notify: a hint of constant size, on a channel of this schema."""

import hashlib

import psycopg
import pytest

from aioqueue.sql import quote_schema
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", ["ready", "done", "progress"])
async def test_listeners_of_the_channel_get_it(one: Session, guest: Session, kind: str, schema: str) -> None:
    digest = hashlib.md5(f"{quote_schema(schema)}.".encode(), usedforsecurity=False).hexdigest()[:16]
    await one.rows(f"LISTEN aioqueue_{digest}_{kind}")
    await guest.store.notify(guest.conn, kind)
    async for hint in one.conn.notifies(timeout=10, stop_after=1):
        assert (hint.channel, hint.payload) == (f"aioqueue_{digest}_{kind}", "")
        break
    else:
        raise AssertionError("no hint came")


async def test_other_kinds_are_refused(guest: Session) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="expected ready, done or progress, got other"):
        await guest.store.notify(guest.conn, "other")
