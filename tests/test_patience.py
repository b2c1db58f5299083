"""How long a start waits for the database, and what it says meanwhile."""

import logging

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from aioqueue import AioQueue, PoolSettings
from aioqueue.patience import once_reached, refused

pytestmark = pytest.mark.anyio


class Server:
    """Refuses so many attempts."""

    def __init__(self, refusals: int, error: type[psycopg.Error] = psycopg.OperationalError) -> None:
        self.refusals = refusals
        self.attempts = 0
        self.told: list[str] = []
        self._error = error

    async def answer(self) -> int:
        self.attempts += 1
        if self.attempts <= self.refusals:
            raise self._error(f"refusal\n {self.attempts}")
        return self.attempts


async def test_refusals_are_outlasted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(4)
    assert await once_reached(server.answer, 60, server.told.append) == 5
    assert server.told == [f"refusal {number}" for number in range(1, 5)]
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "cannot reach the database, and go on trying for 60 s: refusal 1")
    ]


async def test_the_last_error_is_raised_after_the_limit() -> None:
    server = Server(10**9)
    with pytest.raises(psycopg.OperationalError):
        await once_reached(server.answer, 0.3, server.told.append)
    assert server.attempts >= 2
    assert len(server.told) == server.attempts - 1


async def test_without_patience_the_first_error_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(1)
    with pytest.raises(psycopg.OperationalError):
        await once_reached(server.answer, 0, server.told.append)
    assert (server.attempts, caplog.records) == (1, [])


async def test_what_waiting_does_not_mend_is_raised_at_once() -> None:
    server = Server(1, psycopg.errors.InsufficientPrivilege)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await once_reached(server.answer, 60, server.told.append)
    assert server.attempts == 1


@pytest.mark.parametrize("name", ["dbname", "user"])
async def test_a_database_or_role_that_is_not_there_is_not_waited_for(worker_dsn: str, schema: str, name: str) -> None:
    """The server answers; libpq gives no SQLSTATE of it."""
    app = AioQueue(make_conninfo(worker_dsn, **{name: "nobody_s"}), schema=schema, pool=PoolSettings(start_timeout=3600))
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        await app.open()


@pytest.mark.parametrize(
    ("said", "final"),
    [
        ('connection failed: FATAL:  password authentication failed for user "x"', True),
        ('connection failed: FATAL:  no pg_hba.conf entry for host "::1", user "x", database "y", no encryption', True),
        ("connection failed: fe_sendauth: no password supplied", True),
        ("connection failed: FATAL:  the database system is starting up", False),
        ('connection failed: connection to server on socket "/run/.s.PGSQL.5432" failed: No such file or directory', False),
        ('could not translate host name "does not exist": Name or service not known', False),
    ],
)
def test_what_is_a_refusal_of_the_dsn(said: str, final: bool) -> None:
    assert refused(psycopg.OperationalError(said)) is final
