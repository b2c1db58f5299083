"""notifications: how full the server's queue is; a listener that stands in a transaction keeps it from being emptied."""

import pytest

from tests.sql.checks.conftest import Ask
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_it_fills_while_a_listener_does_not_hear(ask: Ask, one: Session, superuser: Session) -> None:
    await one.rows("LISTEN something")
    await one.begin()
    ((before,),) = await ask("notifications")
    await superuser.rows("SELECT pg_notify('something', repeat('x', 7000) || i) FROM generate_series(1, 40) i")
    ((after,),) = await ask("notifications")
    assert 0 <= before < after < 1
    assert after == await superuser.value("SELECT pg_notification_queue_usage()")
