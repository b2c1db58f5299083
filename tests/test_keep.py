"""Loops that fail are started again, and a stop outlasts every cancellation."""

import asyncio
import logging

import anyio
import pytest

from aioqueue import keep
from aioqueue.keep import keep_running, outlast
from tests.kit import passed

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "SHORTEST_PAUSE", 0.001)
    monkeypatch.setattr(keep, "LONGEST_PAUSE", 0.002)


async def test_a_loop_that_fails_returns_or_cancels_itself_is_started_again_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    third = asyncio.Event()

    async def loop() -> None:
        runs.append(len(runs))
        match len(runs):
            case 1:
                raise ZeroDivisionError("a bug")
            case 2:
                return
            case 3:
                raise asyncio.CancelledError
            case _:
                third.set()
                await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR, "aioqueue"):
        task = asyncio.create_task(keep_running(loop, "loop"))
        await passed(third)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "the loop failed", "the loop has returned, which it never should", "the loop was cancelled by nobody",
    ]  # fmt: skip
    assert caplog.records[0].exc_info is not None and caplog.records[0].exc_info[0] is ZeroDivisionError
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and len(runs) == 4


@pytest.mark.parametrize("how", ["native", "scope"])
async def test_a_stop_outlasts_every_cancellation_and_then_passes_it_on(how: str) -> None:
    goes_on, counted = asyncio.Event(), 0

    async def stop() -> str:
        await goes_on.wait()
        return "stopped"

    def count() -> None:
        nonlocal counted
        counted += 1

    inner = asyncio.create_task(stop())
    scope = anyio.CancelScope()

    async def host() -> None:
        with scope:
            await outlast(inner, count)
            await anyio.lowlevel.checkpoint()

    task = asyncio.create_task(host())
    for _ in range(3):
        await asyncio.sleep(0)
        if how == "native":
            task.cancel()
        else:
            scope.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    goes_on.set()
    await asyncio.wait([task])
    assert inner.result() == "stopped"
    assert (task.cancelled(), scope.cancelled_caught, counted) == (how == "native", how == "scope", 3 if how == "native" else 0)


async def test_the_result_and_the_error_of_what_was_waited_for_come_through() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def give() -> int:
        return 3

    assert await outlast(asyncio.create_task(give())) == 3
    with pytest.raises(ZeroDivisionError):
        await outlast(asyncio.create_task(fail()))
