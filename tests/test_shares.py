"""Shares of the pool: who is let in, in which order, and that a cancelled wait takes and loses nothing."""

import asyncio
from collections.abc import Awaitable

import pytest

from aioqueue.shares import Kind, Shares

pytestmark = pytest.mark.anyio


class Line:
    """Those who have asked, by name, and who of them is in."""

    def __init__(self, limit: int) -> None:
        self.shares = Shares(limit)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str) -> None:
        """Ask for `name`, which begins with j (a job) or c (a caller); returns once it is in or waits."""

        async def enter() -> None:
            await self.shares.enter(self._kind(name))
            self.inside.append(name)

        self.tasks[name] = asyncio.create_task(enter())
        await self.turn()

    async def leave(self, name: str) -> None:
        self.inside.remove(name)
        self.shares.leave(self._kind(name))
        await self.turn()

    async def turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    def _kind(self, name: str) -> Kind:
        return "job" if name[0] == "j" else "caller"


async def asked(line: Line, *names: str) -> list[str]:
    for name in names:
        await line.ask(name)
    return line.inside


async def test_jobs_and_callers_share_and_one_caller_is_let_in_beyond() -> None:
    line = Line(2)
    assert await asked(line, "j1", "j2", "c1", "c2", "j3") == ["j1", "j2", "c1"]
    await line.leave("c1")
    assert line.inside == ["j1", "j2", "c2"]
    await line.leave("c2")
    await line.leave("j1")
    assert line.inside == ["j2", "j3"]


async def test_callers_alone_have_the_share_and_no_more() -> None:
    line = Line(2)
    assert await asked(line, "c1", "c2", "c3", "j1") == ["c1", "c2"]
    await line.leave("c1")
    assert line.inside == ["c2", "j1"], "a job before a caller"
    await line.leave("c2")
    assert line.inside == ["j1", "c3"]


async def test_a_stream_of_callers_keeps_no_job_out_and_jobs_keep_no_caller_out() -> None:
    line = Line(1)
    assert await asked(line, "c1", "c2", "c3", "j1", "j2") == ["c1"]
    await line.leave("c1")
    assert line.inside == ["j1", "c2"]
    await line.leave("c2")
    assert line.inside == ["j1", "c3"]
    await line.leave("j1")
    assert line.inside == ["c3"]
    await line.leave("c3")
    assert line.inside == ["j2"]


async def test_each_kind_is_let_in_in_order_and_nobody_overtakes() -> None:
    line = Line(1)
    await asked(line, "j1", "j2", "j3")
    line.inside.remove("j1")
    line.shares.leave("job")
    late: Awaitable[None] = line.ask("j4")
    await late
    assert line.inside == ["j2"]


@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "let in at that moment"])
async def test_a_cancelled_wait_takes_no_place(granted: bool) -> None:
    line = Line(1)
    await asked(line, "j1", "j2", "j3")
    if granted:
        line.inside.remove("j1")
        line.shares.leave("job")
    line.tasks["j2"].cancel()
    await line.turn()
    assert line.tasks["j2"].cancelled()
    if not granted:
        assert line.inside == ["j1"]
        await line.leave("j1")
    assert line.inside == ["j3"]
    await line.leave("j3")
    assert line.shares.free == 1


async def test_who_has_waited_for_too_long_is_not_let_in_any_more() -> None:
    shares: Shares[object] = Shares(1)
    await shares.enter("job")
    late = asyncio.create_task(shares.enter("job", wait=0.001))
    patient = asyncio.create_task(shares.enter("job", wait=60))
    with pytest.raises(TimeoutError):
        await late
    assert shares.jobs == 2
    shares.leave("job")
    assert await patient is None and shares.jobs == 1


async def test_who_is_cancelled_as_its_wait_is_over_was_not_let_in() -> None:
    shares: Shares[object] = Shares(1)
    await shares.enter("job")
    late = asyncio.create_task(shares.enter("job", wait=60))
    await asyncio.sleep(0)
    (waiting,) = shares._waiting["job"]
    waiting.turn.set_exception(TimeoutError())  # as its timer does
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert shares.jobs == 1 and shares.left_over == []


async def test_who_is_promised_a_place_may_still_wait_for_too_long() -> None:
    shares: Shares[object] = Shares(1)
    await shares.enter("job")
    late = asyncio.create_task(shares.enter("job", wait=0.001))
    await asyncio.sleep(0)
    promised = shares.first()
    assert promised is not None
    with pytest.raises(TimeoutError):
        await late
    assert not shares.pass_on(promised, object())
    shares.put_back(promised)
    shares.leave("job")
    assert shares.jobs == 0
