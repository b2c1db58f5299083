"""An outage is said once and its end once; pauses grow, and begin anew with the next one."""

import asyncio

import pytest

from aioqueue.events import DatabaseLost, DatabaseRecovered, Observers
from aioqueue.outage import LONGEST_PAUSE, Outage
from tests.kit import Seen

pytestmark = pytest.mark.anyio


async def test_it_is_said_once_and_so_is_its_end() -> None:
    seen = Seen()
    outage = Outage(Observers([seen]), "loop")
    outage.over()
    assert not outage.under_way and seen.events == []
    outage.lost(OSError("first"))
    outage.lost(OSError("second"))
    assert outage.under_way and seen.events == [DatabaseLost("loop", "first")]
    outage.over()
    outage.over()
    assert not outage.under_way and [type(event) for event in seen.events] == [DatabaseLost, DatabaseRecovered]
    outage.lost(OSError("third"))
    assert seen.events[-1] == DatabaseLost("loop", "third")


async def test_pauses_double_up_to_the_longest_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr("random.random", lambda: 0.5)
    outage = Outage(Observers(), "loop", shortest=0.5)
    for _ in range(4):
        outage.lost(OSError())
        await outage.pause()
    outage.over()
    await outage.pause()
    assert pauses == [0.5, 1.0, LONGEST_PAUSE, LONGEST_PAUSE, 0.5]
