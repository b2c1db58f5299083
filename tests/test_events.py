"""Events and observers: each observer sees each event, and a broken one harms nobody."""

import dataclasses
import inspect
import logging

import pytest

from aioqueue import events
from aioqueue.events import Event, JobsPromoted, Observers

KINDS = [value for value in vars(events).values() if inspect.isclass(value) and issubclass(value, Event) and value is not Event]


def test_every_observer_sees_every_event_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    observers = Observers([first.append])
    observers.emit(JobsPromoted(1))
    observers.add(second.append)
    observers.emit(JobsPromoted(2))
    assert first == [JobsPromoted(1), JobsPromoted(2)]
    assert second == [JobsPromoted(2)]


def test_an_observer_that_raises_is_logged_and_the_others_see_the_event(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(_event: Event) -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR, "aioqueue"):
        Observers([broken, seen.append]).emit(JobsPromoted(1))
    assert seen == [JobsPromoted(1)]
    (record,) = caplog.records
    assert "JobsPromoted" in record.getMessage() and record.exc_info is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_events_are_frozen_values(kind: type[Event]) -> None:
    assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__ + "(")
    fields = dataclasses.fields(kind)
    event = kind(*(None for _ in fields))
    assert event == kind(*(None for _ in fields)) and hash(event) == hash(kind(*(None for _ in fields)))
    for field in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, 1)
