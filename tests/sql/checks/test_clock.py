"""clock: the server's clock at the moment, whatever the session's time zone, also within a transaction that began before."""

import time

import pytest

from tests.doctor.conftest import examination
from tests.postgres import Database
from tests.sql.checks.conftest import EVERYBODY

pytestmark = pytest.mark.anyio
ROUNDED = 0.001


@pytest.mark.parametrize("role", EVERYBODY)
async def test_it_is_the_time_of_the_call(database: Database, schema: str, role: str) -> None:
    """The test's server has this machine's clock."""
    async with examination(database, schema, role) as made, made.conn.transaction():
        await made.conn.execute("SET LOCAL TimeZone = 'Asia/Kathmandu'")
        before = time.time()
        (first,), (second,) = await made.rows("clock"), await made.rows("clock")
        after = time.time()
    assert first.keys() == {"seconds"}
    assert before - ROUNDED <= first["seconds"] < second["seconds"] <= after + ROUNDED
