"""What web applications answer about jobs, without any framework: streams in silence, at the server's stop, of a closed app."""

import asyncio
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from aioqueue import AioQueue
from aioqueue.contrib import web
from aioqueue.contrib.web import EVERY_TENANT, Jobs, Told
from tests.kit import PATIENCE

pytestmark = pytest.mark.anyio


async def then(events: AsyncIterator[Told]) -> Told:
    async with asyncio.timeout(PATIENCE):
        return await anext(events)


async def rest(events: AsyncIterator[Told]) -> list[Told]:
    async with asyncio.timeout(PATIENCE):
        return [told async for told in events]


@pytest.fixture
async def events(app: AioQueue, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Told]:
    """The stream of a job that waits, its first event read, which looks often whether something is to be done."""
    monkeypatch.setattr(web, "SLICE", 0.01)
    jobs = Jobs(app, show_errors=False)
    found = jobs.find((await app.get("add").enqueue(1)).id, EVERY_TENANT)
    events = jobs.follow(found)
    first = await then(events)
    assert (first.name, first.data["state"], first.retry) == ("state", "ready", web.RECONNECT)
    return events


async def test_a_silent_stream_gives_signs_of_life_and_then_goes_on(
    app: AioQueue, events: AsyncIterator[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "HEARTBEAT", 0.02)
    for _ in range(2):
        told = await then(events)
        assert (told.name, told.encode()) == (None, b": still here\n\n")
    async with app.worker():
        named = [told for told in await rest(events) if told.name is not None]
    assert (named[-1].name, named[-1].data["state"], named[-1].id) == ("result", "succeeded", web.LAST)


async def test_without_silence_there_is_no_sign_of_life(app: AioQueue, events: AsyncIterator[Told]) -> None:
    """The same looks, and less silence than a heartbeat."""
    next_one = asyncio.create_task(then(events))
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks > 5

    with pytest.MonkeyPatch.context() as patched, pytest.raises(StopAsyncIteration):
        patched.setattr(web, "_server_stops", look)
        await next_one
    assert looks > 5


async def test_a_stream_ends_when_uvicorn_is_told_to_stop(events: AsyncIterator[Told], monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(SimpleNamespace):
        """As uvicorn's, whose method handles the signal."""

        def handle_exit(self, number: int, frame: object) -> None:
            raise NotImplementedError

    server = Server(should_exit=True)
    monkeypatch.setattr(signal, "getsignal", lambda _: server.handle_exit)
    assert await rest(events) == []


async def test_a_stream_of_an_app_that_was_closed_between_two_events_ends(app: AioQueue, events: AsyncIterator[Told]) -> None:
    await app.close()
    assert await rest(events) == []
