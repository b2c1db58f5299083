"""How long a start waits for the database, and what it says meanwhile."""

import logging

import psycopg
import pytest

from aioqueue.patience import once_reached

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
