"""Events and observers: each observer sees each event, and a broken one harms nobody."""

import asyncio
import dataclasses
import inspect
import logging
from typing import Any

import pytest

from aioqueue import ConfigurationError, events
from aioqueue.eventlog import EventLog
from aioqueue.events import Event, JobsPromoted, Observers, OfJob

KINDS = [
    value
    for value in vars(events).values()
    if inspect.isclass(value) and issubclass(value, Event) and value not in (Event, OfJob)
]


def test_every_observer_sees_every_event_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    observers = Observers([first.append])
    observers.emit(JobsPromoted(1))
    observers.add(second.append)
    observers.emit(JobsPromoted(2))
    assert first == [JobsPromoted(1), JobsPromoted(2)]
    assert second == [JobsPromoted(2)]


def test_claims_and_successes_are_made_only_for_who_looks_at_them(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.INFO, "aioqueue"):
        assert not Observers().see_successes
        assert not Observers([log]).see_successes and Observers([log]).any
        assert Observers([log, print]).see_successes
    with caplog.at_level(logging.DEBUG, "aioqueue"):
        assert Observers([log]).see_successes


def test_an_observer_that_raises_is_logged_and_the_others_see_the_event(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(_event: Event) -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR, "aioqueue"):
        Observers([broken, seen.append]).emit(JobsPromoted(1))
    assert seen == [JobsPromoted(1)]
    (record,) = caplog.records
    assert "JobsPromoted" in record.getMessage() and record.exc_info is not None


def test_an_observer_that_fails_with_every_event_is_logged_a_few_times_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_event: Event) -> None:
        raise ValueError("broken")

    observers = Observers([broken])
    with caplog.at_level(logging.ERROR, "aioqueue"):
        for _ in range(250):
            observers.emit(JobsPromoted(1))
    assert len(caplog.records) == 3
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]
    assert "has failed 100 times" in caplog.records[2].getMessage()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()], ids=repr)
def test_whatever_an_observer_raises_goes_no_further(error: BaseException) -> None:
    def broken(_event: Event) -> None:
        raise error

    Observers([broken]).emit(JobsPromoted(1))


def test_an_interrupt_is_not_the_observers() -> None:
    def interrupted(_event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([interrupted]).emit(JobsPromoted(1))


def test_what_cannot_be_an_observer_is_refused() -> None:
    async def awaited(_event: Event) -> None: ...

    wrong: Any
    for wrong in (awaited, 7):
        with pytest.raises(ConfigurationError, match="observers: "):
            Observers([wrong])
        with pytest.raises(ConfigurationError, match="observers: "):
            Observers().add(wrong)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_events_are_frozen_values(kind: type[Event]) -> None:
    assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__ + "(")
    fields = dataclasses.fields(kind)
    event = kind(*(None for _ in fields))
    assert event == kind(*(None for _ in fields)) and hash(event) == hash(kind(*(None for _ in fields)))
    for field in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, 1)
