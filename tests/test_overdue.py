"""One timer for all: who is late is told so, who is done is not, each in its own event loop."""

import asyncio
import gc
import socket
import time
import weakref

import pytest
import uvloop

from aioqueue.overdue import Overdue
from tests.kit import turn_until

pytestmark = pytest.mark.anyio


class Late:
    """The names of those that were late."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._told = asyncio.Event()
        self.overdue: Overdue[str] = Overdue(self._take)

    def _take(self, name: str) -> None:
        self.names.append(name)
        self._told.set()

    async def next(self) -> list[str]:
        async with asyncio.timeout(10):
            await self._told.wait()
        self._told.clear()
        return self.names


async def test_only_who_is_late_is_told() -> None:
    late = Late()
    for name in ("one", "two", "done"):
        late.overdue.add(name, 0.01).pop("done", None)
    late.overdue.add("later", 60)
    while len(await late.next()) < 2:
        pass
    assert late.names == ["one", "two"]


async def test_one_that_ends_sooner_is_not_kept_waiting_by_those_before() -> None:
    late = Late()
    late.overdue.add("later", 60)
    late.overdue.add("soon", 0.001)
    assert await late.next() == ["soon"]
    late.overdue.add("again", 0.001)
    assert await late.next() == ["soon", "again"]


async def test_what_lies_ready_when_something_has_blocked_the_loop_is_in_time() -> None:
    late = Late()
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ends = late.overdue.add("ready", 0.01)
    late.overdue.add("late", 0.01)

    def take() -> None:
        loop.remove_reader(ours)
        loop.call_soon(ends.pop, "ready")  # as somebody who is woken by it

    loop.add_reader(ours, take)
    theirs.send(b"x")
    time.sleep(0.3)  # noqa: ASYNC251 - this is what blocks
    assert await late.next() == ["late"]
    assert not ends
    ours.close()
    theirs.close()


def test_each_event_loop_has_its_own() -> None:
    names: list[str] = []
    overdue: Overdue[str] = Overdue(names.append)

    async def wait(name: str) -> None:
        overdue.add("never", 60)
        overdue.add(name, 0.001)
        await turn_until(lambda: names[-1:] == [name])

    for name in ("one", "two"):
        asyncio.run(wait(name))
    assert names == ["one", "two"]


def test_event_loops_that_are_closed_are_let_go() -> None:
    overdue: Overdue[str] = Overdue(print)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def wait() -> None:
        overdue.add("never", 60)
        loops.append(weakref.ref(asyncio.get_running_loop()))

    for _ in range(4):
        asyncio.run(wait())
    gc.collect()
    assert [loop() is None for loop in loops] == [True, True, True, False]


def test_who_begins_to_wait_after_something_has_blocked_the_loop_has_all_the_time() -> None:
    overdue: Overdue[str] = Overdue(print)

    async def wait() -> float:
        time.sleep(0.1)  # noqa: ASYNC251 - this is what blocks: uvloop's own time stands still
        now = time.monotonic()
        return overdue.add("ours", 60)["ours"] - now

    assert uvloop.run(wait()) >= 60
